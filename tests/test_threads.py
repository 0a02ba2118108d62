"""Threads that use one device at once, and signals that come while they wait."""

import errno
import random
import signal
import sys
import threading
import time

import numpy as np
import pytest
from helpers import PAGE, eventually, run_python

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


def run_in_threads(*works, seconds=60):
    """Run functions at once; raise what the first of them raised."""
    troubles = []
    start = threading.Barrier(len(works))

    def guard(work):
        start.wait()
        try:
            work()
        except BaseException as error:
            troubles.append(error)

    threads = [
        threading.Thread(target=guard, args=(work,), daemon=True) for work in works
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)
    if troubles:
        raise troubles[0]


def count_while(work):
    """Run a function in a thread, and count here until it is done."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    count = 0
    while thread.is_alive():
        count += 1
        time.sleep(0.001)
    return count


@pytest.mark.soft_only(reason="delays verbs")
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("reg_mr", lambda w: w["pd"].reg_mr(bytearray(64))),
        ("dereg_mr", lambda w: w["mr"].close()),
        ("alloc_pd", lambda w: w["ctx"].alloc_pd()),
        ("dealloc_pd", lambda w: w["other"].close()),
        ("create_cq", lambda w: w["ctx"].create_cq(8)),
        ("create_qp", lambda w: w["pd"].create_qp(w["cq"])),
        ("destroy_qp", lambda w: w["qp"].close()),
        ("modify_qp", lambda w: w["qp"].connect(w["qp"].info)),
        ("query_port", lambda w: w["ctx"].port(1)),
        ("query_device", lambda w: w["ctx"].attributes),
        ("open_device", lambda w: rv.open(w["ctx"].name).close()),
    ],
)
def test_other_threads_run_while_a_verb_blocks(verb, call, ctx, pd, cq):
    with (
        ctx.alloc_pd() as other,
        pd.reg_mr(bytearray(64)) as mr,
        pd.create_qp(cq) as qp,
    ):
        world = {"ctx": ctx, "pd": pd, "cq": cq, "other": other, "mr": mr, "qp": qp}
        rv.softverbs.delay(verb, 0.3)
        assert count_while(lambda: call(world)) > 50
        rv.softverbs.reset()


@pytest.mark.soft_only(reason="delays completions")
@pytest.mark.parametrize("wait", ["cq.wait", "qp.write"])
def test_other_threads_run_while_one_waits(wait, pair, pd):
    rv.softverbs.delay("completion", 0.3)
    with pd.reg_mr(bytearray(64), PEER) as mr:
        if wait == "cq.wait":
            pair.a.post_write(mr[:8], mr[8:16].remote())
            work = pair.cq.wait
        else:

            def work():
                pair.a.write(mr[:8], mr[8:16].remote())

        assert count_while(work) > 50


@pytest.mark.soft_only(reason="delays a verb")
def test_a_buffer_is_held_while_it_is_being_registered(pd):
    rv.softverbs.delay("reg_mr", 0.2)
    buffer = bytearray(64)
    regions = []
    thread = threading.Thread(target=lambda: regions.append(pd.reg_mr(buffer)))
    thread.start()
    assert eventually(lambda: is_held(buffer), 1)
    assert not regions
    thread.join(10)
    regions.pop().close()
    buffer.append(0)


def is_held(buffer):
    try:
        buffer.append(0)
    except BufferError:
        return True
    buffer.pop()
    return False


def test_registering_a_large_buffer_does_not_stop_other_threads(pd, is_soft):
    array = np.ones(1 << (28 if is_soft else 26), "u1")
    gaps = []
    done = threading.Event()

    def tick():
        last = time.monotonic()
        while not done.is_set():
            time.sleep(0.001)
            gaps.append(time.monotonic() - last)
            last = time.monotonic()

    thread = threading.Thread(target=tick)
    thread.start()
    start = time.monotonic()
    pd.reg_mr(array).close()
    took = time.monotonic() - start
    done.set()
    thread.join()
    # A gap as long as the whole would be a GIL that was kept.
    assert max(gaps) < max(0.05, took / 2)


@pytest.mark.soft_only(reason="delays a verb, and counts calls")
@pytest.mark.parametrize("threads", [2, 5])
def test_threads_that_close_one_region_deregister_it_once(threads, pd, counters):
    for _ in range(5):
        mr = pd.reg_mr(bytearray(64))
        counters.restart()
        rv.softverbs.delay("dereg_mr", 0.02)
        run_in_threads(*[mr.close] * threads)
        assert counters() == {"dereg_mr": 1, "live_mr": -1}
        assert mr.closed
        assert pd.context.mr_count == 0


@pytest.mark.soft_only(reason="delays verbs, and counts calls")
@pytest.mark.parametrize(
    ("verb", "make"),
    [
        ("close_device", lambda ctx, pd, cq: rv.open(ctx.name)),
        ("dealloc_pd", lambda ctx, pd, cq: ctx.alloc_pd()),
        ("destroy_cq", lambda ctx, pd, cq: ctx.create_cq(8)),
        ("destroy_qp", lambda ctx, pd, cq: pd.create_qp(cq)),
    ],
)
def test_threads_that_close_one_handle_close_it_once(verb, make, ctx, pd, cq, counters):
    handle = make(ctx, pd, cq)
    counters.restart()
    rv.softverbs.delay(verb, 0.05)
    run_in_threads(*[handle.close] * 4)
    assert counters()[verb] == 1
    assert handle.closed


@pytest.mark.soft_only(reason="delays and injects a failure")
def test_a_thread_that_waited_for_a_close_that_failed_closes_itself(pd, counters):
    mr = pd.reg_mr(bytearray(64))
    counters.restart()
    rv.softverbs.delay("dereg_mr", 0.05)
    rv.softverbs.fail("dereg_mr", errno.EIO, times=1)
    told = []

    def close():
        try:
            mr.close()
        except rv.VerbsError as error:
            told.append(error.errno)

    run_in_threads(close, close)
    assert told == [errno.EIO]
    assert mr.closed
    assert counters()["dereg_mr"] == 2


@pytest.mark.soft_only(reason="delays a verb")
def test_a_domain_is_busy_while_another_thread_registers(ctx):
    pd = ctx.alloc_pd()
    rv.softverbs.delay("reg_mr", 0.2)
    regions = []
    thread = threading.Thread(target=lambda: regions.append(pd.reg_mr(bytearray(64))))
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["reg_mr"])
    with pytest.raises(rv.VerbsError, match="1 open children or calls") as refusal:
        pd.close()
    assert refusal.value.errno == errno.EBUSY
    thread.join()
    regions.pop().close()
    pd.close()


@pytest.mark.soft_only(reason="delays verbs")
def test_a_region_in_the_middle_of_its_close_is_stale(pair, pd):
    mr = pd.reg_mr(bytearray(64), PEER)
    view, target = mr[:8], mr[8:16].remote()
    rv.softverbs.delay("dereg_mr", 0.2)
    thread = threading.Thread(target=mr.close)
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["dereg_mr"])
    for use in (
        view.array,
        view.remote,
        lambda: mr[:8],
        lambda: pair.a.write(view, target),
    ):
        with pytest.raises(rv.StaleViewError):
            use()
    assert not mr.closed
    thread.join()
    assert mr.closed


@pytest.mark.soft_only(reason="delays verbs")
@pytest.mark.parametrize("closed", ["pd", "cq"])
def test_a_parent_closed_while_a_queue_pair_is_being_made_is_no_crash(closed, ctx):
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    rv.softverbs.delay("query_port", 0.2)
    told = []

    def create():
        try:
            pd.create_qp(cq)
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=create)
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["query_port"])
    {"pd": pd, "cq": cq}[closed].close()
    thread.join()
    name = {"pd": "ProtectionDomain", "cq": "CompletionQueue"}[closed]
    assert told == [f"this {name} is closed"]
    cq.close()
    pd.close()


@pytest.mark.soft_only(reason="delays and injects a failure")
def test_a_domain_closed_while_a_lost_region_is_tried_again_is_no_crash(
    ctx, monkeypatch
):
    monkeypatch.setattr(sys, "unraisablehook", lambda hook: None)
    pd, other = ctx.alloc_pd(), ctx.alloc_pd()
    rv.softverbs.fail("dereg_mr", errno.EIO)
    other.reg_mr(bytearray(64))
    rv.softverbs.delay("dereg_mr", 0.2)
    before = rv.softverbs.counters()["dereg_mr"]
    told = []

    def register():
        try:
            pd.reg_mr(bytearray(64))
        except ValueError as error:
            told.append(str(error))

    thread = threading.Thread(target=register)
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["dereg_mr"] > before)
    pd.close()
    thread.join()
    assert told == ["this ProtectionDomain is closed"]
    other.close()


@pytest.mark.soft_only(reason="delays a verb")
def test_two_threads_do_not_connect_one_queue_pair(pd, cq):
    with pd.create_qp(cq) as a, pd.create_qp(cq) as b:
        rv.softverbs.delay("modify_qp", 0.1)
        told = []

        def connect():
            try:
                a.connect(b.info)
            except ValueError as error:
                told.append(str(error))

        run_in_threads(connect, connect)
        assert len(told) == 1
        assert "connected already" in told[0]


@pytest.mark.soft_only(reason="delays a verb")
def test_a_queue_pair_is_busy_while_another_thread_connects_it(pd, cq):
    qp = pd.create_qp(cq)
    rv.softverbs.delay("modify_qp", 0.2)
    thread = threading.Thread(target=qp.connect, args=(qp.info,))
    before = rv.softverbs.counters()["modify_qp"]
    thread.start()
    assert eventually(lambda: rv.softverbs.counters()["modify_qp"] > before)
    with pytest.raises(rv.VerbsError) as refusal:
        qp.close()
    assert refusal.value.errno == errno.EBUSY
    thread.join()
    qp.close()


def test_a_queue_at_which_a_thread_waits_is_busy(ctx):
    cq = ctx.create_cq(8)
    told = []

    def wait():
        try:
            cq.wait(1)
        except (TimeoutError, ValueError) as error:
            told.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    busy = 0
    while thread.is_alive():
        try:
            cq.close()
        except rv.VerbsError as error:
            assert error.errno == errno.EBUSY
            busy += 1
        time.sleep(0.001)
    cq.close()
    assert busy > 0
    assert told in ([TimeoutError], [ValueError])


def test_a_thread_may_poll_what_another_one_waits_for(pair, pd, is_soft):
    rounds = 300 if is_soft else 30
    if is_soft:
        rv.softverbs.delay("completion", 0.001)
    done = threading.Event()
    others = []
    with pd.reg_mr(bytearray(64), PEER) as mr:

        def write():
            for _ in range(rounds):
                pair.a.write(mr[:8], mr[8:16].remote(), timeout=20)
            done.set()

        def poll():
            while not done.is_set():
                others.extend(pair.cq.poll())
                time.sleep(0)

        run_in_threads(write, poll)
    assert others == []
    assert pair.a.in_flight == 0


def test_threads_register_slice_and_close_shared_and_private_arrays(ctx, pd, is_soft):
    rounds, threads = (500, 8) if is_soft else (40, 4)
    shared = [np.zeros(PAGE, "u1") for _ in range(4)]
    if is_soft:
        before = rv.softverbs.counters()

    def work(seed):
        dice = random.Random(seed)
        private = [np.zeros(100 + seed, "u1") for _ in range(4)]
        kept = []
        for i in range(rounds):
            array = dice.choice(shared + private)
            if is_soft and i % 50 == 0:
                rv.softverbs.delay(
                    dice.choice(["reg_mr", "dereg_mr"]), dice.random() / 1000
                )
            mr = pd.reg_mr(array, PEER)
            view = mr[dice.randrange(50) : 60]
            assert view.virtual_addr - array.ctypes.data == mr.length - view.size - (
                mr.length - 60
            )
            if dice.random() < 0.5:
                mr.close()
            else:
                kept.append(view)
            del mr, view
            if len(kept) > 5:
                kept.pop(dice.randrange(len(kept)))

    run_in_threads(*[lambda seed=seed: work(seed) for seed in range(threads)])
    assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)
    if is_soft:
        after = rv.softverbs.counters()
        assert after["reg_mr"] - before["reg_mr"] == rounds * threads
        assert after["dereg_mr"] - before["dereg_mr"] == rounds * threads
        assert after["live_mr"] == before["live_mr"]


def test_ids_that_threads_draw_are_never_equal(pd, is_soft):
    ids = []

    def draw():
        for _ in range(200 if is_soft else 20):
            with pd.reg_mr(bytearray(8)) as mr:
                ids.append(mr.id)

    run_in_threads(*[draw] * 4)
    assert len(set(ids)) == len(ids)


WAITING = """
    import signal, sys, threading, time
    import rdmaview as rv
    from helpers import eventually

    PEER = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
    ctx = rv.open(sys.argv[1]).__enter__()
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    a, b = pd.create_qp(cq), pd.create_qp(cq)
    mr = pd.reg_mr(bytearray(64), PEER)
    a.connect(b.info)

    def wait(seconds):
        if sys.argv[2] == "cq.wait":
            cq.wait(seconds)
        else:
            # The peer is not connected, so this is not done for a while.
            a.write(mr[:8], mr[8:16].remote(), timeout=seconds)
"""


@pytest.mark.parametrize("wait", ["cq.wait", "qp.write"])
def test_a_wait_answers_an_interrupt_within_100_ms(wait, device_name):
    done = run_python(
        WAITING
        + """
    times = []
    signal.signal(signal.SIGINT, signal.default_int_handler)
    def interrupt():
        time.sleep(0.15)
        times.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    if sys.argv[2] == "qp.write" and sys.argv[1].startswith("soft"):
        rv.softverbs.delay("completion", 100)
    threading.Thread(target=interrupt).start()
    try:
        wait(100)
    except KeyboardInterrupt:
        times.append(time.monotonic())
    print(times[1] - times[0])
    print(a.in_flight)
    """,
        device_name,
        wait,
    )
    assert (done.returncode, done.stderr) == (0, "")
    seconds, in_flight = done.stdout.split()
    assert float(seconds) < 0.1
    # What was posted stays posted, and its memory pinned.
    assert in_flight == ("0" if wait == "cq.wait" else "1")


@pytest.mark.parametrize("wait", ["cq.wait", "qp.write"])
def test_a_signal_with_a_handler_does_not_end_a_wait(wait, device_name):
    done = run_python(
        WAITING
        + """
    count = 0
    def handle(number, frame):
        global count
        count += 1
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
    if sys.argv[2] == "qp.write" and sys.argv[1].startswith("soft"):
        rv.softverbs.delay("completion", 100)
    start = time.monotonic()
    try:
        wait(0.2)
    except TimeoutError:
        took = time.monotonic() - start
    signal.setitimer(signal.ITIMER_REAL, 0)
    print(took, count)
    """,
        device_name,
        wait,
    )
    assert (done.returncode, done.stderr) == (0, "")
    took, count = done.stdout.split()
    assert 0.2 <= float(took) < 2
    assert int(count) >= 3


def test_a_handler_that_raises_ends_a_wait(cq):
    def handle(number, frame):
        raise KeyError("enough")

    old = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyError, match="enough"):
            cq.wait(30)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    # The queue is free for others: nothing of the wait is left.
    with pytest.raises(TimeoutError):
        cq.wait(0)
    cq.close()
