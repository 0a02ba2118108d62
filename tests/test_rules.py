"""What keeps the house in order: rooms, links, and what an import costs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import rdmaview as rv

pytestmark = pytest.mark.no_device

PACKAGE = Path(rv.__file__).parent

# Imports only point down this list.
ROOMS = [
    "__main__",
    "__init__",
    "cli",
    "_cache",
    "segments",
    "scanners",
    "torch",
    "_segments",
    "softverbs",
    "_queue",
    "_verbs",
    "_arrays",
    "_view",
    "_memory",
    "_errors",
    "_host",
    "_library",
    "libibverbs",
]
SOURCES = sorted(
    path
    for folder in (PACKAGE, PACKAGE / "softverbs")
    for kind in ("py", "pyx", "pxd")
    for path in folder.glob(f"*.{kind}")
)

IMPORT = re.compile(
    r"""^[ \t]*(?:
        from[ \t]+(?P<base>rdmaview\b|\.+)\.?(?P<room>\w*)[\w.]*
        [ \t]+c?import[ \t]+(?P<names>\([^)]*\)|.*)
      | c?import[ \t]+rdmaview\b\.?(?P<whole>\w*)
    )""",
    re.MULTILINE | re.VERBOSE,
)


def room_of(path):
    return "softverbs" if path.parent.name == "softverbs" else path.stem


def rooms_imported(path):
    """Every room that a file names in an import, wherever in it."""
    for match in IMPORT.finditer(path.read_text()):
        inside = room_of(path) == "softverbs" and match["base"] == "."
        named = match["room"] or match["whole"]
        if inside:
            yield "softverbs"
        elif named:
            yield named
        else:
            for name in re.findall(r"\w+", match["names"] or "__init__"):
                yield name if name in ROOMS else "__init__"


def test_the_sources_are_found():
    assert {room_of(path) for path in SOURCES} >= {"__init__", "_view", "libibverbs"}
    (init,) = [path for path in SOURCES if room_of(path) == "__init__"]
    assert {"_errors", "_queue", "_verbs", "_view", "softverbs"} <= {
        *rooms_imported(init)
    }


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.name)
def test_imports_only_point_down(path):
    room = room_of(path)
    assert room in ROOMS
    here = ROOMS.index(room)
    upwards = {
        other
        for other in rooms_imported(path)
        if other != room and (other not in ROOMS or ROOMS.index(other) < here)
    }
    assert not upwards


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("softverbs/*.[ch]")), ids=lambda path: path.name
)
def test_the_soft_device_knows_nothing_of_python(path):
    included = re.findall(r'#\s*include\s*[<"]([^>"]+)', path.read_text())
    assert not {"Python.h", "rdmaview.h"} & {*included}


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.glob("*.pyx")), ids=lambda path: path.name
)
def test_a_room_has_declarations_and_stubs(path):
    assert path.with_suffix(".pxd").is_file()
    assert path.with_suffix(".pyi").is_file()


@pytest.mark.parametrize(
    "name",
    [
        "_errors",
        "_library",
        "_memory",
        "_view",
        "_arrays",
        "_verbs",
        "_queue",
        "_segments",
        "_cache",
        "softverbs/_softverbs",
    ],
)
def test_libibverbs_is_not_linked(name):
    (path,) = PACKAGE.glob(f"{name}.*{sys.version_info[0]}{sys.version_info[1]}-*.so")
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", path],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    needed = re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)
    assert any(library.startswith("libc.") for library in needed)
    assert not [library for library in needed if "verbs" in library]


@pytest.fixture(scope="module")
def after_import():
    """Import rdmaview in a process; tell its modules and its memory map."""
    script = (
        "import sys, rdmaview; "
        "print(*sys.modules); print(open('/proc/self/maps').read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    modules, _, maps = done.stdout.partition("\n")
    return modules.split(), maps


def test_importing_rdmaview_imports_no_numpy(after_import):
    modules, _ = after_import
    assert "rdmaview._view" in modules
    assert "numpy" not in modules


def test_importing_rdmaview_opens_no_libibverbs(after_import):
    _, maps = after_import
    assert "rdmaview/_view" in maps
    assert "libibverbs" not in maps
