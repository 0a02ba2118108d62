"""What README.md and CONTRIBUTING.md promise."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PAGES = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}


def code_blocks(page, language):
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


PROGRAMS = code_blocks(README, "python")


@pytest.mark.parametrize("program", PROGRAMS, ids=["first", "many views"])
def test_the_programs_run(device_name, tmp_path, capsys, program):
    assert '"soft0"' in program
    path = tmp_path / "program.py"
    path.write_text(program.replace('"soft0"', repr(device_name)))
    runpy.run_path(str(path))
    (told,) = re.findall(r"print\(.*\)  # (.*)$", program, re.MULTILINE)
    assert capsys.readouterr().out == f"{told}\n"


@pytest.mark.no_device
def test_the_first_commands_are_the_demo_and_the_tests():
    assert code_blocks(README, "sh")[0] == "make demo\nmake test\n"


@pytest.mark.no_device
@pytest.mark.parametrize("name", PAGES)
def test_the_make_targets_are_there(name):
    makefile = (ROOT / "Makefile").read_text()
    commands = code_blocks(PAGES[name], "sh") + re.findall("`(make .*?)`", PAGES[name])
    named = {*re.findall(r"\bmake ([\w-]+)", "\n".join(commands))}
    targets = {*re.findall(r"^([\w-]+):", makefile, re.MULTILINE)}
    assert "test" in named
    assert named <= targets


@pytest.mark.no_device
@pytest.mark.parametrize("name", PAGES)
def test_the_files_are_there(name):
    linked = re.findall(r"\]\(([^)#]+)\)", PAGES[name])
    told = re.findall(
        r"`((?:rdmaview|include|tests|tools|examples|benchmarks)/[\w./-]+)`",
        PAGES[name],
    )
    missing = [path for path in linked + told if not (ROOT / path).exists()]
    assert not missing
