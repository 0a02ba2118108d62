"""One table and one cache under many threads, beside a plain model of what is there.

RDMAVIEW_MODEL_SECONDS says for how long; the default is for every day.
"""

import gc
import mmap
import os
import random
import threading
import time

import numpy as np
import pytest
from helpers import eventually

import rdmaview as rv

PAGE = mmap.PAGESIZE
PAGES = 32
THREADS = 8
SECONDS = float(os.environ.get("RDMAVIEW_MODEL_SECONDS", "5"))
SEED = int(os.environ.get("RDMAVIEW_STRESS_SEED", "20261207"))
RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ


class Shared:
    """What the threads have in common."""

    def __init__(self, pd):
        self.table = rv.SegmentTable(pd, RIGHTS)
        self.cache = rv.RegistrationCache(pd, RIGHTS, max_regions=24)
        # What a scanner would find: it is of all threads, so they take turns.
        self.scan_lock = threading.Lock()
        self.found = {}
        self.deadline = time.monotonic() + SECONDS


class Worker:
    """Changes what lies in an arena of its own, and checks what is found there."""

    def __init__(self, pd, shared, number):
        self.shared = shared
        self.dice = random.Random(SEED + number)
        self.cq = pd.context.create_cq(64)
        self.a = pd.create_qp(self.cq, max_send_wr=16)
        self.b = pd.create_qp(self.cq, max_send_wr=16)
        self.a.connect(self.b.info)
        self.b.connect(self.a.info)
        self.got = pd.alloc_mr(PAGES * PAGE)
        self.arena = np.frombuffer(mmap.mmap(-1, PAGES * PAGE), "u1")
        self.start = self.arena.__array_interface__["data"][0]
        self.registered = []
        # By first page: the page after the last, and the generation.
        self.scanned = {}
        self.retired = []
        self.arrays = []
        self.checked = self.refused = 0
        self.trouble = None

    def run(self):
        steps = [
            self.register,
            self.remove,
            self.grow,
            self.shrink_or_go,
            self.reap,
            *[self.look_up] * 4,
            self.look_up_many,
            self.look_up_runs,
            self.make_array,
            self.drop_array,
            *[self.ask_cache] * 3,
        ]
        try:
            while time.monotonic() < self.shared.deadline:
                self.dice.choice(steps)()
        except BaseException as error:
            self.trouble = error

    def some_pages(self):
        low = self.dice.randrange(PAGES)
        return low, self.dice.randrange(low, min(PAGES, low + 12)) + 1

    def register(self):
        if len(self.registered) < 8:
            low, high = self.some_pages()
            part = self.arena[low * PAGE : high * PAGE]
            self.registered.append((self.shared.table.register(part), low, high))

    def remove(self):
        if self.registered:
            place = self.dice.randrange(len(self.registered))
            segment, _, _ = self.registered.pop(place)
            self.shared.table.remove(segment)

    def sync(self, low, wanted):
        """Have a scanner find pages, or none; the others' are as they were."""
        with self.shared.scan_lock:
            if low in self.scanned:
                old, _ = self.scanned.pop(low)
                view = self.shared.table.view_at(self.start + low * PAGE, PAGE)
                self.retired.append(view)
                del self.retired[:-4]
                assert old > low
            self.shared.found.pop(self.start + low * PAGE, None)
            if wanted:
                high, generation = wanted
                self.scanned[low] = wanted
                address = self.start + low * PAGE
                size = (high - low) * PAGE
                self.shared.found[address] = (address, size, None, generation)
            self.shared.table.sync(self.shared.found.values())

    def grow(self):
        low = self.dice.choice([*self.scanned, self.dice.randrange(PAGES)])
        high, generation = self.scanned.get(low, (low, 0))
        if high < PAGES:
            self.sync(low, (self.dice.randrange(high, PAGES) + 1, generation))

    def shrink_or_go(self):
        if self.scanned:
            low = self.dice.choice([*self.scanned])
            high, generation = self.scanned[low]
            if self.dice.random() < 0.5:
                self.sync(low, None)
            else:
                self.sync(low, (self.dice.randrange(low, high) + 1, generation + 1))

    def reap(self):
        with self.shared.scan_lock:
            for view in self.retired:
                if not view.mr.closed:
                    self.check(view)
            if self.dice.random() < 0.2:
                self.shared.table.reap()

    def spans(self):
        for _, low, high in self.registered:
            yield low * PAGE, high * PAGE
        for low, (high, _) in self.scanned.items():
            yield low * PAGE, high * PAGE

    def is_inside(self, first, size):
        return any(low <= first and first + size <= high for low, high in self.spans())

    def look_up(self):
        low, high = self.some_pages()
        first = low * PAGE + self.dice.randrange(PAGE)
        size = self.dice.randrange(1, (high - low) * PAGE)
        size = min(size, PAGES * PAGE - first)
        table = self.shared.table
        try:
            if self.dice.random() < 0.5:
                view = table.view_at(self.start + first, size)
            else:
                view = table.view_of(self.arena[first : first + size])
        except rv.NotRegisteredError:
            assert not self.is_inside(first, size)
            self.refused += 1
        else:
            assert self.is_inside(first, size)
            assert (view.virtual_addr, view.size) == (self.start + first, size)
            self.check(view)

    def look_up_many(self):
        inside = [*self.spans()]
        if inside:
            chosen = [self.dice.choice(inside) for _ in range(6000)]
            firsts = [low + self.dice.randrange(high - low) for low, high in chosen]
            addresses = np.array(firsts) + self.start
            views = self.shared.table.views_at(addresses, 1)
            assert (np.asarray(views)["virtual_addr"] == addresses).all()
            self.check(views[self.dice.randrange(len(views))])

    def look_up_runs(self):
        matrix = self.arena.reshape(PAGES, PAGE)
        low, high = self.some_pages()
        part = matrix[low:high, 100:110]
        try:
            views = self.shared.table.runs_of(part)
        except rv.NotRegisteredError:
            first = low * PAGE + 100
            assert not self.is_inside(first, (high - low - 1) * PAGE + 10)
        else:
            self.b.reads(self.got[: part.size].split(10), views.remote(), timeout=60)
            assert self.got[: part.size].array().tobytes() == part.tobytes()

    def make_array(self):
        self.arrays.append(np.empty(self.dice.choice([64, 5000, 300_000]), "u1"))

    def drop_array(self):
        if self.arrays:
            self.arrays.pop(self.dice.randrange(len(self.arrays)))

    def ask_cache(self):
        if self.arrays:
            array = self.dice.choice(self.arrays)
            first = self.dice.randrange(len(array))
            part = array[first : first + self.dice.randrange(1, PAGES * PAGE)]
            view = self.shared.cache.view_of(part)
            assert view.virtual_addr == part.__array_interface__["data"][0]
            assert view.size == part.size
            self.check(view)

    def check(self, view):
        """Write the memory; what its key reads is that."""
        size = min(view.size, PAGES * PAGE)
        view[:size].array()[:: max(1, size // 8)] = self.dice.randrange(256)
        self.a.read(self.got[:size], view[:size].remote(), timeout=60)
        assert (self.got[:size].array() == view[:size].array()).all()
        self.checked += 1

    def end(self):
        for segment, _, _ in self.registered:
            self.shared.table.remove(segment)
        self.retired.clear()
        self.arrays.clear()
        self.a.close()
        self.b.close()
        self.cq.close()
        self.got.close()


@pytest.mark.timeout(SECONDS + 300)
def test_no_wrong_key_is_served_and_nothing_is_left(ctx, pd):
    shared = Shared(pd)
    workers = [Worker(pd, shared, number) for number in range(THREADS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS + 200)
        assert not thread.is_alive()
    for worker in workers:
        if worker.trouble is not None:
            raise worker.trouble
        assert worker.checked
        assert worker.refused
    for worker in workers:
        worker.end()
    shared.table.sync([])
    shared.table.reap()
    assert len(shared.table) == 0
    assert shared.table.stats["registrations"] == 0
    assert shared.table.stats["retired"] == 0
    del threads, worker
    gc.collect()
    assert eventually(lambda: len(shared.cache) == 0)
    assert shared.cache.bytes_pinned == 0
    shared.cache.close()
    shared.table.close()
    assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)
