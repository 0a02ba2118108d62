"""What views cost, beside what else a Python program could use, with the limit of each.

python benchmarks/bench_view.py [--device NAME] [--quick] [--json FILE]

Everything that is compared runs in short turns, one after the other, so that a machine
that slows down slows all of it. Of the turns the fastest counts, since noise only ever
adds; on a device a turn is the median of its rounds. Times are net of an empty loop. In a
VM whose processor is emulated, `tools/rxe-vm --count` makes them counts of instructions.
"""

import argparse
import collections
import copy
import subprocess
import sys
import timeit
from pathlib import Path

import pyperf
from on_device import REGISTER, WRITE, device_rows, in_turn, usable_device
from report import Row, print_report

import rdmaview as rv

HERE = Path(__file__).parent
SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's pyverbs is for this one
TURN = 0.001  # seconds

FIELDS = "id, virtual_addr, rdma_addr, size, lkey, rkey"
NUMBERS = (
    0x5AA5F0_00_0000_0007,
    0x7F12_3456_7000,
    0x7F12_3456_7000,
    1 << 20,
    4660,
    4661,
)


# What is timed, an alternative, and the limit of their ratio.
STATEMENTS = [
    ("v[a:b]", "m[a:b]", "slice of a memoryview", 0.75),
    ("v[a:b]", "SGE(addr, length, lkey)", "ibverbs.SGE(addr, length, lkey)", 0.35),
    ("hash(v)", "hash(t)", "hash of a tuple", 0.6),
    ("v == w", "t == u", "equality of tuples", 0.6),
    (f"View({FIELDS})", f"Named({FIELDS})", "namedtuple", 0.25),
    ("copy(v)", "copy(t)", "copy of a tuple", 1.6),
]


def names():
    """Everything that the statements name."""
    view = rv.MemoryRegionView
    # Equal, but not the same objects: an equality that compares identities learns nothing.
    other = tuple(int(str(number)) for number in NUMBERS)
    known = {
        "v": view(*NUMBERS),
        "w": view(*other),
        "t": NUMBERS,
        "u": other,
        "m": memoryview(bytearray(NUMBERS[3])),
        "a": 4096,
        "b": 8192,
        "hash": hash,
        "copy": copy.copy,
        "View": view,
        "Named": collections.namedtuple("Named", FIELDS),
        **dict(zip(FIELDS.split(", "), NUMBERS, strict=True)),
    }
    try:
        import ibverbs
    except ImportError:
        return known
    return {**known, "SGE": ibverbs.SGE, "addr": NUMBERS[1], "length": 4096}


def statement_rows(turns):
    """Time the statements against one another."""
    known = names()
    rows = []
    for statement, alternative, name, limit in STATEMENTS:
        if "SGE" in alternative and "SGE" not in known:
            ours = fastest([statement], known, turns)[0]
            rows.append(Row(statement, ours, name, note="ibverbs: not installed"))
            continue
        ours, theirs = fastest([statement, alternative], known, turns)
        rows.append(Row(statement, ours, name, theirs, limit))
    return rows


def fastest(statements, known, turns):
    """Nanoseconds of each statement, net of an empty loop."""
    # Local names, as in a function: looking up globals would count to both sides.
    setup = "; ".join(f"{name} = known[{name!r}]" for name in known)
    timers = [
        timeit.Timer(statement, setup, pyperf.perf_counter, {"known": known})
        for statement in ["pass", *statements]
    ]
    loops = [max(1, round(TURN / (timer.timeit(1000) / 1000))) for timer in timers]
    best = [float("inf")] * len(timers)
    for _ in range(turns):
        for i, timer in enumerate(timers):
            best[i] = min(best[i], timer.timeit(loops[i]) / loops[i])
    return [(seconds - best[0]) * 1e9 for seconds in best[1:]]


def size_row():
    """Bytes, not nanoseconds: the limit is absolute."""
    size = sys.getsizeof(rv.MemoryRegionView(*NUMBERS))
    return Row("sys.getsizeof(v)", size, most=72, note="bytes")


def import_row(turns):
    """Import into fresh processes, one after the other."""
    ours, theirs = in_turn(
        [lambda: import_ns("rdmaview"), lambda: import_ns("numpy")], turns
    )
    return Row("import rdmaview", ours, "import numpy", theirs, 1.2)


def import_ns(module):
    """Time an import in a new interpreter."""
    code = (
        "import time; start = time.perf_counter_ns(); "
        f"import {module}; print(time.perf_counter_ns() - start)"
    )
    return int(subprocess.check_output([sys.executable, "-c", code]))


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--device", metavar="NAME", help="default: the first kernel device that works"
    )
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    turns = 50 if args.quick else 200
    rows = [*statement_rows(turns), size_row(), import_row(5)]
    device = args.device or usable_device()
    if device:
        rows += device_rows(device, (REGISTER, WRITE), args.quick)
    print_report(rows, device, args.json)


if __name__ == "__main__":
    main()
