"""Who keeps what alive, who lets go of it, and in which order."""

import errno
import gc
import sys
import time
import warnings
import weakref

import numpy as np
import pytest
from helpers import PAGE, assert_silent, eventually, pinned_bytes, run_python

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ

PARENTS = {
    "context of a pd": lambda ctx, pd, cq: (ctx, pd, "1 open"),
    "pd of an mr": lambda ctx, pd, cq: (pd, pd.reg_mr(bytearray(64)), "1 open"),
    "pd of a qp": lambda ctx, pd, cq: (pd, pd.create_qp(cq), "1 open"),
    "cq of a qp": lambda ctx, pd, cq: (cq, pd.create_qp(cq), "1 open"),
}


@pytest.fixture
def handles(device_name):
    """Handles that the test itself closes, or drops."""
    ctx = rv.open(device_name)
    yield ctx, ctx.alloc_pd(), ctx.create_cq(16)
    ctx.__enter__()


def close_all(*handles):
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("kind", PARENTS)
def test_a_parent_with_a_child_is_busy_and_stays_usable(kind, ctx):
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    parent, child, count = PARENTS[kind](ctx, pd, cq)
    # The context has the queue as well.
    count = "2 open" if parent is ctx else count
    for _ in range(2):
        with pytest.raises(rv.VerbsError, match=count) as refusal:
            parent.close()
        assert refusal.value.errno == errno.EBUSY
        assert not parent.closed
    with pd.reg_mr(bytearray(64)) as mr:
        assert len(mr[:].array()) == 64
    close_all(child, pd, cq)
    parent.close()
    assert parent.closed


def test_a_parent_tells_the_count_of_its_children(pd):
    regions = [pd.reg_mr(bytearray(64)) for _ in range(3)]
    with pytest.raises(rv.VerbsError, match="3 open"):
        pd.close()
    regions.pop().close()
    with pytest.raises(rv.VerbsError, match="2 open"):
        pd.close()
    close_all(*regions)


def test_a_second_close_does_nothing(device_name):
    ctx = rv.open(device_name)
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    mr, qp = pd.reg_mr(bytearray(64)), pd.create_qp(cq)
    for handle in mr, qp, cq, pd, ctx:
        handle.close()
        assert handle.closed
    for handle in ctx, pd, cq, qp, mr:
        handle.close()
        assert handle.closed


@pytest.mark.soft_only(reason="counts calls")
def test_a_second_close_calls_no_verb(pd, counters):
    mr = pd.reg_mr(bytearray(64))
    mr.close()
    counters.restart()
    mr.close()
    assert counters() == {}


def test_every_handle_is_closed_at_the_end_of_its_with_block(device_name):
    with (
        rv.open(device_name) as ctx,
        ctx.alloc_pd() as pd,
        ctx.create_cq(8) as cq,
        pd.reg_mr(bytearray(64)) as mr,
        pd.create_qp(cq) as qp,
    ):
        assert not any(handle.closed for handle in (ctx, pd, cq, mr, qp))
    assert all(handle.closed for handle in (ctx, pd, cq, mr, qp))


def test_a_with_block_may_close_early(ctx):
    with ctx.alloc_pd() as pd:
        pd.close()
    assert pd.closed


@pytest.mark.soft_only(reason="injects a failure")
@pytest.mark.parametrize(
    ("verb", "make"),
    [
        ("dereg_mr", lambda ctx, pd, cq: pd.reg_mr(bytearray(64))),
        ("destroy_qp", lambda ctx, pd, cq: pd.create_qp(cq)),
        ("destroy_cq", lambda ctx, pd, cq: ctx.create_cq(8)),
        ("dealloc_pd", lambda ctx, pd, cq: ctx.alloc_pd()),
        ("close_device", lambda ctx, pd, cq: rv.open(ctx.name)),
    ],
)
class TestAFailedClose:
    def test_is_raised_and_can_be_tried_again(self, verb, make, ctx, pd, cq):
        handle = make(ctx, pd, cq)
        for error in errno.EIO, -errno.EBUSY:
            rv.softverbs.fail(verb, error)
            with pytest.raises(rv.VerbsError) as refusal:
                handle.close()
            assert (refusal.value.errno, refusal.value.verb) == (
                abs(error),
                f"ibv_{verb}",
            )
            assert not handle.closed
        handle.close()
        assert handle.closed

    def test_at_the_end_of_a_with_block_is_raised(self, verb, make, ctx, pd, cq):
        with pytest.raises(rv.VerbsError, match=f"ibv_{verb}"):
            with make(ctx, pd, cq) as handle:
                rv.softverbs.fail(verb, errno.EIO)
        handle.close()

    def test_does_not_hide_what_ended_a_with_block(self, verb, make, ctx, pd, cq):
        with pytest.raises(KeyError, match="the cause"):
            with make(ctx, pd, cq) as handle:
                rv.softverbs.fail(verb, errno.EIO)
                raise KeyError("the cause")
        assert not handle.closed
        handle.close()


def test_a_child_that_is_left_open_does_not_hide_what_ended_a_with_block(ctx):
    with pytest.raises(KeyError, match="the cause"):
        with ctx.alloc_pd() as pd:
            mr = pd.reg_mr(bytearray(64))
            raise KeyError("the cause")
    assert not pd.closed
    close_all(mr, pd)


@pytest.mark.soft_only(reason="injects a failure")
def test_a_region_that_could_not_be_closed_works_as_before(pair, pd):
    buffer = bytearray(64)
    mr = pd.reg_mr(buffer, PEER)
    view = mr[:32]
    rv.softverbs.fail("dereg_mr", errno.EBUSY)
    with pytest.raises(rv.VerbsError, match="try again"):
        mr.close()
    with pytest.raises(BufferError):
        buffer.append(0)
    view.array()[:] = 7
    pair.a.write(view, mr[32:].remote())
    assert buffer == bytes([7]) * 64
    assert (pd.context.mr_count, pd.context.mr_bytes) == (1, 64)
    mr.close()
    buffer.append(0)
    assert (pd.context.mr_count, pd.context.mr_bytes) == (0, 0)


def catch_unraisable(monkeypatch):
    caught = []
    monkeypatch.setattr(
        sys, "unraisablehook", lambda hook: caught.append(str(hook.exc_value))
    )
    return caught


@pytest.mark.soft_only(reason="injects a failure")
@pytest.mark.parametrize("again", ["reg_mr", "pd.close", "ctx.close"])
def test_what_a_finaliser_could_not_deregister_is_tried_again(
    again, device_name, counters, monkeypatch
):
    caught = catch_unraisable(monkeypatch)
    ctx = rv.open(device_name)
    pd = ctx.alloc_pd()
    buffer = bytearray(64)
    mr = pd.reg_mr(buffer)
    rv.softverbs.fail("dereg_mr", errno.EBUSY)
    del mr
    assert len(caught) == 1
    assert "ibv_dereg_mr" in caught[0] and "length=64" in caught[0]
    assert counters()["live_mr"] == 1
    # The device may still write there.
    with pytest.raises(BufferError):
        buffer.append(0)
    assert ctx.mr_count == 1
    if again == "reg_mr":
        pd.reg_mr(bytearray(8)).close()
        assert ctx.mr_count == 0
    elif again == "pd.close":
        pd.close()
    else:
        del pd
    if again != "ctx.close":
        buffer.append(0)
        pd.close()
    ctx.close()
    buffer.append(0)
    assert "live_mr" not in counters()
    assert "live_pd" not in counters()
    assert len(caught) == 1


@pytest.mark.soft_only(reason="injects a failure")
@pytest.mark.parametrize(
    ("verb", "make"),
    [
        ("destroy_cq", lambda ctx: ctx.create_cq(8)),
        ("dealloc_pd", lambda ctx: ctx.alloc_pd()),
        ("close_device", lambda ctx: rv.open(ctx.name).__enter__()),
    ],
)
def test_a_finaliser_that_fails_tells_of_it_and_raises_nothing(
    verb, make, device_name, monkeypatch
):
    caught = catch_unraisable(monkeypatch)
    ctx = rv.open(device_name).__enter__()
    handle = make(ctx)
    rv.softverbs.fail(verb, errno.EIO)
    del handle
    assert len(caught) == 1
    assert f"ibv_{verb}" in caught[0]
    # The parents go on, as far as the device lets them.
    del ctx
    gc.collect()


def test_views_are_stale_from_close_on_and_keep_their_values(pd):
    mr = pd.reg_mr(bytearray(64), PEER)
    view = mr[8:24]
    twin = view[:]
    before = (repr(view), hash(view), view.to_bytes(), view.to_dict())
    mr.close()
    assert view.attached
    assert view.mr is mr
    assert (repr(view), hash(view), view.to_bytes(), view.to_dict()) == before
    assert view == twin
    assert view[:4].size == 4
    for use in view.array, view.remote, lambda: memoryview(view):
        with pytest.raises(rv.StaleViewError):
            use()


def test_a_region_lives_as_long_as_a_view_of_it(pd):
    ctx = pd.context
    mr = pd.reg_mr(bytearray(64))
    view = mr[:][8:24][2:4]
    del mr
    gc.collect()
    assert ctx.mr_count == 1
    assert view.array().size == 2
    copy = view
    del view
    assert ctx.mr_count == 1
    del copy
    assert ctx.mr_count == 0


def test_a_detached_view_keeps_nothing_alive(pd):
    mr = pd.reg_mr(bytearray(64))
    detached = rv.MemoryRegionView.from_bytes(mr[:].to_bytes())
    del mr
    assert pd.context.mr_count == 0
    assert detached.size == 64


def test_a_buffer_is_let_go_of_with_the_last_view(pd):
    buffer = bytearray(64)
    view = pd.reg_mr(buffer)[:8]
    with pytest.raises(BufferError):
        buffer.append(0)
    del view
    buffer.append(0)


@pytest.mark.parametrize("take", [memoryview, rv.MemoryRegionView.array])
def test_arrays_outlive_the_registration_and_keep_the_memory(take, pd):
    array = np.zeros(64, "u1")
    alive = weakref.ref(array)
    mr = pd.reg_mr(array)
    taken = take(mr[8:16])
    del array
    mr.close()
    del mr
    gc.collect()
    assert pd.context.mr_count == 0
    assert alive() is not None
    taken[:] = b"12345678" if take is memoryview else 5
    assert alive()[8] == taken[0]
    assert alive()[7] == alive()[16] == 0
    del taken
    gc.collect()
    assert alive() is None


def test_an_array_of_an_array_keeps_the_memory_too(pd):
    buffer = bytearray(64)
    with pd.reg_mr(buffer) as mr:
        part = mr[:].array("u4")[4:][::2]
    part[:] = 1
    with pytest.raises(BufferError):
        buffer.append(0)
    del part
    buffer.append(0)


def test_an_owner_lives_as_long_as_its_region_and_its_arrays(pd):
    class Owner:
        def __init__(self):
            self.memory = np.zeros(64, "u1")

    owner = Owner()
    alive = weakref.ref(owner)
    mr = pd.reg_mr_address(owner.memory.ctypes.data, 64, owner=owner)
    array = mr[:].array()
    del owner
    gc.collect()
    assert alive() is not None
    mr.close()
    assert alive() is not None
    array[0] = 1
    assert alive().memory[0] == 1
    del array
    gc.collect()
    assert alive() is None


@pytest.mark.soft_only(reason="delays completions")
class TestWorkInFlight:
    def test_keeps_the_memory_though_every_name_is_gone(self, pair, pd):
        rv.softverbs.delay("completion", 0.3)
        source, target = np.full(64, 7, "u1"), np.zeros(64, "u1")
        alive = weakref.ref(source)
        remote = pd.reg_mr(target, PEER)
        pair.a.post_write(pd.reg_mr(source)[:], remote[:].remote())
        del source
        gc.collect()
        assert alive() is not None
        assert pd.context.mr_count == 2
        assert pair.cq.wait()[0].ok
        assert (target == 7).all()
        gc.collect()
        assert alive() is None
        assert pd.context.mr_count == 1

    def test_makes_its_region_busy_and_leaves_it_usable(self, pair, pd):
        rv.softverbs.delay("completion", 0.2)
        mr = pd.reg_mr(bytearray(64), PEER)
        pair.a.post_write(mr[:8], mr[8:16].remote())
        pair.a.post_write(mr[16:24], mr[24:32].remote())
        with pytest.raises(rv.VerbsError, match="2 work requests in flight") as refusal:
            mr.close()
        assert refusal.value.errno == errno.EBUSY
        assert not mr.closed
        mr[:].array()[0] = 1
        done = []
        while len(done) < 2:
            done += pair.cq.wait()
        mr.close()

    def test_keeps_its_memory_after_a_timeout(self, pair, pd):
        rv.softverbs.delay("completion", 0.3)
        source = np.full(64, 7, "u1")
        alive = weakref.ref(source)
        target = pd.reg_mr(bytearray(64), PEER)
        with pytest.raises(TimeoutError) as late:
            pair.a.write(pd.reg_mr(source)[:], target[:].remote(), timeout=0.05)
        del source, late
        gc.collect()
        assert alive() is not None
        assert pair.cq.wait()[0].ok
        gc.collect()
        assert alive() is None

    def test_does_not_hold_the_remote_side(self, pair, pd):
        # It is the peer's memory: only the peer knows who uses it.
        rv.softverbs.delay("completion", 0.1)
        local, remote = pd.reg_mr(bytearray(64)), pd.reg_mr(bytearray(64), PEER)
        pair.a.post_write(local[:], remote[:].remote())
        remote.close()
        assert pair.cq.wait()[0].status == rv.Status.REM_ACCESS_ERR

    def test_is_given_up_with_a_queue_pair_that_nobody_holds(self, pd, cq):
        rv.softverbs.delay("completion", 10)
        a, b = pd.create_qp(cq), pd.create_qp(cq)
        a.connect(b.info)
        b.connect(a.info)
        buffer = bytearray(64)
        mr = pd.reg_mr(buffer, PEER)
        a.post_write(mr[:32], mr[32:].remote())
        del a, b, mr
        gc.collect()
        buffer.append(0)
        assert cq.poll() == []
        assert pd.context.mr_count == 0

    def test_whose_finaliser_uses_the_same_queue(self, pair, pd):
        rv.softverbs.delay("completion", 0.05)
        target = pd.reg_mr(bytearray(64), PEER)
        ended = []

        class Source(np.ndarray):
            def __del__(self):
                rv.softverbs.delay("completion", 0)
                pair.a.write(target[:8], target[8:16].remote(), timeout=5)
                ended.append(pair.a.in_flight)

        pair.a.post_write(
            pd.reg_mr(np.zeros(64, "u1").view(Source))[:], target[:].remote()
        )
        (completion,) = pair.cq.wait()
        assert completion.ok
        assert ended == [0]
        target.close()


ENDS = "dereg_mr", "destroy_qp", "destroy_cq", "dealloc_pd", "close_device"


def test_a_cycle_of_all_handles_is_closed_children_first(device_name, is_soft):
    def drop_cycle():
        ctx = rv.open(device_name).__enter__()
        cycle = {"ctx": ctx, "pd": ctx.alloc_pd(), "cq": ctx.create_cq(8)}
        cycle["qp"] = cycle["pd"].create_qp(cycle["cq"])
        cycle["mr"] = cycle["pd"].reg_mr(bytearray(64))
        cycle["view"] = cycle["mr"][:]
        cycle["self"] = cycle

    if is_soft:
        before = rv.softverbs.counters()
    rounds = 200 if is_soft else 20
    for i in range(rounds):
        drop_cycle()
        if i % 10 == 0:
            gc.collect()
    gc.collect()
    if is_soft:
        after = rv.softverbs.counters()
        # The device refuses to take a parent from its children: no such refusal.
        for verb in ENDS:
            assert after[verb] - before[verb] == rounds
        for name in after:
            if name.startswith("live_"):
                assert after[name] == before[name]


def test_a_region_whose_owner_holds_it_is_collected(pd):
    class Segment:
        def __init__(self):
            self.memory = np.zeros(64, "u1")
            self.mr = pd.reg_mr_address(self.memory.ctypes.data, 64, owner=self)

    alive = weakref.ref(Segment())
    gc.collect()
    assert alive() is None
    assert pd.context.mr_count == 0


@pytest.mark.parametrize("order", ["parents first", "children first"])
def test_names_may_go_in_any_order(order, device_name, is_soft):
    before = rv.softverbs.counters() if is_soft else {}
    ctx = rv.open(device_name).__enter__()
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    handles = [ctx, pd, cq, pd.create_qp(cq), pd.reg_mr(bytearray(64))]
    handles.append(handles[-1][:])
    del ctx, pd, cq
    while handles:
        handles.pop(0 if order == "parents first" else -1)
    if is_soft:
        after = rv.softverbs.counters()
        live = [name for name in after if name.startswith("live_")]
        assert {name: after[name] for name in live} == {
            name: before[name] for name in live
        }


EXIT = """
    import sys, threading, time
    import numpy as np
    import rdmaview as rv

    PEER = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
    ctx = rv.open(sys.argv[1]).__enter__()
    pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
    a, b = pd.create_qp(cq), pd.create_qp(cq)
    a.connect(b.info)
    b.connect(a.info)
    array = np.zeros(4096, "u1")
    mr = pd.reg_mr(array, PEER)
    view, taken = mr[:64], mr[64:128].array()
    a.write(view, mr[128:192].remote())
    a.post_write(view, mr[128:192].remote())
"""
EXITS = {
    "live globals": "sys.exit(0)",
    "a cycle": "loop = [ctx, pd, cq, a, b, mr, view, taken]; loop.append(loop)",
    "globals that went in a bad order": "del ctx, pd, cq, a; sys.exit(0)",
    "a stale view": "mr.close() if a.close() is None else None; sys.exit(0)",
    "a thread that waits": """
    def wait():
        try:
            while True:
                cq.wait(100)
        except BaseException:
            raise SystemExit
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.1)
    """,
}


@pytest.mark.parametrize("state", EXITS)
def test_the_interpreter_exits_in_silence_with(state, device_name):
    assert_silent(
        run_python(
            EXIT + "    " + EXITS[state],
            device_name,
            options=("-X", "dev", "-W", "error"),
        )
    )


def test_an_unclosed_context_is_warned_of(device_name):
    ctx = rv.open(device_name)
    with pytest.warns(ResourceWarning, match=f"Context of {device_name}"):
        del ctx
        gc.collect()


def test_a_warning_that_is_an_error_is_told_and_not_raised(device_name, monkeypatch):
    caught = catch_unraisable(monkeypatch)
    ctx = rv.open(device_name)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del ctx
        gc.collect()
    assert caught == [f"unclosed rdmaview.Context of {device_name}"]


def test_nothing_but_a_context_is_warned_of(ctx):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pd, cq = ctx.alloc_pd(), ctx.create_cq(8)
        mr, qp = pd.reg_mr(bytearray(64)), pd.create_qp(cq)
        view = mr[:8]
        del view, mr, qp, cq, pd
        gc.collect()
    assert caught == []


def test_registering_and_dropping_leaves_nothing_pinned(ctx, pd, is_soft):
    array = np.zeros(65536, "u1")
    start = pinned_bytes()
    for i in range(10_000 if is_soft else 500):
        view = pd.reg_mr(array)[i : i + 64]
        assert view.size == 64
    del view
    assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)
    assert pinned_bytes() == start


def test_a_kernel_device_pins_while_it_is_registered(pd, is_soft):
    array = np.zeros(16 * PAGE, "u1")
    start = pinned_bytes()
    with pd.reg_mr(array):
        pinned = pinned_bytes() - start
    # The built-in device pins nothing.
    assert pinned == 0 if is_soft else pinned >= array.nbytes
    assert pinned_bytes() == start


@pytest.mark.soft_only(reason="counts objects")
def test_a_registration_that_failed_half_way_through_a_list_leaves_no_region(
    pd, counters
):
    buffers = [np.zeros(64, "u1"), np.zeros(64, "u1"), np.zeros(0, "u1")]
    with pytest.raises(ValueError, match="zero bytes"):
        [pd.reg_mr(buffer) for buffer in buffers]
    gc.collect()
    assert counters().get("live_mr", 0) == 0


def test_an_id_names_one_registration_for_ever(pd):
    buffer = bytearray(64)
    views = []
    for _ in range(5):
        with pd.reg_mr(buffer, iova=None) as mr:
            views.append(mr[:])
    assert len({view.virtual_addr for view in views}) == 1
    assert len({view.id for view in views}) == 5
    assert len(set(views)) == 5
    assert len({view.id >> 40 for view in views}) == 1


def test_a_slow_close_is_waited_for(is_soft, device_name):
    ctx = rv.open(device_name)
    pd = ctx.alloc_pd()
    mr = pd.reg_mr(bytearray(64))
    if is_soft:
        rv.softverbs.delay("dereg_mr", 0.1)
    start = time.monotonic()
    mr.close()
    assert time.monotonic() - start >= (0.1 if is_soft else 0)
    assert eventually(lambda: mr.closed)
    close_all(pd, ctx)
