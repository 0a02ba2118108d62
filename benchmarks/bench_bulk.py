"""What views cost by the thousand, beside what else a program could use, with limits.

python benchmarks/bench_bulk.py [--device NAME | --only-device NAME] [--quick] [--json FILE]

Times are nanoseconds a view. What is compared runs in turn, in one process, on the same
slices, each after a run that is not timed, and of the turns the fastest counts. Without
--device all of it is of the built-in device, which no look-up asks; posts are measured on
the named device, beside a C program that posts the same chain.
"""

import argparse
import gc
import mmap
import os
import sys
import threading
from contextlib import contextmanager

import numpy as np
import pyperf
from on_device import CHAIN, device_rows
from report import Row, print_report

import rdmaview as rv

BULK = 1_000_000
SEGMENTS = 10_000
SEGMENT_SIZE = 8192
SOME = 100_000
ARRAYS = 10_000
RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ


def in_turn(functions, count, turns):
    """Nanoseconds of each function by `count`; the least of its turns."""
    clock = pyperf.perf_counter
    best = [float("inf")] * len(functions)
    gc.collect()
    gc.disable()
    try:
        for _ in range(turns):
            for i, function in enumerate(functions):
                # Untimed: the one before has left its own data in the caches.
                kept = function()
                del kept
                start = clock()
                kept = function()
                best[i] = min(best[i], clock() - start)
                del kept
    finally:
        gc.enable()
    return [seconds * 1e9 / count for seconds in best]


def each(function, things):
    """Call a function on each thing, and let go of what it gives; a bare loop beside it."""

    def calls():
        for thing in things:
            function(thing)

    def loop():
        for _ in things:
            pass

    return calls, loop


class Dump:
    """One large segment, and slices of it in the forms that each library takes."""

    def __init__(self, pd, count):
        self.memory = np.zeros(count * 256, np.uint8)
        self.mr = pd.reg_mr(self.memory, RIGHTS)
        places = np.random.default_rng(1).permutation(count)
        self.offsets = (places * 256).astype(np.int64)
        self.sizes = np.full(count, 128, np.int64)


def views_rows(pd, turns):
    """mr.views, beside filling a structured array by NumPy: no bound is checked there."""
    dump = Dump(pd, BULK)
    whole, base = dump.mr.view(), dump.memory.ctypes.data

    def by_numpy():
        packed = np.empty(BULK, rv.VIEW_DTYPE)
        packed["id"] = whole.id
        packed["virtual_addr"] = dump.offsets + base
        packed["rdma_addr"] = dump.offsets + whole.rdma_addr
        packed["size"] = dump.sizes
        packed["lkey"] = whole.lkey
        packed["rkey"] = whole.rkey
        return packed

    assert np.array_equal(
        by_numpy(), np.asarray(dump.mr.views(dump.offsets, dump.sizes))
    )
    ours, theirs = in_turn(
        [lambda: dump.mr.views(dump.offsets, dump.sizes), by_numpy], BULK, turns
    )
    yield Row("mr.views(offsets, sizes)", ours, "fields by NumPy", theirs, most=3)
    size = np.asarray(dump.mr.views(dump.offsets, dump.sizes)).nbytes / BULK
    yield Row("memory of a view in an array", size, most=40, note="bytes")
    dump.mr.close()


def nixl_rows(pd, turns):
    """NIXL makes descriptors of slices and prepares them, and sends them as bytes.

    Here malloc has memory to use again, for both. In a process that has just begun NIXL's
    bytes take 40 to 70 ns a descriptor, most of it the kernel's for new pages.
    """
    dump = Dump(pd, SOME)
    views = dump.mr.views(dump.offsets, dump.sizes)
    wire = views.to_bytes()
    mine = [
        lambda: dump.mr.views(dump.offsets, dump.sizes),
        views.to_bytes,
        lambda: rv.ViewArray.from_bytes(wire),
    ]
    labels = [
        ("the same of 100,000", "NIXL get_xfer_descs, prep_xfer_dlist", 0.5, None),
        ("views.to_bytes()", "NIXL get_serialized_descs", 0.05, 2),
        ("ViewArray.from_bytes(b)", "NIXL deserialize_descs", 0.05, 2),
    ]
    with nixl_calls(dump) as (theirs, trouble):
        times = in_turn([*mine, *theirs], SOME, turns)
    ours, beside = times[: len(mine)], times[len(mine) :] or [None] * len(mine)
    for (name, other, limit, most), own, their in zip(
        labels, ours, beside, strict=True
    ):
        yield Row(name, own, other, their, limit, most, trouble)
    dump.mr.close()


@contextmanager
def nixl_calls(dump):
    """The same three steps by NIXL, if it is there; else none, and why."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    try:
        from nixl_cu12._api import nixl_agent, nixl_agent_config
    except ImportError as missing:
        yield [], f"NIXL: {missing}"
        return
    agent = nixl_agent("rdmaview", nixl_agent_config(backends=["UCX"]))
    # Rows of address, bytes and device: NIXL's fastest form.
    rows = np.zeros((SOME, 3), np.uint64)
    rows[:, 0] = dump.offsets + dump.memory.ctypes.data
    rows[:, 1] = dump.sizes
    segment = np.array([[dump.memory.ctypes.data, dump.memory.nbytes, 0]], np.uint64)
    registered = agent.register_memory(segment, "DRAM")
    descriptors = agent.get_xfer_descs(rows, "DRAM")
    serialised = agent.get_serialized_descs(descriptors)
    handles = []

    def prepare():
        while handles:
            agent.release_dlist_handle(handles.pop())
        handles.append(agent.prep_xfer_dlist("", agent.get_xfer_descs(rows, "DRAM")))

    yield (
        [
            prepare,
            lambda: agent.get_serialized_descs(descriptors),
            lambda: agent.deserialize_descs(serialised),
        ],
        "",
    )
    while handles:
        agent.release_dlist_handle(handles.pop())
    agent.deregister_memory(registered)


class Segments:
    """Ten thousand registered segments, in a mapping that has gaps between them."""

    def __init__(self, pd):
        pitch = 2 * SEGMENT_SIZE
        self.memory = np.frombuffer(mmap.mmap(-1, SEGMENTS * pitch), np.uint8)
        self.starts = self.memory.ctypes.data + np.arange(SEGMENTS) * pitch
        self.table = rv.SegmentTable(pd, RIGHTS)
        self.table.sync([(int(start), SEGMENT_SIZE) for start in self.starts])
        # Arrays in random segments, each with a base of its own as a program would have.
        places = np.random.default_rng(2).permutation(SEGMENTS)[:ARRAYS]
        self.arrays = [self.memory[p * pitch + 64 : p * pitch + 4160] for p in places]


def table_rows(pd, turns):
    """Many addresses at once, beside NumPy's binary search alone; one array at a time."""
    segments = Segments(pd)
    table, starts = segments.table, segments.starts
    random = np.random.default_rng(3)
    addresses = random.choice(starts, BULK) + random.integers(0, 4096, BULK)
    sizes = np.full(BULK, 4096)
    for order, some, most, limit in (
        ("sorted", np.sort(addresses), 6, None),
        ("random", addresses, 60, 0.7),
    ):
        ours, theirs = in_turn(
            [
                lambda some=some: table.views_at(some, sizes),
                lambda some=some: np.searchsorted(starts, some, "right"),
            ],
            BULK,
            turns,
        )
        name = f"table.views_at, 10,000 segments, {order}"
        yield Row(name, ours, "np.searchsorted alone", theirs, limit, most)

    cache = DictCache()
    for array in segments.arrays:
        cache.add(array, table.view_of(array))
    calls, loop = each(table.view_of, segments.arrays)
    theirs_calls, _ = each(cache.view_of, segments.arrays)
    ours, theirs, empty = in_turn([calls, theirs_calls, loop], ARRAYS, 4 * turns)
    yield Row(
        "table.view_of(ndarray), 10,000 segments",
        ours - empty,
        "a dict and a lock",
        theirs - empty,
        0.5,
        120,
    )
    (ours,) = in_turn([lambda: table.views_of(segments.arrays)], ARRAYS, 4 * turns)
    yield Row("table.views_of(10,000 ndarrays)", ours, most=60)
    table.close()

    mr = pd.reg_mr(segments.memory, RIGHTS)
    (ours,) = in_turn([lambda: mr.views_of(segments.arrays)], ARRAYS, 4 * turns)
    yield Row("mr.views_of(10,000 ndarrays)", ours, most=60)
    mr.close()


class DictCache:
    """What a program writes that has no rdmaview: address and size to a view."""

    def __init__(self):
        self.lock = threading.Lock()
        self.views = {}

    def add(self, array, view):
        self.views[array.ctypes.data, array.nbytes] = view

    def view_of(self, array):
        key = array.__array_interface__["data"][0], array.nbytes
        with self.lock:
            return self.views[key]


def cache_rows(pd, turns):
    """A hit: the owner is alive, and its registration is there."""
    arrays = [np.zeros(SEGMENT_SIZE, np.uint8) for _ in range(1000)]
    slices = [array[64:4160] for array in arrays]
    with rv.RegistrationCache(pd, RIGHTS) as cache:
        plain = DictCache()
        views = [cache.view_of(array) for array in slices]
        for array, view in zip(slices, views, strict=True):
            plain.add(array, view)
        for name, things in (("ndarray", arrays), ("slice of an ndarray", slices)):
            calls, loop = each(cache.view_of, things)
            other, _ = each(plain.view_of, slices)
            times = in_turn([calls, other, loop], len(things), 20 * turns)
            ours, theirs, empty = times
            yield Row(
                f"cache.view_of({name}), hit",
                ours - empty,
                "a dict and a lock",
                theirs - empty,
                most=100,
            )
        del views, view
        plain.views.clear()
        # The view lets go of the memory, and the next one takes hold of it again.
        calls, loop = each(cache.view_of, arrays)
        ours, empty = in_turn([calls, loop], len(arrays), 20 * turns)
        yield Row("the same, if no other view of it is left", ours - empty)
        assert cache.stats["misses"] == len(arrays)


def main():
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", metavar="NAME", help="also post, on this device")
    parser.add_argument(
        "--only-device",
        metavar="NAME",
        help="measure nothing but posts, on this device",
    )
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--json", metavar="FILE", help="write the rows there too")
    args = parser.parse_args()
    turns = 3 if args.quick else 15
    device = args.only_device or args.device
    rows = []
    if not args.only_device:
        rows += built_in_rows(turns)
    if device:
        rows += device_rows(device, (CHAIN,), args.quick)
    print_report(rows, device, args.json)
    if "nixl_cu12" in sys.modules:
        # NIXL 1.5.1 crashes when its library is unloaded, with us or alone.
        sys.stdout.flush()
        os._exit(0)


def built_in_rows(turns):
    """What needs no device."""
    rv.softverbs.configure(max_mr=2 * SEGMENTS)
    with rv.open("soft0") as ctx, ctx.alloc_pd() as pd:
        for measure in (views_rows, nixl_rows, table_rows, cache_rows):
            yield from measure(pd, turns)


if __name__ == "__main__":
    main()
