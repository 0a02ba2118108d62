"""The types that a type checker sees."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import typing_example

import rdmaview as rv

TESTS = Path(__file__).parent
PACKAGE = Path(rv.__file__).parent
EXAMPLE = TESTS / "typing_example.py"

needs_mypy = pytest.mark.skipif(
    not find_spec("mypy") or not find_spec("ruff"),
    reason="needs mypy and ruff: pip install rdmaview[lint]",
)


# What is right in the program, what is wrong in its place, and what mypy says of it.
FAULTS = [
    ("qp.post_write(view,", "qp.post_write(remote,", '"RemoteView"; expected'),
    ("reg_mr(array, rights)", "reg_mr(array, 'rw')", '"str"; expected "Access'),
    ("pd.reg_mr(array,", "pd.reg_mr(17,", '"int"; expected "Buffer'),
    ("mr.view(4096, 5)", "mr.view(4096, 5.0)", '"float"; expected "SupportsIndex'),
    ("completion.status", "completion.state", 'has no attribute "state"'),
    ("here.mr is mr", "here.mr.lkey", 'of "MemoryRegion | None" has no attribute'),
]


@pytest.fixture(scope="module")
def findings(tmp_path_factory):
    """List what mypy finds in the program and in each faulty one, by file name."""
    folder = tmp_path_factory.mktemp("programs")
    program = EXAMPLE.read_text()
    programs = {EXAMPLE.name: program}
    for number, (right, wrong, _) in enumerate(FAULTS):
        assert right in program
        programs[f"fault{number}.py"] = program.replace(right, wrong)
    for name, text in programs.items():
        (folder / name).write_text(text)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mypy", "--strict", "--no-error-summary"),
            *("--cache-dir", str(folder / "cache")),
            *(str(folder / name) for name in programs),
        ],
        cwd=TESTS.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout
    found = {name: [] for name in programs}
    for line in done.stdout.splitlines():
        found[Path(line.partition(":")[0]).name].append(line)
    return found


@needs_mypy
@pytest.mark.no_device
def test_the_stubs_are_those_of_the_docstrings():
    done = subprocess.run(
        [sys.executable, TESTS.parent / "tools" / "make-stubs", "--check"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.no_device
def test_the_package_says_that_it_has_types():
    assert (PACKAGE / "py.typed").is_file()


@needs_mypy
@pytest.mark.no_device
def test_mypy_finds_nothing_in_a_program(findings):
    assert findings[EXAMPLE.name] == []


@needs_mypy
@pytest.mark.no_device
@pytest.mark.parametrize("number", range(len(FAULTS)))
def test_mypy_finds_a_fault_in_a_program(findings, number):
    _, _, told = FAULTS[number]
    assert any(told in line for line in findings[f"fault{number}.py"])


def test_the_program_runs(device_name):
    assert typing_example.main(device_name) == b"hello"
