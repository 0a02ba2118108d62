"""A forked child has the parent's handles, and must not touch its device."""

import gc
import multiprocessing
import os
import sys
import threading
import traceback

import numpy as np
import pytest
from helpers import assert_silent, eventually, run_python

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ

# From 3.12 on, os.fork warns where threads run: the built-in device has one.
pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")


def in_child(work):
    """Run a function in a forked child; give what it wrote to a pipe."""
    receive, send = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            os.close(receive)
            answer = work()
            os.write(send, repr(answer).encode())
            status = 0
        except BaseException:
            os.write(send, traceback.format_exc().encode())
        finally:
            os._exit(status)
    os.close(send)
    with open(receive, "rb") as pipe:
        answer = pipe.read().decode()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, answer
    return answer


@pytest.fixture
def region(pd):
    array = np.zeros(65536, "u1")
    with pd.reg_mr(array, PEER) as mr:
        yield mr


def check_transfer(pair, region):
    region[:64].array()[:] = np.arange(64)
    region[64:256].array()[:] = 0
    pair.a.write(region[:64], region[64:128].remote())
    pair.a.read(region[128:192], region[64:128].remote())
    assert (region[128:192].array() == np.arange(64)).all()


def refusals(*uses):
    """Say how each use of an inherited handle failed."""
    told = []
    for use in uses:
        try:
            use()
        except rv.VerbsError as error:
            told.append((error.errno, "spawn" in error.hint))
        else:
            told.append("no error")
    return told


def test_use_of_an_inherited_handle_is_refused(ctx, pair, region):
    view, remote = region[:64], region[64:128].remote()
    uses = (
        ctx.alloc_pd,
        lambda: ctx.create_cq(8),
        lambda: ctx.attributes,
        lambda: ctx.port(1),
        lambda: ctx.gids(1),
        ctx.close,
        lambda: pair.pd.reg_mr(bytearray(64)),
        lambda: pair.pd.reg_mr_address(region.addr, 64),
        lambda: pair.pd.create_qp(pair.cq),
        pair.pd.close,
        region.close,
        view.array,
        view.remote,
        lambda: memoryview(view),
        lambda: pair.a.write(view, remote),
        lambda: pair.a.read(view, remote),
        lambda: pair.a.post_write(view, remote),
        lambda: pair.a.connect(pair.b.info),
        lambda: pair.a.state,
        pair.a.close,
        pair.cq.poll,
        lambda: pair.cq.wait(1),
        pair.cq.close,
    )
    assert in_child(lambda: refusals(*uses)) == repr([(1, True)] * len(uses))
    check_transfer(pair, region)


def test_values_of_an_inherited_view_are_read(region):
    view = region[8:16]

    def work():
        back = rv.MemoryRegionView.from_bytes(view.to_bytes())
        assert back == view
        return view[1:3].size, hash(back) == hash(view), view.attached

    assert in_child(work) == "(2, True, True)"


def test_a_child_that_drops_the_handles_leaves_the_parent_whole(device_name, is_soft):
    ctx = rv.open(device_name).__enter__()
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    a, b = pd.create_qp(cq), pd.create_qp(cq)
    a.connect(b.info)
    b.connect(a.info)
    array = np.zeros(65536, "u1")
    mr = pd.reg_mr(array, PEER)
    handles = {"all": [ctx, pd, cq, a, b, mr, mr[:64]]}
    handles["cycle"] = handles
    del ctx, pd, cq, a, b, mr

    def work():
        handles.clear()
        gc.collect()
        return handles == {}

    before = rv.softverbs.counters() if is_soft else None
    assert in_child(work) == "True"
    assert (rv.softverbs.counters() if is_soft else None) == before
    ctx, pd, cq, a, b, mr, view = handles["all"]
    handles.clear()
    a.write(view, mr[64:128].remote())
    for handle in a, b, cq, mr, pd, ctx:
        handle.close()


@pytest.mark.soft_only(reason="counts calls")
def test_a_child_s_garbage_calls_no_verb(device_name):
    ctx = rv.open(device_name).__enter__()
    pd = ctx.alloc_pd()
    kept = [ctx, pd, ctx.create_cq(8), pd.reg_mr(bytearray(64))]
    kept.append(pd.create_qp(kept[2]))
    del ctx, pd

    def work():
        before = rv.softverbs.counters()
        kept.clear()
        gc.collect()
        after = rv.softverbs.counters()
        return {name: n for name, n in after.items() if before[name] != n}

    assert in_child(work) == "{}"


EXIT_OF_A_CHILD = """
    import os, sys, warnings
    import rdmaview as rv

    warnings.filterwarnings("ignore", "This process .* is multi-threaded")
    PEER = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
    ctx = rv.open(sys.argv[1]).__enter__()
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    a, b = pd.create_qp(cq), pd.create_qp(cq)
    a.connect(b.info)
    b.connect(a.info)
    mr = pd.reg_mr(bytearray(4096), PEER)
    view = mr[:64]
    pid = os.fork()
    if pid == 0:
        sys.exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    a.write(view, mr[64:128].remote())
"""


def test_a_child_that_exits_the_usual_way_is_silent_and_harmless(device_name):
    assert_silent(
        run_python(EXIT_OF_A_CHILD, device_name, options=("-X", "dev", "-W", "error"))
    )


def test_the_parent_s_memory_is_still_what_moves(pair, region):
    def work():
        # A page that the child writes is its own: the parent's stay where they were.
        np.frombuffer(bytes(64), "u1")
        return os.getpid() != os.getppid()

    for _ in range(3):
        assert in_child(work) == "True"
        check_transfer(pair, region)


def pool_work(number):
    gc.collect()
    return number * number


def test_a_pool_of_forked_workers_leaves_the_parent_whole(pair, region):
    fork = multiprocessing.get_context("fork")
    with fork.Pool(2) as pool:
        assert pool.map(pool_work, range(8)) == [n * n for n in range(8)]
        check_transfer(pair, region)
        pool.close()
        pool.join()
    check_transfer(pair, region)


def test_an_array_taken_before_the_fork_has_its_bytes_in_the_child(pair, region):
    taken = region[:64].array()
    taken[:] = 2
    assert in_child(lambda: int(taken.sum())) == "128"
    check_transfer(pair, region)


def test_a_child_opens_the_device_anew(device_name, region):
    def work():
        with rv.open(device_name) as ctx, ctx.alloc_pd() as pd, ctx.create_cq(8) as cq:
            buffer = bytearray(64)
            with (
                pd.reg_mr(buffer, PEER) as mr,
                pd.create_qp(cq) as a,
                pd.create_qp(cq) as b,
            ):
                a.connect(b.info)
                b.connect(a.info)
                buffer[:4] = b"fork"
                a.write(mr[:4], mr[32:36].remote())
                return bytes(buffer[32:36])

    assert in_child(work) == repr(b"fork")


@pytest.mark.soft_only(reason="the built-in device gives the child its own objects")
def test_a_child_sets_up_the_built_in_device_for_itself(region):
    def work():
        rv.softverbs.reset()
        rv.softverbs.configure(max_mr=5)
        with rv.open("soft0") as ctx:
            return ctx.attributes.max_mr

    assert in_child(work) == "5"
    assert region.pd.context.attributes.max_mr != 5


def test_ids_drawn_in_a_child_differ(device_name, pd, region):
    def work():
        with rv.open(device_name) as ctx, ctx.alloc_pd() as pd:
            ids = []
            for _ in range(3):
                with pd.reg_mr(bytearray(64)) as mr:
                    ids.append(mr.id)
            return ids

    first = [int(number) for number in in_child(work).strip("[]").split(",")]
    second = [int(number) for number in in_child(work).strip("[]").split(",")]
    with pd.reg_mr(bytearray(64)) as mr:
        own = {region.id, mr.id}
    assert len({*first, *second} | own) == 8
    epochs = {number >> 40 for number in (first[0], second[0], region.id)}
    assert len(epochs) == 3
    assert region.id >> 40 == mr.id >> 40


@pytest.mark.soft_only(reason="delays a verb")
def test_a_child_does_not_wait_for_a_close_of_its_parent(pd):
    mr = pd.reg_mr(bytearray(64))
    rv.softverbs.delay("dereg_mr", 0.5)
    thread = threading.Thread(target=mr.close)
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["dereg_mr"])
    assert in_child(lambda: refusals(mr.close)) == "[(1, True)]"
    thread.join()
    assert mr.closed


@pytest.mark.soft_only(reason="delays completions")
def test_a_fork_with_work_in_flight_is_no_matter(pair, region):
    rv.softverbs.delay("completion", 0.2)
    pair.a.post_write(region[:64], region[64:128].remote())
    assert in_child(lambda: gc.collect() >= 0) == "True"
    assert pair.cq.wait()[0].ok


@pytest.mark.soft_only(reason="delays completions")
def test_a_fork_while_a_thread_waits_is_no_matter(pair, region):
    rv.softverbs.delay("completion", 0.3)
    told = []
    thread = threading.Thread(
        target=lambda: told.append(pair.a.write(region[:64], region[64:128].remote()))
    )
    thread.start()
    assert eventually(lambda: pair.a.in_flight)
    assert in_child(lambda: refusals(pair.cq.poll)) == "[(1, True)]"
    thread.join(10)
    assert told == [None]
