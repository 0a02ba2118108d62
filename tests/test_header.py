"""rdmaview.h on its own, in C and in C++, against what Python makes of a view."""

import itertools
import random
import re
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rdmaview as rv
from rdmaview import MemoryRegionView

pytestmark = pytest.mark.no_device

C_SOURCES = Path(__file__).parent / "c"
STRICT = ["-Wall", "-Wextra", "-Werror"]
COMPILERS = {
    "c99": ["gcc", "-std=c99", "-pedantic", *STRICT],
    "c++11": ["g++", "-x", "c++", "-std=c++11", *STRICT],
    "c++20": ["g++", "-x", "c++", "-std=c++20", *STRICT],
}
SIZES = [0, 1, 8, 64, 2**31, 2**32 - 1, 2**32, 2**63, 2**64 - 1]
DIALECTS = pytest.mark.parametrize("dialect", COMPILERS)


def make_cases():
    """Slices of one registration, near misses of them, and views of any fields."""
    dice = random.Random(40)
    whole = MemoryRegionView(0xABC001, 2**33, 2**20, 4096, 0x11, 0x22)
    views = [
        whole,
        whole[0:64],
        whole[8:16],
        whole[16:16],
        whole[64:],
        *(
            MemoryRegionView(**whole.to_dict() | {name: value + 1})
            for name, value in whole.to_dict().items()
        ),
        MemoryRegionView(0, 0, 0, 0, 0, 1),
        MemoryRegionView(2**64 - 1, 0, 0, 2**64 - 1, 2**32 - 1, 2**32 - 1),
        MemoryRegionView(1, 2**64 - 1, 2**64 - 1, 0, 1, 1),
        MemoryRegionView(1, 2**63, 1, 2**63 - 1, 1, 1),
    ]
    cases = [
        (a, b, *ends)
        for a, b in itertools.product(views, repeat=2)
        for ends in [(0, a.size), (a.size, 0), (a.size, 1), (2**64 - 80, 96)]
    ]
    for _ in range(200):
        keys = dice.getrandbits(32), dice.getrandbits(32) | 1
        a = MemoryRegionView(
            dice.getrandbits(64), dice.getrandbits(63), dice.getrandbits(63),
            dice.getrandbits(62), *keys,
        )  # fmt: skip
        b = a.subview(a.size // 4, a.size // 2)
        cases.append((a, b, dice.choice(SIZES), dice.choice(SIZES)))
    return cases


def c_hash(view):
    """Give the hash as C has it: unsigned."""
    return hash(view) % 2**64


def cut(view, offset, size):
    try:
        return [1, *view.subview(offset, size).to_dict().values()]
    except IndexError:
        return [0, *view.to_dict().values()]


def answer(a, b, offset, size):
    """Answer one line as header_check.c does."""
    far_a, far_b = a.remote(), b.remote()
    return [
        *(c_hash(a), c_hash(far_a)),
        *(b in a, a.overlaps(b), a == b),
        *(far_b in far_a, far_a.overlaps(far_b), far_a == far_b),
        *cut(a, offset, size),
        *cut(far_a, offset, size),
    ]


@pytest.fixture(scope="module")
def run_c(tmp_path_factory):
    """Compile a program with nothing but the header, and give it its input."""

    def run(name, dialect, data):
        program = tmp_path_factory.mktemp("header") / name
        source = C_SOURCES / f"{name}.c"
        subprocess.run(
            [*COMPILERS[dialect], "-I", rv.get_include(), source, "-o", program],
            check=True,
        )
        return subprocess.run(
            [program], input=data, capture_output=True, check=True
        ).stdout

    return run


@pytest.fixture(scope="module")
def run_header_check(run_c):
    def run(dialect, lines):
        answers = run_c("header_check", dialect, "\n".join(lines).encode())
        return [[*map(int, line.split())] for line in answers.decode().splitlines()]

    return run


@DIALECTS
def test_c_and_python_make_the_same_of_a_view(run_header_check, dialect):
    cases = make_cases()
    lines = [
        " ".join(map(str, [*a.to_dict().values(), *b.to_dict().values(), *ends]))
        for a, b, *ends in cases
    ]
    _, *answers = run_header_check(dialect, lines)
    assert answers == [answer(*case) for case in cases]


@DIALECTS
def test_the_struct_is_40_bytes_in_the_order_of_the_fields(run_header_check, dialect):
    assert run_header_check(dialect, []) == [[40, 0, 8, 16, 24, 32, 36]]


def counted(packed):
    return struct.pack("=Q", len(packed)) + packed.tobytes()


@DIALECTS
def test_c_and_python_make_the_same_of_an_array(run_c, dialect):
    whole = MemoryRegionView(0xABC001, 2**33, 2**20, 4096, 0x11, 0x22)
    views = [whole, *whole.split(100), *whole.grid(20, 100, 64)]
    views += [case[1] for case in make_cases()[::7]]
    array = rv.ViewArray(views)
    far = array.remote()
    slices = whole.split(8)
    expected = (
        array.hash_array().tobytes()
        + array[::-1].hash_array().tobytes()
        + np.asarray(far).tobytes()
        + far.hash_array().tobytes()
        + counted(np.asarray(array.coalesce()))
        + counted(np.asarray(far.coalesce()))
        + array.to_bytes()[12:]
        + far.to_bytes()[12:]
        + struct.pack("=Q", len(array))
        + counted(np.asarray(slices[: len(array)]))
        + counted(np.asarray(slices[: len(array)].remote()))
    )
    assert 40 < len(array.coalesce()) < len(array) < len(slices)
    assert run_c("array_check", dialect, np.asarray(array).tobytes()) == expected


def test_the_header_needs_no_other_than_the_c_library():
    listed = subprocess.run(
        ["gcc", "-M", "-x", "c", Path(rv.get_include(), "rdmaview.h")],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    assert "stdint.h" in listed
    assert not re.search(r"Python\.h|infiniband", listed)
