"""The wheel: built from a clean tree, alone in an empty environment."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import rdmaview as rv

pytestmark = [pytest.mark.no_device, pytest.mark.timeout(900)]

REPOSITORY = Path(__file__).parent.parent
EXAMPLES = REPOSITORY / "examples"
ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONPATH"
}


def run(*command, cwd, **environment):
    done = subprocess.run(
        command,
        cwd=cwd,
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Copy what a clone would have, were the work in this tree committed."""
    source = tmp_path_factory.mktemp("source")
    listed = run(
        *("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"),
        cwd=REPOSITORY,
    )
    for name in listed.strip("\0").split("\0"):
        if os.path.lexists(REPOSITORY / name):
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, source / name, follow_symlinks=False)
    return source


@pytest.fixture(scope="module")
def wheel(source, tmp_path_factory):
    where = tmp_path_factory.mktemp("wheel")
    run(
        *(sys.executable, "-m", "pip", "wheel", "--no-deps", "-w", where, source),
        cwd=where,
    )
    (wheel,) = where.iterdir()
    return wheel


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """Make an environment that has the wheel and what it depends on."""
    environment = tmp_path_factory.mktemp("environment")
    run(sys.executable, "-m", "venv", environment, cwd=environment)
    run(environment / "bin/pip", "install", wheel, cwd=environment)
    return environment


def ask(environment, script):
    """Run a script in the environment; what it prints is JSON."""
    return json.loads(
        run(environment / "bin/python", "-I", "-W", "error", "-c", script, cwd="/")
    )


@pytest.fixture(scope="module")
def package(environment):
    """Where the wheel was installed."""
    script = "import json, rdmaview; print(json.dumps(rdmaview.__file__))"
    package = Path(ask(environment, script)).parent
    assert package.is_relative_to(environment)
    return package


def test_the_wheel_finds_the_soft_devices(environment):
    names = ask(
        environment,
        "import json, rdmaview; print(json.dumps("
        "[d.name for d in rdmaview.devices() if d.kind == 'soft']))",
    )
    assert names == ["soft0", "soft1"]


def test_the_wheel_registers_and_slices(environment):
    size = ask(
        environment,
        "import rdmaview as rv\n"
        "with rv.open('soft0') as ctx, ctx.alloc_pd() as pd:\n"
        "    with pd.reg_mr(bytearray(4096)) as mr:\n"
        "        print(mr[1024:].array().nbytes)",
    )
    assert size == 3072


def test_the_wheel_has_the_command(environment):
    assert "soft0" in run(environment / "bin/rdmaview", "devices", cwd="/")


@pytest.mark.parametrize(
    "name",
    [
        "include/rdmaview.h",
        "verbs_header.h",
        "libibverbs.pxd",
        "py.typed",
        *(
            f"_{room}.{kind}"
            for room in (
                "errors",
                "library",
                "view",
                "arrays",
                "verbs",
                "queue",
                "segments",
            )
            for kind in ("pxd", "pyi")
        ),
    ],
)
def test_the_wheel_has_the_file(package, name):
    assert (package / name).is_file()


def test_the_wheel_has_the_soft_device(package):
    assert len([*package.glob("softverbs/*.so")]) == 1


def test_the_wheel_has_no_sources_or_tests(wheel, package):
    assert not [*package.rglob("*.c"), *package.rglob("*.map")]
    assert {path.name for path in package.parent.glob("*rdmaview*")} == {
        "rdmaview",
        "-".join(wheel.name.split("-")[:2]) + ".dist-info",
    }
    assert not (package.parent / "tests").exists()


def test_get_include_of_the_wheel_has_the_header(environment, package):
    script = "import json, rdmaview; print(json.dumps(rdmaview.get_include()))"
    header = Path(ask(environment, script), "rdmaview.h")
    assert header.is_relative_to(package)
    assert header.read_bytes() == (REPOSITORY / "include/rdmaview.h").read_bytes()


def test_get_include_of_an_editable_install_has_the_header():
    assert Path(rv.__file__).is_relative_to(REPOSITORY)
    header = Path(rv.get_include(), "rdmaview.h")
    assert header.samefile(REPOSITORY / "include/rdmaview.h")


@pytest.fixture(scope="module")
def view_shards(environment, tmp_path_factory):
    """The example of a package that walks views in C, installed beside the wheel."""
    source = tmp_path_factory.mktemp("view_shards")
    shutil.copytree(EXAMPLES / "view_shards", source, dirs_exist_ok=True)
    pip, tools = environment / "bin/pip", source / "tools"
    run(pip, "install", "--target", tools, "Cython", "setuptools>=77", cwd=source)
    run(
        *(pip, "install", "--no-build-isolation", "--no-deps", "."),
        cwd=source,
        PYTHONPATH=str(tools),
    )
    return environment


def test_a_package_of_ones_own_deals_packed_views_in_c(view_shards):
    places, sizes, hashes, lengths = ask(
        view_shards,
        "import json\n"
        "from rdmaview import MemoryRegionView\n"
        "from view_shards import deal\n"
        "view = MemoryRegionView(1, 2**40, 2**20, 4096, 5, 6)\n"
        "views = view.views(range(0, 4000, 40), range(100))[::-1]\n"
        "places, sizes = deal(views, 7)\n"
        "print(json.dumps([places.tolist(), sizes.tolist(),"
        " [hash(view) for view in views], [view.size for view in views]]))",
    )
    assert places == [number % 2**64 % 7 for number in hashes]
    assert sizes == [
        sum(size for size, place in zip(lengths, places, strict=True) if place == shard)
        for shard in range(7)
    ]


def test_a_package_of_ones_own_walks_views_in_cython(view_shards):
    place, none, combined, hashes = ask(
        view_shards,
        "import json\n"
        "from rdmaview import MemoryRegionView\n"
        "from view_shards import hash_of_slices, largest\n"
        "view = MemoryRegionView(2**63, 2**63, 3, 4096, 5, 6)\n"
        "views = view.views([0, 8, 16], [1, 9, 2])\n"
        "print(json.dumps([largest(views), largest(views[:0]),"
        " hash_of_slices(view, 64),"
        " [hash(view[i:i + 64]) for i in range(0, 4096, 64)]]))",
    )
    assert (place, none) == (1, -1)
    expected = 0
    for number in hashes:
        expected ^= number % 2**64
    assert combined == expected


def test_building_without_the_verbs_header_says_what_to_install(
    wheel, source, tmp_path
):
    build = subprocess.run(
        [
            *(sys.executable, "setup.py", "build_ext"),
            *("--build-temp", tmp_path / "temp", "--build-lib", tmp_path / "lib"),
        ],
        cwd=source,
        env=ENVIRONMENT | {"CFLAGS": hide_header("infiniband", tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert build.returncode != 0
    errors = re.findall(r"^.*\berror:.*infiniband.*$", build.stderr, re.MULTILINE)
    assert len(errors) == 1, build.stderr
    assert "libibverbs-dev" in errors[0]
    assert "rdma-core-devel" in errors[0]
    assert len(re.findall(r"^\S+: (?:fatal )?error:", build.stderr, re.MULTILINE)) == 1


def hide_header(name, where):
    """Compiler flags under which the system's headers lack a folder."""
    searched = subprocess.run(
        ["gcc", "-E", "-v", "-"],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    ).stderr
    folders = re.findall(r"^ (/\S+)$", searched, re.MULTILINE)
    flags = ["-nostdinc"]
    for number, folder in enumerate(folders):
        shadow = where / f"headers{number}"
        shadow.mkdir()
        for entry in Path(folder).iterdir():
            if entry.name != name:
                (shadow / entry.name).symlink_to(entry)
        flags += ["-isystem", str(shadow)]
    return " ".join(flags)
