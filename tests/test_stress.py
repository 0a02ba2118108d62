"""Everything at once, in random order, and then nothing is left."""

import errno
import gc
import mmap
import os
import random
import threading

import numpy as np
import pytest
from helpers import open_files, pinned_bytes

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
SEED = int(os.environ.get("RDMAVIEW_STRESS_SEED", "20261201"))
LARGEST = 1 << 16


class Worker:
    """One thread's part: what it registers, and a pair of queue pairs of its own."""

    def __init__(self, pd, cq, given, is_soft, seed):
        self.pd, self.cq, self.given, self.is_soft = pd, cq, given, is_soft
        self.dice = random.Random(seed)
        self.a = pd.create_qp(cq, max_send_wr=8)
        self.b = pd.create_qp(cq, max_send_wr=8)
        self.a.connect(self.b.info)
        self.b.connect(self.a.info)
        self.views = []
        self.held = None
        self.moved = self.stale = 0
        self.trouble = None

    def register(self):
        size = self.dice.randrange(1, LARGEST)
        make = self.dice.choice([bytearray, np.zeros, lambda n: mmap.mmap(-1, n)])
        buffer = make(size)
        mr = self.pd.reg_mr(buffer, PEER)
        self.views.append(mr[:])
        if self.dice.random() < 0.1:
            # A cycle that only the collector takes apart.
            loop = [mr, mr[:1]]
            loop.append(loop)

    def slice(self):
        if self.views:
            view = self.dice.choice(self.views)
            first = self.dice.randrange(view.size + 1)
            part = view[first : self.dice.randrange(first, view.size + 1)]
            assert part in view
            if part.size:
                self.views.append(part)

    def drop(self):
        if self.views:
            self.views.pop(self.dice.randrange(len(self.views)))

    def close_region(self):
        """Close a region whose views are still held: these are stale then."""
        if not self.views:
            return
        close_unless_busy(self.dice.choice(self.views).mr)
        self.forget_stale()

    def forget_stale(self):
        self.views = [view for view in self.views if not view.mr.closed]

    def give(self):
        """Let another thread end what this one has, or still uses."""
        if not self.views:
            return
        view = self.dice.choice(self.views)
        self.given.append(view)
        if not self.is_soft:
            # A remote side that goes while work is in flight breaks the queue pair;
            # the built-in device is done with so little work before post returns.
            self.views = [other for other in self.views if other.id != view.id]

    def take(self):
        try:
            view = self.given.pop()
        except IndexError:
            return
        if self.dice.random() < 0.5:
            close_unless_busy(view.mr)

    def two_parts(self):
        """Give a view and another of its size that it doesn't overlap."""
        if len(self.views) < 2:
            return None
        near, far = self.dice.sample(self.views, 2)
        size = min(near.size, far.size, self.dice.randrange(1, LARGEST))
        near, far = near[:size], far[-size:]
        return None if near.overlaps(far) else (near, far)

    def write(self):
        self.move(self.a.write, lambda near, far: (near, far))

    def read(self):
        self.move(self.b.read, lambda near, far: (far, near))

    def move(self, verb, direction):
        parts = self.two_parts()
        if parts is None:
            return
        near, far = parts
        source, target = (part.array() for part in direction(near, far))
        source[:] = self.dice.randrange(256)
        verb(near, far.remote(), timeout=60)
        assert (target == source[0]).all()
        self.moved += 1

    def post(self):
        """Start work, and drop the local side's last name while it is in flight."""
        parts = self.two_parts()
        if parts is not None and self.a.in_flight < 8:
            self.held = parts[1]
            self.a.post_write(parts[0], parts[1].remote())
            self.drain()

    def drain(self):
        while self.a.in_flight:
            try:
                self.cq.wait(0.01)
            except TimeoutError:
                pass

    def collect(self):
        gc.collect(self.dice.randrange(3))

    def run(self, rounds):
        steps = [self.register, self.slice, self.write, self.read, self.drop]
        steps += [self.register, self.post, self.close_region, self.give, self.take]
        try:
            for i in range(rounds):
                try:
                    self.dice.choice(steps)()
                except rv.StaleViewError:
                    self.stale += 1
                    self.forget_stale()
                if i % 100 == 0:
                    self.collect()
        except BaseException as error:
            self.trouble = error
        finally:
            self.views.clear()
            self.held = None


def close_unless_busy(mr):
    try:
        mr.close()
    except rv.VerbsError as busy:
        assert busy.errno == errno.EBUSY


@pytest.mark.timeout(600)
def test_rounds_of_everything_in_random_order_leave_nothing(device_name, is_soft):
    rounds, threads = (2_000, 8) if is_soft else (150, 4)
    assert gc.isenabled()
    gc.collect()
    counters = rv.softverbs.counters() if is_soft else {}
    if is_soft:
        # The background thread and what it opens are there from now on.
        warm_up(device_name)
    pinned, files, running = pinned_bytes(), open_files(), threading.active_count()

    with (
        rv.open(device_name) as ctx,
        ctx.alloc_pd() as pd,
        ctx.create_cq(256) as cq,
    ):
        given = []
        workers = [Worker(pd, cq, given, is_soft, SEED + i) for i in range(threads)]
        runners = [
            threading.Thread(target=worker.run, args=(rounds,), daemon=True)
            for worker in workers
        ]
        for runner in runners:
            runner.start()
        for runner in runners:
            runner.join(500)
        assert not any(runner.is_alive() for runner in runners)
        for worker in workers:
            if worker.trouble is not None:
                raise worker.trouble
        for worker in workers:
            assert worker.moved > rounds / 50
            worker.a.close()
            worker.b.close()
        assert any(worker.stale for worker in workers) == is_soft
        given.clear()
        del workers, worker, runners, runner
        gc.collect()
        assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)
        assert cq.poll(1) == []

    assert pinned_bytes() == pinned
    assert open_files() == files
    assert threading.active_count() == running
    if is_soft:
        after = rv.softverbs.counters()
        for name in after:
            if name.startswith("live_"):
                assert after[name] == counters[name]
        assert after["reg_mr"] - counters["reg_mr"] == (
            after["dereg_mr"] - counters["dereg_mr"]
        )


def warm_up(device_name):
    with (
        rv.open(device_name) as ctx,
        ctx.alloc_pd() as pd,
        ctx.create_cq(8) as cq,
        pd.create_qp(cq) as a,
        pd.create_qp(cq) as b,
        pd.reg_mr(bytearray(1 << 20), PEER) as mr,
    ):
        a.connect(b.info)
        b.connect(a.info)
        half = 1 << 19
        a.write(mr[:half], mr[half:].remote())
