"""What was polled is delivered once, whatever comes between."""

import errno
import gc
import signal
import subprocess
import sys
import threading

import pytest

import rdmaview as rv

RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ


@pytest.fixture
def refused(pd):
    """A local view, and a remote one that the peer will refuse."""
    with pd.reg_mr(bytearray(4096), RIGHTS) as mr:
        target = mr[:64].remote()
        yield (
            mr[:64],
            rv.RemoteView(target.id, target.rdma_addr, target.size, target.rkey ^ 1),
        )


def connect(pd, cq):
    near, far = pd.create_qp(cq, max_send_wr=16), pd.create_qp(cq, max_send_wr=16)
    near.connect(far.info)
    far.connect(near.info)
    return near, far


class AlarmError(Exception):
    """Raised by the signal handler."""


def test_a_signal_in_a_poll_loses_no_completion(pd, ctx, refused, is_soft):
    local, target = refused
    interval = 1e-4 if is_soft else 5e-3

    def ring(signum, frame):
        raise AlarmError

    def poll_all(cq, qp):
        while True:
            try:
                signal.setitimer(signal.ITIMER_REAL, interval, interval)
                while qp.in_flight:
                    cq.poll()
                signal.setitimer(signal.ITIMER_REAL, 0)
            except AlarmError:
                continue
            return

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with ctx.create_cq(64) as cq:
            for _ in range(40 if is_soft else 10):
                near, far = connect(pd, cq)
                with near, far:
                    for _ in range(8):
                        near.post_write(local, target)
                    poll_all(cq, near)
                    assert near.in_flight == 0
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


DROP_WHILE_ANOTHER_WAITS = """
import sys, threading
import rdmaview as rv

sys.setswitchinterval(1e-6)
rights = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
with rv.open(sys.argv[1]) as ctx, ctx.alloc_pd() as pd, ctx.create_cq(256) as cq:
    with pd.reg_mr(bytearray(4096), rights) as mr:
        view, good = mr[:64], mr[64:128].remote()
        bad = rv.RemoteView(good.id, good.rdma_addr, good.size, good.rkey ^ 1)
        stop = threading.Event()

        def wait():
            while not stop.is_set():
                try:
                    for completion in cq.wait(0.01):
                        str(completion)
                except TimeoutError:
                    pass

        threads = [threading.Thread(target=wait) for _ in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(int(sys.argv[2])):
            near, far = (pd.create_qp(cq, max_send_wr=16) for _ in range(2))
            near.connect(far.info)
            far.connect(near.info)
            for _ in range(8):
                near.post_write(view, bad)
            del near, far
        stop.set()
        for thread in threads:
            thread.join()
print("survived")
"""


def test_a_queue_pair_may_be_dropped_while_other_threads_wait(device_name, is_soft):
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            DROP_WHILE_ANOTHER_WAITS,
            device_name,
            "300" if is_soft else "20",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "survived\n"), done.stderr


@pytest.mark.soft_only(reason="injects a failure of ibv_poll_cq")
def test_a_broken_queue_does_not_keep_a_queue_pair_from_closing(pd, cq):
    near, far = connect(pd, cq)
    rv.softverbs.fail("poll_cq", errno.EIO, 2)
    near.close()
    far.close()
    rv.softverbs.reset()
    assert near.closed
    assert far.closed


@pytest.mark.soft_only(reason="injects a failure of ibv_poll_cq")
def test_a_broken_queue_does_not_keep_a_dropped_queue_pair(pd, cq):
    near, far = connect(pd, cq)
    before = rv.softverbs.counters()["live_qp"]
    rv.softverbs.fail("poll_cq", errno.EIO, 2)
    del near, far
    gc.collect()
    assert rv.softverbs.counters()["live_qp"] == before - 2


@pytest.mark.soft_only(reason="delays completions")
def test_a_request_that_timed_out_is_told_by_a_later_poll(pd, cq, refused):
    local, target = refused
    near, far = connect(pd, cq)
    rv.softverbs.delay("completion", 0.1)
    with near, far:
        with pytest.raises(TimeoutError):
            near.write(local, target, timeout=0.01)
        told = []
        threads = [
            threading.Thread(target=lambda: told.extend(wait_or_nothing(cq)))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [completion.status for completion in told] == [rv.Status.REM_ACCESS_ERR]


def wait_or_nothing(cq):
    try:
        return cq.wait(0.5)
    except TimeoutError:
        return []


@pytest.mark.no_device
def test_an_integer_too_large_to_write_is_refused_as_any_other():
    view = rv.MemoryRegionView(1, 4096, 4096, 64, 1, 1)
    with pytest.raises(IndexError, match="bits"):
        view.subview(10**5000, 1)
    with pytest.raises(ValueError, match=r"size must be .* bits"):
        rv.RemoteView(1, 1, 10**5000, 1)
