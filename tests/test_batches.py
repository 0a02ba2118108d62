"""Many reads or writes posted together: one chain, one completion, no loss."""

import errno
import gc
import pickle
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import eventually
from hypothesis import given
from hypothesis import strategies as st

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
BLOCK = 256


@pytest.fixture
def sides(pd):
    """Two registered arrays of 64 KiB, ``near`` with numbers, ``far`` with zeros."""
    near = np.arange(1 << 16, dtype=np.uint64).astype(np.uint8)
    far = np.zeros(1 << 16, np.uint8)
    with pd.reg_mr(near, PEER) as near_mr, pd.reg_mr(far, PEER) as far_mr:
        yield SimpleNamespace(near=near, far=far, near_mr=near_mr, far_mr=far_mr)


def blocks(mr, indices):
    return mr.views(np.asarray(indices, np.uint64) * BLOCK, BLOCK)


def without_rights(remotes, bad):
    """The same remote views, of which those at the places `bad` will be refused."""
    packed = np.array(remotes)
    packed["rkey"][bad] ^= 1
    return rv.RemoteViewArray.from_array(packed)


def drain(cq, qp):
    """Take completions until nothing of the queue pair is in flight."""
    told = []
    while qp.in_flight:
        told += cq.wait()
    return told + cq.poll()


def pinned(mr):
    """Whether work in flight keeps a region from closing; it is closed if not."""
    try:
        mr.close()
    except rv.VerbsError as error:
        assert error.errno == errno.EBUSY
        return True
    return False


# What moves


def test_writes_land_where_each_remote_view_says(pair, sides):
    order = [3, 0, 2, 7, 5]
    pair.a.writes(blocks(sides.near_mr, order), blocks(sides.far_mr, range(5)).remote())
    expected = sides.near.reshape(-1, BLOCK)[order]
    assert np.array_equal(sides.far.reshape(-1, BLOCK)[:5], expected)
    assert not sides.far[5 * BLOCK :].any()


def test_reads_land_where_each_local_view_says(pair, sides):
    order = [3, 0, 2, 7, 5]
    pair.a.reads(blocks(sides.far_mr, range(5)), blocks(sides.near_mr, order).remote())
    expected = sides.near.reshape(-1, BLOCK)[order]
    assert np.array_equal(sides.far.reshape(-1, BLOCK)[:5], expected)


def test_sizes_may_differ_from_request_to_request(pair, sides):
    sizes = np.array([1, 300, 7, 4096, 64])
    starts = np.cumsum(sizes) - sizes
    pair.a.writes(
        sides.near_mr.views(starts, sizes), sides.far_mr.views(starts, sizes).remote()
    )
    assert np.array_equal(sides.far[: sizes.sum()], sides.near[: sizes.sum()])
    assert not sides.far[sizes.sum() :].any()


def test_more_requests_than_the_queue_holds_are_moved_as_it_has_room(pair, sides):
    places = np.random.default_rng(1).permutation(256)
    assert len(places) > 10 * 16
    pair.a.writes(blocks(sides.near_mr, places), blocks(sides.far_mr, places).remote())
    assert np.array_equal(sides.far, sides.near)
    assert pair.a.in_flight == 0
    assert pair.cq.poll() == []


def test_lists_of_views_are_taken_as_arrays_are(pair, sides):
    pair.a.writes(
        [sides.near_mr[:64], sides.near_mr[64:128]],
        (sides.far_mr[64:128].remote(), sides.far_mr[:64].remote()),
    )
    assert np.array_equal(sides.far[:64], sides.near[64:128])
    assert np.array_equal(sides.far[64:128], sides.near[:64])


def test_arrays_with_gaps_and_backwards_are_taken(pair, sides):
    local, remote = blocks(sides.near_mr, range(8)), blocks(sides.far_mr, range(8))
    pair.a.writes(local[::-2], remote.remote()[1::2])
    expected = sides.near.reshape(-1, BLOCK)[[7, 5, 3, 1]]
    assert np.array_equal(sides.far.reshape(-1, BLOCK)[1:8:2], expected)


def test_local_views_of_many_registrations_go_in_one_batch(pair, pd, sides):
    parts = [np.full(BLOCK, i + 1, np.uint8) for i in range(12)]
    regions = [pd.reg_mr(part, PEER) for part in parts]
    order = [5, 0, 11, 5, 3]
    pair.a.writes(
        [regions[i][:] for i in order], blocks(sides.far_mr, range(5)).remote()
    )
    assert sides.far.reshape(-1, BLOCK)[:5, 0].tolist() == [i + 1 for i in order]
    assert not any(pinned(region) for region in regions)


def test_nothing_to_move_is_moved_at_once(pair, sides):
    nothing = sides.near_mr.views([], [])
    assert pair.a.writes(nothing, nothing.remote()) is None
    assert pair.a.reads([], []) is None


@given(
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), max_size=60),
    st.booleans(),
)
def test_any_batch_does_what_its_requests_would_do_in_order(device_name, moves, reads):
    near, far = np.arange(1 << 16) % 251, np.zeros(1 << 16)
    near, far = near.astype(np.uint8), far.astype(np.uint8)
    model = far.reshape(-1, BLOCK).copy()
    # Each destination once: a device may reorder what overlaps.
    moves = list({there: (here, there) for here, there in moves}.values())
    for here, there in moves:
        model[there] = near.reshape(-1, BLOCK)[here]
    with (
        rv.open(device_name) as ctx,
        ctx.alloc_pd() as pd,
        ctx.create_cq(64) as cq,
        pd.create_qp(cq, max_send_wr=8) as a,
        pd.create_qp(cq, max_send_wr=8) as b,
        pd.reg_mr(near, PEER) as source,
        pd.reg_mr(far, PEER) as target,
    ):
        a.connect(b.info)
        b.connect(a.info)
        from_views = blocks(source, [here for here, _ in moves])
        to_views = blocks(target, [there for _, there in moves])
        if reads:
            a.reads(to_views, from_views.remote())
        else:
            a.writes(from_views, to_views.remote())
        assert np.array_equal(far.reshape(-1, BLOCK), model)
        assert a.bytes_completed == BLOCK * len(moves)


# One completion


def test_a_posted_batch_ends_in_one_completion(pair, sides):
    wr_id = pair.a.post_writes(
        blocks(sides.near_mr, range(9)), blocks(sides.far_mr, range(9)).remote()
    )
    (completion,) = drain(pair.cq, pair.a)
    assert completion.ok
    assert completion.wr_id == wr_id
    assert completion.opcode == "RDMA_WRITE"
    assert (completion.count, completion.completed) == (9, 9)
    assert completion.byte_len == 9 * BLOCK
    assert completion.qp_num == pair.a.qp_num
    assert (completion.local, completion.remote) == (None, None)
    assert np.array_equal(sides.far[: 9 * BLOCK], sides.near[: 9 * BLOCK])


def test_a_posted_read_batch_names_its_opcode(pair, sides):
    pair.a.post_reads(
        blocks(sides.far_mr, range(3)), blocks(sides.near_mr, range(3)).remote()
    )
    (completion,) = drain(pair.cq, pair.a)
    assert (completion.opcode, completion.count) == ("RDMA_READ", 3)


def test_batches_and_single_requests_end_in_the_order_of_posting(pair, sides):
    local, remote = blocks(sides.near_mr, range(4)), blocks(sides.far_mr, range(4))
    remote = remote.remote()
    posted = [
        pair.a.post_writes(local, remote),
        pair.a.post_write(local[0], remote[0]),
        pair.a.post_reads(local, remote),
        pair.a.post_writes(local[:1], remote[:1]),
    ]
    told = drain(pair.cq, pair.a)
    assert [completion.wr_id for completion in told] == posted
    assert [completion.count for completion in told] == [4, 1, 4, 1]


def test_a_batch_takes_a_place_in_the_queue_for_each_request(pair, sides):
    views = blocks(sides.near_mr, range(16))
    remotes = blocks(sides.far_mr, range(16)).remote()
    pair.a.post_writes(views, remotes)
    assert pair.a.in_flight == 16
    drain(pair.cq, pair.a)
    assert pair.a.in_flight == 0


@pytest.mark.soft_only(reason="counts calls of ibv_post_send")
def test_a_batch_is_one_call_of_the_device(pair, sides, counters):
    views = blocks(sides.near_mr, range(16))
    remotes = blocks(sides.far_mr, range(16)).remote()
    counters.restart()
    pair.a.post_writes(views, remotes)
    assert counters()["post_send"] == 1
    drain(pair.cq, pair.a)


def test_the_completion_of_a_batch_survives_pickling(pair, sides):
    pair.a.post_writes(
        blocks(sides.near_mr, range(2)), blocks(sides.far_mr, range(2)).remote()
    )
    (completion,) = drain(pair.cq, pair.a)
    again = pickle.loads(pickle.dumps(completion))
    assert (again.count, again.completed, again.byte_len) == (2, 2, 2 * BLOCK)
    assert str(again) == str(completion)


def test_a_single_completion_counts_one(pair, sides):
    pair.a.post_write(sides.near_mr[:8], sides.far_mr[:8].remote())
    (completion,) = drain(pair.cq, pair.a)
    assert (completion.count, completion.completed, completion.byte_len) == (1, 1, 8)


def test_the_queue_pair_counts_bytes_and_the_time_of_the_device(pair, sides):
    assert (pair.a.bytes_completed, pair.a.device_seconds) == (0, 0.0)
    local, remote = blocks(sides.near_mr, range(64)), blocks(sides.far_mr, range(64))
    pair.a.writes(local, remote.remote())
    pair.a.write(local[0], remote[0].remote())
    assert pair.a.bytes_completed == 65 * BLOCK
    assert 0 < pair.a.device_seconds < 60


# What is refused


@pytest.fixture
def other(ctx):
    with ctx.alloc_pd() as pd, pd.reg_mr(bytearray(4096), PEER) as mr:
        yield mr


@pytest.fixture
def closed(pd):
    mr = pd.reg_mr(bytearray(4096), PEER)
    views = mr.views([0, 64], 64)
    mr.close()
    return views


def parts(mr, *sizes):
    return mr.views(0, list(sizes))


BAD_BATCHES = {
    "other counts": (
        lambda w: (parts(w.near_mr, 8, 8), parts(w.far_mr, 8).remote()),
        ValueError,
        ("2 local", "1 remote"),
    ),
    "other sizes": (
        lambda w: (parts(w.near_mr, 8, 8), parts(w.far_mr, 8, 9).remote()),
        ValueError,
        ("request 1", "8 bytes", "9"),
    ),
    "zero bytes": (
        lambda w: (parts(w.near_mr, 8, 0), parts(w.far_mr, 8, 0).remote()),
        ValueError,
        ("request 1", "zero bytes"),
    ),
    "no remote right": (
        lambda w: (
            parts(w.near_mr, 8),
            [rv.RemoteView(w.far_mr.id, w.far_mr.iova, 8, 0)],
        ),
        ValueError,
        ("request 0", "rkey is 0"),
    ),
    "detached": (
        lambda w: (
            rv.ViewArray.from_bytes(parts(w.near_mr, 8).to_bytes()),
            parts(w.far_mr, 8).remote(),
        ),
        rv.DetachedViewError,
        ("detached",),
    ),
    "closed": (
        lambda w: (w.closed, parts(w.far_mr, 64, 64).remote()),
        rv.StaleViewError,
        ("closed",),
    ),
    "closed, among open ones": (
        lambda w: (
            [w.near_mr[:64], w.closed[1]],
            parts(w.far_mr, 64, 64).remote(),
        ),
        rv.StaleViewError,
        ("closed",),
    ),
    "another protection domain": (
        lambda w: ([w.near_mr[:8], w.other[:8]], parts(w.far_mr, 8, 8).remote()),
        ValueError,
        ("request 1", "protection domain"),
    ),
    "remote views as local ones": (
        lambda w: (parts(w.near_mr, 8).remote(), parts(w.far_mr, 8).remote()),
        TypeError,
        ("local sides", "RemoteViewArray"),
    ),
    "local views as remote ones": (
        lambda w: (parts(w.near_mr, 8), parts(w.far_mr, 8)),
        TypeError,
        ("remote sides", "ViewArray"),
    ),
    "a single view": (
        lambda w: (w.near_mr[:8], parts(w.far_mr, 8).remote()),
        TypeError,
        ("local sides", "MemoryRegionView"),
    ),
    "a list of something else": (
        lambda w: ([w.near_mr[:8], 7], parts(w.far_mr, 8, 8).remote()),
        TypeError,
        ("view 1", "int"),
    ),
    "None": (lambda w: (None, None), TypeError, ("NoneType",)),
}


@pytest.mark.parametrize("call", ["post_writes", "post_reads", "writes", "reads"])
@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_batch_is_refused_and_nothing_is_posted(
    pair, sides, other, closed, case, call
):
    make, error, words = BAD_BATCHES[case]
    sides.other, sides.closed = other, closed
    locals_, remotes = make(sides)
    with pytest.raises(error) as refusal:
        getattr(pair.a, call)(locals_, remotes)
    for word in words:
        assert word in str(refusal.value)
    assert pair.a.in_flight == 0
    assert not pinned(sides.near_mr)
    assert not pinned(other)


def test_a_read_needs_the_right_to_write_locally(pair, pd, sides):
    with pd.reg_mr(bytes(64), Access.REMOTE_READ) as mr:
        with pytest.raises(ValueError, match=r"request 1: .*LOCAL_WRITE"):
            pair.a.reads(
                [sides.near_mr[:64], mr[:]], parts(sides.far_mr, 64, 64).remote()
            )
        assert not pinned(mr)


@pytest.mark.soft_only("its max_msg_sz can be set")
def test_a_view_over_max_msg_sz_is_refused_by_its_place(pd, cq):
    rv.softverbs.configure(max_msg_sz=128)
    with pd.create_qp(cq) as a, pd.create_qp(cq) as b, pd.reg_mr(bytearray(512)) as mr:
        a.connect(b.info)
        b.connect(a.info)
        remotes = [rv.RemoteView(1, 4096, size, 7) for size in (128, 129)]
        with pytest.raises(ValueError, match=r"request 1: 129 bytes .*max_msg_sz 128"):
            a.writes(parts(mr, 128, 129), remotes)


@pytest.mark.parametrize("call", ["post_writes", "post_reads"])
def test_posting_nothing_is_refused(pair, sides, call):
    nothing = sides.near_mr.views([], [])
    with pytest.raises(ValueError, match="nothing to post"):
        getattr(pair.a, call)(nothing, nothing.remote())


def test_posting_more_than_the_queue_ever_holds_is_refused(pair, sides):
    views = blocks(sides.near_mr, range(256))
    with pytest.raises(ValueError, match=r"256 .* max_send_wr"):
        pair.a.post_writes(views, views.remote())
    assert pair.a.in_flight == 0
    assert not pinned(sides.near_mr)


def test_a_batch_for_which_there_is_no_room_now_is_not_posted_in_part(pair, sides):
    views, remotes = blocks(sides.near_mr, range(20)), blocks(sides.far_mr, range(20))
    pair.a.post_writes(views[:10], remotes[:10].remote())
    capacity = pair.a.in_flight
    with pytest.raises(rv.VerbsError) as refusal:
        pair.a.post_writes(views[:16], remotes[:16].remote())
    assert refusal.value.errno == errno.ENOMEM
    assert "16 more don't fit" in str(refusal.value)
    assert pair.a.in_flight == capacity
    assert [completion.count for completion in drain(pair.cq, pair.a)] == [10]


def test_the_completion_queue_must_have_room_as_well(ctx, pd, sides):
    with ctx.create_cq(8) as cq:
        depth = cq.depth
        with (
            pd.create_qp(cq, max_send_wr=depth + 8) as a,
            pd.create_qp(cq, max_send_wr=16) as b,
        ):
            a.connect(b.info)
            b.connect(a.info)
            views = sides.near_mr.views(0, [8] * (depth + 1))
            remotes = sides.far_mr.views(0, [8] * (depth + 1)).remote()
            with pytest.raises(ValueError, match=f"depth {depth}"):
                a.post_writes(views, remotes)
            a.writes(views, remotes)
            a.post_writes(views[:depth], remotes[:depth])
            with pytest.raises(rv.VerbsError, match="completion queue") as refusal:
                a.post_write(views[0], remotes[0])
            assert refusal.value.errno == errno.ENOMEM
            drain(cq, a)


def test_a_queue_pair_that_is_not_connected_takes_no_batch(pd, cq, sides):
    with pd.create_qp(cq) as qp:
        views = blocks(sides.near_mr, range(2))
        with pytest.raises(ValueError, match="not connected"):
            qp.post_writes(views, views.remote())
        assert not pinned(sides.near_mr)


def test_a_closed_queue_pair_takes_no_batch(pair, sides):
    views = blocks(sides.near_mr, range(2))
    pair.a.close()
    for call in (pair.a.post_writes, pair.a.post_reads, pair.a.writes, pair.a.reads):
        with pytest.raises(ValueError, match="closed"):
            call(views, views.remote())


@pytest.mark.parametrize(
    "timeout",
    [-1, float("nan"), float("inf"), 10**5000],
    ids=["-1", "nan", "inf", "huge"],
)
def test_a_batch_needs_a_finite_time(pair, sides, timeout):
    views = blocks(sides.near_mr, range(2))
    with pytest.raises(ValueError, match="timeout"):
        pair.a.writes(views, views.remote(), timeout=timeout)


class Closing(list):
    """A list of views that closes something while it is read."""

    def __iter__(self):
        self.victim.close()
        return super().__iter__()


@pytest.mark.parametrize("call", ["post_writes", "writes"])
@pytest.mark.parametrize("victim", ["region", "queue pair"])
def test_a_list_that_closes_what_it_is_for_is_refused(pair, sides, call, victim):
    views = Closing([sides.near_mr[:8], sides.near_mr[8:16]])
    views.victim = sides.near_mr if victim == "region" else pair.a
    with pytest.raises(ValueError, match="closed"):
        getattr(pair.a, call)(views, parts(sides.far_mr, 8, 8).remote())


# Failures


@pytest.mark.parametrize("bad", [0, 3, 8])
def test_a_failing_request_of_a_posted_batch_is_named(pair, sides, bad):
    local = blocks(sides.near_mr, range(9))
    remote = without_rights(blocks(sides.far_mr, range(9)).remote(), bad)
    wr_id = pair.a.post_writes(local, remote)
    (completion,) = drain(pair.cq, pair.a)
    assert completion.status == rv.Status.REM_ACCESS_ERR
    assert completion.wr_id == wr_id
    assert (completion.count, completion.completed) == (9, bad)
    assert completion.byte_len == bad * BLOCK
    assert completion.local == local[bad]
    assert completion.remote == remote[bad]
    assert f"{bad} of 9 requests done" in str(completion)
    assert pair.a.first_error.status == rv.Status.REM_ACCESS_ERR
    done = sides.far.reshape(-1, BLOCK)
    assert np.array_equal(done[:bad], sides.near.reshape(-1, BLOCK)[:bad])
    assert not done[bad:].any()
    assert not pinned(sides.near_mr)


@pytest.mark.parametrize("bad", [0, 5, 40, 255])
def test_a_failing_request_of_many_ends_the_wait_for_all(pair, sides, bad):
    local = blocks(sides.near_mr, range(256))
    remote = without_rights(blocks(sides.far_mr, range(256)).remote(), bad)
    with pytest.raises(rv.WorkCompletionError) as refusal:
        pair.a.writes(local, remote)
    error = refusal.value
    assert error.completed == bad
    assert error.status == rv.Status.REM_ACCESS_ERR
    assert (error.local, error.remote) == (local[bad], remote[bad])
    assert (error.completion.count, error.completion.completed) == (256, bad)
    assert f"{bad} of 256 requests done" in str(error)
    assert pickle.loads(pickle.dumps(error)).completed == bad
    assert pair.a.in_flight == 0
    assert pair.cq.poll() == []
    assert not pinned(sides.near_mr)


def test_a_batch_on_a_broken_queue_pair_says_what_broke_it(pair, sides):
    local = blocks(sides.near_mr, range(4))
    remote = blocks(sides.far_mr, range(4)).remote()
    with pytest.raises(rv.WorkCompletionError):
        pair.a.writes(local, without_rights(remote, 0))
    with pytest.raises((rv.WorkCompletionError, rv.VerbsError)) as refusal:
        pair.a.writes(local, remote)
    assert "REM_ACCESS_ERR" in str(refusal.value)
    assert pair.a.in_flight == 0


@pytest.mark.soft_only(reason="injects a failure of ibv_post_send")
@pytest.mark.parametrize("call", ["post_writes", "writes"])
def test_a_batch_that_the_device_refuses_leaves_nothing(pair, sides, call):
    views, remotes = blocks(sides.near_mr, range(4)), blocks(sides.far_mr, range(4))
    rv.softverbs.fail("post_send", errno.EINVAL)
    with pytest.raises(rv.VerbsError) as refusal:
        getattr(pair.a, call)(views, remotes.remote())
    assert refusal.value.errno == errno.EINVAL
    assert "0 were taken" in str(refusal.value)
    assert pair.a.in_flight == 0
    pair.a.writes(views, remotes.remote())
    assert np.array_equal(sides.far[: 4 * BLOCK], sides.near[: 4 * BLOCK])
    assert not pinned(sides.near_mr)


@pytest.mark.soft_only(reason="lets ibv_post_send take a part of a chain")
@pytest.mark.parametrize("taken", [1, 3, 8])
def test_a_batch_that_the_device_takes_in_part_is_told_with_the_next(
    pair, sides, taken
):
    local = blocks(sides.near_mr, range(9))
    remote = blocks(sides.far_mr, range(9)).remote()
    rv.softverbs.configure(max_chain=taken)
    with pytest.raises(rv.VerbsError) as refusal:
        pair.a.post_writes(local, remote)
    assert refusal.value.errno == errno.ENOMEM
    assert f"{taken} were taken" in str(refusal.value)
    assert pair.a.in_flight == taken
    assert eventually(lambda: sides.far[taken * BLOCK - 1])
    assert pair.cq.poll() == []
    assert pinned(sides.near_mr)
    wr_id = pair.a.post_write(sides.near_mr[:8], sides.far_mr[:8].remote())
    told = drain(pair.cq, pair.a)
    assert [(one.count, one.completed) for one in told] == [(taken, taken), (1, 1)]
    assert told[1].wr_id == wr_id
    assert not pinned(sides.near_mr)


@pytest.mark.soft_only(reason="lets ibv_post_send take a part of a chain")
def test_batches_taken_in_part_one_after_the_other_are_all_told(pair, sides):
    local = blocks(sides.near_mr, range(9))
    remote = blocks(sides.far_mr, range(9)).remote()
    rv.softverbs.configure(max_chain=2)
    for _ in range(3):
        with pytest.raises(rv.VerbsError):
            pair.a.post_writes(local, remote)
    with pytest.raises(rv.VerbsError):
        pair.a.writes(local, remote)
    assert pair.a.in_flight == 8
    rv.softverbs.reset()
    pair.a.post_writes(local[:3], remote[:3])
    assert [one.count for one in drain(pair.cq, pair.a)] == [2, 2, 2, 2, 3]
    assert not pinned(sides.near_mr)


@pytest.mark.soft_only(reason="lets ibv_post_send take a part of a chain")
def test_a_batch_taken_in_part_ends_when_its_queue_pair_closes(pair, sides):
    rv.softverbs.configure(max_chain=2)
    views = blocks(sides.near_mr, range(9))
    with pytest.raises(rv.VerbsError):
        pair.a.post_writes(views, views.remote())
    pair.a.close()
    assert not pinned(sides.near_mr)


# Time


@pytest.mark.soft_only(reason="delays completions")
def test_a_batch_that_is_late_says_how_many_were_done(pair, sides):
    local = blocks(sides.near_mr, range(256))
    remote = blocks(sides.far_mr, range(256)).remote()
    rv.softverbs.delay("completion", 0.3)
    with pytest.raises(TimeoutError) as late:
        pair.a.writes(local, remote, timeout=0.01)
    assert late.value.completed == 0
    assert "0 of 256" in str(late.value)
    in_flight = pair.a.in_flight
    assert 0 < in_flight <= 16
    assert pinned(sides.near_mr)
    told = drain(pair.cq, pair.a)
    assert [(one.ok, one.count, one.completed) for one in told] == [
        (True, in_flight, in_flight)
    ]
    assert not pinned(sides.near_mr)


@pytest.mark.soft_only(reason="delays completions")
def test_a_late_batch_that_fails_afterwards_is_told_by_poll(pair, sides):
    local = blocks(sides.near_mr, range(4))
    remote = without_rights(blocks(sides.far_mr, range(4)).remote(), 2)
    rv.softverbs.delay("completion", 0.2)
    with pytest.raises(TimeoutError):
        pair.a.writes(local, remote, timeout=0.01)
    told = drain(pair.cq, pair.a)
    assert {one.status for one in told} <= {
        rv.Status.REM_ACCESS_ERR,
        rv.Status.SUCCESS,
    }
    assert sum(one.completed for one in told) == 2


def test_a_batch_with_no_time_posts_what_fits_and_tells_it_later(pair, sides):
    local = blocks(sides.near_mr, range(256))
    remote = blocks(sides.far_mr, range(256)).remote()
    with pytest.raises(TimeoutError) as late:
        pair.a.writes(local, remote, timeout=0)
    done = late.value.completed
    told = drain(pair.cq, pair.a)
    assert len(told) <= 1
    assert not pinned(sides.near_mr)
    assert np.array_equal(sides.far[: done * BLOCK], sides.near[: done * BLOCK])


class AlarmError(Exception):
    """Raised by the signal handler."""


@pytest.mark.soft_only(reason="delays completions")
def test_a_signal_ends_the_wait_for_a_batch_and_loses_nothing(pair, sides):
    def ring(signum, frame):
        raise AlarmError

    rv.softverbs.delay("completion", 0.3)
    local = blocks(sides.near_mr, range(64))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        start = time.monotonic()
        with pytest.raises(AlarmError):
            pair.a.writes(local, blocks(sides.far_mr, range(64)).remote())
        assert time.monotonic() - start < 0.25
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    in_flight = pair.a.in_flight
    assert in_flight
    assert [one.count for one in drain(pair.cq, pair.a)] == [in_flight]
    assert not pinned(sides.near_mr)


# Threads, and the end


@pytest.mark.soft_only(reason="delays completions")
@pytest.mark.parametrize("count", [4, 256])
def test_closing_the_queue_pair_ends_the_wait_for_a_batch(pair, sides, count):
    rv.softverbs.delay("completion", 5)
    trouble = []

    def move():
        views = blocks(sides.near_mr, range(count))
        with pytest.raises(rv.VerbsError) as refusal:
            pair.a.writes(views, blocks(sides.far_mr, range(count)).remote())
        trouble.append(refusal.value)

    thread = threading.Thread(target=move)
    thread.start()
    assert eventually(lambda: pair.a.in_flight)
    assert pinned(sides.near_mr)
    pair.a.close()
    thread.join(10)
    assert not thread.is_alive()
    assert trouble[0].errno == errno.ECANCELED
    assert f"0 of {count}" in str(trouble[0])
    assert not pinned(sides.near_mr)


@pytest.mark.soft_only(reason="delays completions")
def test_a_region_can_not_be_closed_between_two_parts_of_a_batch(pair, sides):
    rv.softverbs.delay("completion", 0.002)
    done = threading.Event()

    def move():
        views = blocks(sides.near_mr, range(256))
        pair.a.writes(views, blocks(sides.far_mr, range(256)).remote())
        done.set()

    thread = threading.Thread(target=move)
    thread.start()
    assert eventually(lambda: pair.a.in_flight)
    while not done.is_set() and pinned(sides.near_mr):
        time.sleep(0.0005)
    thread.join()
    assert done.is_set()
    assert np.array_equal(sides.far, sides.near)


def test_an_array_may_be_dropped_as_soon_as_it_is_posted(pair, sides):
    for _ in range(20):
        pair.a.post_writes(
            blocks(sides.near_mr, range(8)), blocks(sides.far_mr, range(8)).remote()
        )
        gc.collect()
        assert [one.count for one in drain(pair.cq, pair.a)] == [8]


def test_a_queue_pair_dropped_with_a_batch_in_flight_lets_go_of_it(pd, cq, sides):
    for _ in range(10):
        a, b = pd.create_qp(cq, max_send_wr=16), pd.create_qp(cq, max_send_wr=16)
        a.connect(b.info)
        b.connect(a.info)
        a.post_writes(
            blocks(sides.near_mr, range(16)), blocks(sides.far_mr, range(16)).remote()
        )
        del a, b
        gc.collect()
    assert not pinned(sides.near_mr)


def test_threads_move_batches_through_one_queue_pair(pair, pd, is_soft):
    rounds = 60 if is_soft else 8
    trouble = []

    def move(seed):
        dice = np.random.default_rng(seed)
        here, there = np.zeros(1 << 14, np.uint8), np.zeros(1 << 14, np.uint8)
        try:
            with pd.reg_mr(here, PEER) as source, pd.reg_mr(there, PEER) as target:
                for _ in range(rounds):
                    count = int(dice.integers(1, 64))
                    places = dice.permutation(64)[:count]
                    here[:] = dice.integers(0, 256, here.size)
                    there[:] = here if seed % 2 else 0
                    local, remote = blocks(source, places), blocks(target, places)
                    if seed % 2:
                        here[:] = 0
                        pair.a.reads(local, remote.remote(), timeout=60)
                    else:
                        pair.a.writes(local, remote.remote(), timeout=60)
                    a, b = here.reshape(-1, BLOCK), there.reshape(-1, BLOCK)
                    assert np.array_equal(a[places], b[places])
        except BaseException as error:
            trouble.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=move, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert trouble == []
    assert pair.a.in_flight == 0
    assert pair.cq.poll() == []
