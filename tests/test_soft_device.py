"""The built-in device in C, by C: each check of tests/c/softverbs_check.c, twice."""

import os
import re
import subprocess
from pathlib import Path

import pytest

pytestmark = pytest.mark.no_device

CHECK = Path(__file__).parent / "c" / "softverbs_check.c"
DEVICE = Path(__file__).parent.parent / "rdmaview" / "softverbs"
NAMES = re.findall(r"^    X\((\w+)\),$", CHECK.read_text(), re.MULTILINE)
BUILDS = {"plain": [], "sanitized": ["-fsanitize=address,undefined"]}


@pytest.fixture(scope="module", params=BUILDS)
def program(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("softverbs") / "check"
    subprocess.run(
        [
            *("gcc", "-std=gnu11", "-Wall", "-Wextra", "-g", "-O1", "-pthread"),
            *BUILDS[request.param],
            *("-I", DEVICE, "-o", path, CHECK, *sorted(DEVICE.glob("[a-z]*.c"))),
        ],
        check=True,
    )
    return path


@pytest.mark.parametrize("name", NAMES)
def test_in_c(program, name):
    done = subprocess.run(
        [program, name],
        env=os.environ | {"ASAN_OPTIONS": "detect_leaks=0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{name}\n", "")


def test_every_check_is_found():
    functions = re.findall(
        r"^static void (\w+)\(void\)$", CHECK.read_text(), re.MULTILINE
    )
    assert {*NAMES} <= {*functions}
    assert len(NAMES) > 40
