"""Bytes that move: write and read, completions, and every way in which they end."""

import contextlib
import errno
import pickle
import random
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import PAGE, eventually, mapping

import rdmaview as rv
from rdmaview import Access, QueuePairInfo, QueuePairState, RemoteView, Status

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
READS = Access.LOCAL_WRITE | Access.REMOTE_READ
WRITES = Access.LOCAL_WRITE | Access.REMOTE_WRITE
GUARD = 64
SIZES = [1, 2, 3, 7, 8, 63, 64, 65, 4095, 4096, 4097, 65535, 65536, 65537, 1 << 20]


@pytest.fixture
def sides(pd):
    """Two regions with all of a peer's rights, and the memory of both as arrays."""
    near, far = (np.zeros(PAGE, "u1") for _ in range(2))
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(pd.reg_mr(near, PEER))
        remote = stack.enter_context(pd.reg_mr(far, PEER))
        yield SimpleNamespace(
            near=near,
            far=far,
            local=local,
            remote=remote,
            target=remote[:].remote(),
            enter=stack.enter_context,
        )


@pytest.fixture
def make_pair(pd, cq, sides):
    """Make connected queue pairs that last as long as the test."""
    made = []

    def make(**sizes):
        pair = [pd.create_qp(cq, **sizes) for _ in range(2)]
        made.extend(pair)
        pair[0].connect(pair[1].info)
        pair[1].connect(pair[0].info)
        return pair

    yield make
    for qp in made:
        qp.close()


def payload(size):
    return np.random.default_rng(size).integers(0, 256, size, "u1")


def wait_for(cq, count, timeout=10.0):
    """Take so many completions."""
    completions = []
    while len(completions) < count:
        completions += cq.wait(timeout)
    assert len(completions) == count
    return completions


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("verb", ["write", "read"])
def test_exactly_the_bytes_of_the_view_move(verb, size, pair):
    whole = size + 2 * GUARD
    here, there = np.full(whole, 0xEE, "u1"), np.full(whole, 0xDD, "u1")
    source, target = (here, there) if verb == "write" else (there, here)
    edge = target[0]
    inside = slice(GUARD, GUARD + size)
    source[inside] = payload(size)
    before = source.copy()
    with pair.pd.reg_mr(here, PEER) as local, pair.pd.reg_mr(there, PEER) as remote:
        getattr(pair.a, verb)(local[inside], remote[inside].remote())
    assert np.array_equal(target[inside], payload(size))
    assert np.array_equal(source, before)
    assert (target[:GUARD] == edge).all()
    assert (target[GUARD + size :] == edge).all()


@pytest.mark.parametrize("dtype", ["i1", "<u2", ">f4", "f8", "c16", "M8[s]", "S5", "?"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_of_any_dtype_and_order_arrives(dtype, order, pair):
    shape = (3, 5)
    raw = payload(15 * np.dtype(dtype).itemsize) & 1
    sent = np.frombuffer(raw, dtype).reshape(shape, order=order).copy(order)
    got = np.zeros_like(sent)
    with pair.pd.reg_mr(sent) as local, pair.pd.reg_mr(got, PEER) as remote:
        pair.a.write(local.view_of(sent), remote.view_of(got).remote())
    assert got.tobytes("A") == sent.tobytes("A")
    assert np.array_equal(got, sent, equal_nan=dtype in (">f4", "f8", "c16"))


def test_records_arrive_field_by_field(pair):
    dtype = np.dtype([("id", "u1"), ("x", "<f8")])
    assert dtype.itemsize == 9
    sent = np.array([(1, 0.5), (2, -1.5), (255, 1e300)], dtype)
    got = np.zeros(3, dtype)
    with pair.pd.reg_mr(sent) as local, pair.pd.reg_mr(got, PEER) as remote:
        assert local.length == 27
        pair.a.write(local[9:], remote[9:].remote())
    assert got.tolist() == [(0, 0.0), (2, -1.5), (255, 1e300)]


def test_an_array_that_starts_inside_its_base_is_sent_from_its_own_start(pair):
    base = np.arange(1000, dtype="f4")
    got = np.zeros(250, "f4")
    with pair.pd.reg_mr(base) as local, pair.pd.reg_mr(got, PEER) as remote:
        pair.a.write(local.view_of(base[250:500]), remote[:].remote())
    assert np.array_equal(got, base[250:500])


def test_a_remote_view_that_came_as_bytes_is_written_and_read(pair, sides):
    target = RemoteView.from_bytes(sides.remote[16:32].remote().to_bytes())
    sides.near[:16] = payload(16)
    pair.a.write(sides.local[:16], target)
    assert np.array_equal(sides.far[16:32], payload(16))
    pair.a.read(sides.local[100:116], target)
    assert np.array_equal(sides.near[100:116], payload(16))


@pytest.mark.parametrize("verb", ["write", "read"])
def test_addresses_of_a_zero_based_region_start_at_zero(verb, pair):
    with mapping(2 * PAGE) as here, mapping(2 * PAGE) as there:
        with (
            pair.pd.reg_mr_address(here, 2 * PAGE, PEER, iova=0) as local,
            pair.pd.reg_mr_address(there, 2 * PAGE, PEER, iova=1 << 40) as remote,
        ):
            cut = slice(PAGE + 5, PAGE + 105)
            near, far = local[cut], remote[cut]
            assert (near.rdma_addr, far.rdma_addr) == (PAGE + 5, (1 << 40) + PAGE + 5)
            source, target = (near, far) if verb == "write" else (far, near)
            source.array()[:] = payload(100)
            getattr(pair.a, verb)(near, far.remote())
            assert np.array_equal(target.array(), payload(100))


def test_a_copy_on_write_array_stays_as_it_was_at_the_peer(pair):
    sent = np.full(64, 7, "u1")
    got = np.zeros(64, "u1")
    with pair.pd.reg_mr(sent) as local, pair.pd.reg_mr(got, PEER) as remote:
        pair.a.write(local[:], remote[:].remote())
        sent[:] = 9
        assert (got == 7).all()
        pair.a.write(local[:], remote[:].remote())
        assert (got == 9).all()


def test_a_read_only_buffer_is_sent(pair, sides):
    with pair.pd.reg_mr(b"immutable bytes!") as local:
        pair.a.write(local[:], sides.remote[:16].remote())
    assert sides.far[:16].tobytes() == b"immutable bytes!"


def test_a_read_only_buffer_is_read_by_a_peer_and_never_written(pair, sides):
    content = b"x" * 64
    with pair.pd.reg_mr(content, Access.REMOTE_READ) as remote:
        target = remote[:].remote()
        pair.a.read(sides.local[:64], target)
        assert sides.near[:64].tobytes() == content
        with pytest.raises(rv.WorkCompletionError) as refusal:
            pair.a.write(sides.local[64:128], target)
    assert refusal.value.status == Status.REM_ACCESS_ERR
    assert content == b"x" * 64


def test_both_ends_write_and_read_at_once(pair, sides):
    here, there = sides.local[:].remote(), sides.remote[:].remote()
    for i in range(4):
        pair.a.post_write(sides.local[i * 8 : i * 8 + 8], there[i * 8 : i * 8 + 8])
        pair.b.post_write(sides.remote[512 + i : 513 + i], here[512 + i : 513 + i])
        pair.a.post_read(sides.local[1024 + i : 1025 + i], there[1024 + i : 1025 + i])
        pair.b.post_read(sides.remote[2048 + i : 2049 + i], here[2048 + i : 2049 + i])
    completions = wait_for(pair.cq, 16)
    assert all(completion.ok for completion in completions)
    assert {completion.qp_num for completion in completions} == {
        pair.a.qp_num,
        pair.b.qp_num,
    }


def test_a_post_returns_what_its_completion_is_called(pair, sides):
    wrote = pair.a.post_write(sides.local[:8], sides.target[:8])
    read = pair.a.post_read(sides.local[8:24], sides.target[8:24])
    first, second = wait_for(pair.cq, 2)
    assert [first.wr_id, second.wr_id] == [wrote, read]
    assert [first.opcode, second.opcode] == ["RDMA_WRITE", "RDMA_READ"]
    assert [first.byte_len, second.byte_len] == [8, 16]
    assert first.local == sides.local[:8]
    assert second.remote == sides.target[8:24]
    assert first.ok and first.status == Status.SUCCESS
    assert first.qp_num == pair.a.qp_num
    assert first.first_error is None


def test_completions_of_one_queue_pair_come_in_the_order_of_their_posts(pair, sides):
    posted = [
        (pair.a.post_write, pair.a.post_read)[i % 2](
            sides.local[i : i + 1], sides.target[i : i + 1]
        )
        for i in range(16)
    ]
    assert [completion.wr_id for completion in wait_for(pair.cq, 16)] == posted


def test_no_wr_id_comes_twice(pair, sides):
    seen = set()
    for _ in range(3):
        for qp in pair.a, pair.b:
            remote = (sides.remote if qp is pair.a else sides.local)[:1].remote()
            local = (sides.local if qp is pair.a else sides.remote)[:1]
            seen |= {qp.post_write(local, remote) for _ in range(8)}
        wait_for(pair.cq, 16)
    assert len(seen) == 48


def test_poll_gives_at_most_what_was_asked_for(pair, sides):
    for _ in range(10):
        pair.a.post_write(sides.local[:1], sides.target[:1])
    pair.a.write(sides.local[:1], sides.target[:1])
    counts = [len(pair.cq.poll(n)) for n in (1, 4, 3, 16, 16)]
    assert counts == [1, 4, 3, 2, 0]


def test_a_blocking_write_leaves_others_completions_for_poll(pair, sides):
    posted = [pair.a.post_write(sides.local[:8], sides.target[:8]) for _ in range(3)]
    pair.a.write(sides.local[8:16], sides.target[8:16])
    assert [completion.wr_id for completion in pair.cq.poll()] == posted


def test_a_blocking_write_leaves_no_completion_behind(pair, sides):
    pair.a.write(sides.local[:8], sides.target[:8])
    assert pair.cq.poll() == []
    assert pair.a.in_flight == 0


def test_many_queue_pairs_share_a_completion_queue(make_pair, cq, sides):
    pairs = [make_pair(max_send_wr=4) for _ in range(6)]
    sides.near[:] = payload(PAGE)
    posted = {}
    for i, (a, b) in enumerate(pairs):
        for qp, start in (a, 128 * i), (b, 128 * i + 64):
            wr_id = qp.post_write(
                sides.local[start : start + 64], sides.target[start : start + 64]
            )
            posted[wr_id] = qp.qp_num
    completions = wait_for(cq, 12)
    assert {c.wr_id: c.qp_num for c in completions} == posted
    assert np.array_equal(sides.far[:768], payload(PAGE)[:768])


def test_a_new_queue_pair_does_not_inherit_what_an_older_one_was_told(
    make_pair, cq, sides
):
    for i in range(5):
        a, b = make_pair(max_send_wr=2)
        a.post_write(sides.local[:8], sides.target[:8])
        a.close()
        b.close()
        c, _ = make_pair(max_send_wr=2)
        c.write(sides.local[i : i + 1], sides.target[i : i + 1])
        assert c.first_error is None
        assert c.in_flight == 0


class Rule:
    """A transfer that must end with a status, whichever way it is asked for."""

    def __init__(self, name, status, make, verbs=("write", "read"), soft_only=False):
        self.name, self.status, self.make = name, status, make
        self.verbs, self.soft_only = verbs, soft_only


def unknown_rkey(sides, pd):
    target = sides.target
    return RemoteView(
        target.id, target.rdma_addr, target.size, target.rkey ^ 0x00FFF000
    )[:64]


def swapped_keys(sides, pd):
    view = sides.remote[:64]
    assert view.lkey != view.rkey
    return RemoteView(view.id, view.rdma_addr, view.size, view.lkey)


def beyond_the_end(sides, pd):
    target = sides.target
    return RemoteView(target.id, target.rdma_addr + target.size - 32, 64, target.rkey)


def before_the_start(sides, pd):
    target = sides.target
    return RemoteView(target.id, target.rdma_addr - 32, 64, target.rkey)


def virtual_address_of_a_zero_based_region(sides, pd):
    target = sides.target
    return RemoteView(target.id, 0, 64, target.rkey)


def at_the_end_of_all_addresses(sides, pd):
    return RemoteView(sides.target.id, 2**64 - 65, 64, sides.target.rkey)


def registered(sides, pd, access):
    region = sides.enter(pd.reg_mr(bytearray(64), access))
    return region[:].remote()


def closed_region(sides, pd):
    with pd.reg_mr(bytearray(64), PEER) as region:
        return region[:].remote()


def region_of_another_pd(sides, pd):
    return registered(sides, sides.enter(pd.context.alloc_pd()), PEER)


RULES = [
    Rule("an rkey that nobody has", Status.REM_ACCESS_ERR, unknown_rkey),
    Rule("an lkey as rkey", Status.REM_ACCESS_ERR, swapped_keys, soft_only=True),
    Rule("a range beyond the region's end", Status.REM_ACCESS_ERR, beyond_the_end),
    Rule("a range before the region's start", Status.REM_ACCESS_ERR, before_the_start),
    Rule(
        "an address that is not the region's",
        Status.REM_ACCESS_ERR,
        virtual_address_of_a_zero_based_region,
    ),
    Rule("the last address", Status.REM_ACCESS_ERR, at_the_end_of_all_addresses),
    Rule("a region that was closed", Status.REM_ACCESS_ERR, closed_region),
    Rule(
        "a region of another protection domain",
        Status.REM_ACCESS_ERR,
        region_of_another_pd,
    ),
    Rule(
        "a region that may only be read",
        Status.REM_ACCESS_ERR,
        lambda sides, pd: registered(sides, pd, READS),
        verbs=("write",),
    ),
    Rule(
        "a region that may only be written",
        Status.REM_ACCESS_ERR,
        lambda sides, pd: registered(sides, pd, WRITES),
        verbs=("read",),
    ),
]
REFUSALS = [
    pytest.param(
        rule,
        verb,
        id=f"{verb}: {rule.name}",
        marks=[pytest.mark.soft_only(reason="rxe's keys are equal")]
        if rule.soft_only
        else [],
    )
    for rule in RULES
    for verb in rule.verbs
]


@pytest.mark.parametrize(("rule", "verb"), REFUSALS)
def test_what_a_peer_must_not_do_ends_in_a_bad_status(rule, verb, pair, sides):
    sides.near[:], sides.far[:] = 1, 2
    target = rule.make(sides, pair.pd)
    with pytest.raises(rv.WorkCompletionError) as refusal:
        getattr(pair.a, verb)(sides.local[:64], target)
    error = refusal.value
    assert (error.status, error.errno) == (rule.status, errno.EIO)
    assert error.remote == target
    assert error.local == sides.local[:64]
    assert not error.local.attached
    for value in (
        f"{rule.status.name} ({int(rule.status)})",
        repr(target),
        repr(sides.local[:64]),
        "RDMA_" + verb.upper(),
        hex(pair.a.qp_num),
    ):
        assert value in str(error)
    assert (sides.near == 1).all()
    assert (sides.far == 2).all()
    assert pair.a.state == QueuePairState.ERR
    assert "broken" in repr(pair.a)


def test_a_bad_status_is_data_in_poll(pair, sides):
    target = unknown_rkey(sides, pair.pd)
    wr_id = pair.a.post_write(sides.local[:64], target)
    (completion,) = pair.cq.wait()
    assert completion.wr_id == wr_id
    assert completion.status == Status.REM_ACCESS_ERR
    assert not completion.ok
    assert completion.byte_len == 0
    assert completion.remote == target
    assert "REMOTE_WRITE" in completion.hint


def test_the_first_bad_status_is_named_by_every_later_one(pair, sides):
    bad = unknown_rkey(sides, pair.pd)
    pair.a.post_write(sides.local[:64], bad)
    for _ in range(3):
        pair.a.post_write(sides.local[:64], sides.target[:64])
    first, *flushed = wait_for(pair.cq, 4)
    assert first.status == Status.REM_ACCESS_ERR
    assert first.first_error is None
    for completion in flushed:
        assert completion.status == Status.WR_FLUSH_ERR
        assert completion.first_error is first
        assert "REM_ACCESS_ERR (10)" in str(completion)
        assert repr(bad) in str(completion)
    assert pair.a.first_error is first
    with pytest.raises(rv.WorkCompletionError) as later:
        pair.a.write(sides.local[:64], sides.target[:64])
    assert later.value.status == Status.WR_FLUSH_ERR
    assert later.value.first_error is first
    assert "REM_ACCESS_ERR (10)" in str(later.value)


def test_a_broken_queue_pair_leaves_the_others_whole(make_pair, sides, pd):
    broken, _ = make_pair()
    whole, _ = make_pair()
    with pytest.raises(rv.WorkCompletionError):
        broken.write(sides.local[:64], unknown_rkey(sides, pd))
    whole.write(sides.local[:64], sides.target[:64])
    assert whole.first_error is None


def test_a_completion_and_its_error_pass_through_pickle(pair, sides):
    pair.a.post_write(sides.local[:64], unknown_rkey(sides, pair.pd))
    pair.a.post_write(sides.local[:64], sides.target[:64])
    first, flushed = wait_for(pair.cq, 2)
    back = pickle.loads(pickle.dumps(flushed))
    assert str(back) == str(flushed)
    assert (back.status, back.local, back.remote) == (
        flushed.status,
        flushed.local,
        flushed.remote,
    )
    assert str(back.first_error) == str(first)
    with pytest.raises(rv.WorkCompletionError) as error:
        pair.a.write(sides.local[:64], sides.target[:64])
    again = pickle.loads(pickle.dumps(error.value))
    assert type(again) is rv.WorkCompletionError
    assert (str(again), again.status, again.errno) == (
        str(error.value),
        error.value.status,
        errno.EIO,
    )


def test_a_peer_that_is_not_there_is_a_retry_error_that_names_the_gid(pd, cq, sides):
    with pd.create_qp(cq) as qp, pd.create_qp(cq) as peer:
        gone = peer.info
        peer.close()
        qp.connect(gone)
        with pytest.raises(rv.WorkCompletionError) as refusal:
            qp.write(sides.local[:8], sides.target[:8], timeout=60)
        assert refusal.value.status == Status.RETRY_EXC_ERR
        for value in (f"GID {qp.gid.index}", qp.gid.type, qp.gid.address):
            assert value in str(refusal.value)


@pytest.mark.soft_only(reason="a kernel device holds the pages")
@pytest.mark.parametrize(
    ("verb", "dead", "status"),
    [
        ("write", "local", Status.LOC_PROT_ERR),
        ("read", "local", Status.LOC_PROT_ERR),
        ("write", "remote", Status.REM_ACCESS_ERR),
        ("read", "remote", Status.REM_ACCESS_ERR),
    ],
)
def test_memory_that_was_unmapped_is_a_status_and_no_crash(
    verb, dead, status, pair, sides
):
    with mapping(PAGE) as address:
        region = pair.pd.reg_mr_address(address, PAGE, PEER)
    near = region if dead == "local" else sides.local
    far = region if dead == "remote" else sides.remote
    with pytest.raises(rv.WorkCompletionError) as refusal:
        getattr(pair.a, verb)(near[:64], far[:64].remote())
    assert refusal.value.status == status
    region.close()


@pytest.mark.soft_only(reason="sets a limit")
def test_a_limit_that_shrank_is_a_status(pair, sides):
    rv.softverbs.configure(max_msg_sz=32)
    with pytest.raises(rv.WorkCompletionError) as refusal:
        pair.a.write(sides.local[:64], sides.target[:64])
    assert refusal.value.status == Status.LOC_LEN_ERR


def test_wait_without_work_times_out_in_time(cq):
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"0\.1 s; 0 work requests"):
        cq.wait(0.1)
    assert 0.1 <= time.monotonic() - start < 2


def test_wait_with_no_time_looks_once(pair, sides):
    with pytest.raises(TimeoutError):
        pair.cq.wait(0)
    pair.a.post_write(sides.local[:8], sides.target[:8])
    assert eventually(lambda: take(pair.cq))


def take(cq):
    try:
        return cq.wait(0)
    except TimeoutError:
        return None


@pytest.mark.soft_only(reason="delays completions")
@pytest.mark.parametrize("verb", ["write", "read"])
def test_a_transfer_that_timed_out_ends_later_in_poll(verb, pair, sides):
    sides.near[:8], sides.far[:8] = 1, 2
    rv.softverbs.delay("completion", 0.3)
    start = time.monotonic()
    with pytest.raises(TimeoutError, match=r"8 bytes .*0\.05 s.*in flight"):
        getattr(pair.a, verb)(sides.local[:8], sides.target[:8], timeout=0.05)
    assert 0.05 <= time.monotonic() - start < 0.25
    assert pair.a.in_flight == 1
    with pytest.raises(rv.VerbsError) as refusal:
        sides.local.close()
    assert refusal.value.errno == errno.EBUSY
    (completion,) = pair.cq.wait()
    assert completion.ok
    assert completion.opcode == f"RDMA_{verb.upper()}"
    assert (sides.near[:8] == sides.far[:8]).all()
    assert pair.a.in_flight == 0


@pytest.mark.soft_only(reason="delays completions")
def test_a_timeout_of_zero_posts_and_does_not_wait(pair, sides):
    rv.softverbs.delay("completion", 0.1)
    with pytest.raises(TimeoutError):
        pair.a.write(sides.local[:8], sides.target[:8], timeout=0)
    assert pair.cq.wait()[0].ok


@pytest.mark.soft_only(reason="delays completions")
def test_what_came_before_its_own_timeout_is_told_to_poll_in_its_place(pair, sides):
    rv.softverbs.delay("completion", 0.2)
    ids = [pair.a.post_write(sides.local[:8], sides.target[:8]) for _ in range(2)]
    with pytest.raises(TimeoutError) as late:
        pair.a.write(sides.local[:8], sides.target[:8], timeout=0.01)
    ids.append(int(str(late.value).partition("request ")[2].split()[0], 16))
    assert [completion.wr_id for completion in wait_for(pair.cq, 3)] == ids


@pytest.mark.soft_only(reason="delays completions, and counts calls")
def test_a_full_send_queue_is_told_before_the_verb(make_pair, cq, sides, counters):
    rv.softverbs.delay("completion", 0.2)
    qp, _ = make_pair(max_send_wr=3)
    for _ in range(3):
        qp.post_write(sides.local[:8], sides.target[:8])
    counters.restart()
    for post in qp.post_write, qp.write, qp.post_read, qp.read:
        with pytest.raises(rv.VerbsError, match="send queue is full: 3") as refusal:
            post(sides.local[:8], sides.target[:8])
        assert refusal.value.errno == errno.ENOMEM
        assert "max_send_wr" in refusal.value.hint
    assert counters().get("post_send") is None
    assert len(wait_for(cq, 3)) == 3
    qp.write(sides.local[:8], sides.target[:8])


@pytest.mark.soft_only(reason="delays completions, and counts calls")
def test_a_full_completion_queue_is_told_before_the_verb(ctx, pd, sides, counters):
    rv.softverbs.delay("completion", 0.2)
    with (
        ctx.create_cq(4) as cq,
        pd.create_qp(cq) as a,
        pd.create_qp(cq) as b,
    ):
        a.connect(b.info)
        b.connect(a.info)
        near, far = sides.local[:8], sides.remote[:8]
        depth = cq.depth
        for i in range(depth):
            if i % 2:
                a.post_write(near, far.remote())
            else:
                b.post_write(far, near.remote())
        counters.restart()
        for qp, local, remote in (a, near, far), (b, far, near):
            with pytest.raises(
                rv.VerbsError, match=rf"completion queue may be full: {depth}"
            ) as refusal:
                qp.post_write(local, remote.remote())
            assert refusal.value.errno == errno.ENOMEM
            assert "depth" in refusal.value.hint
        assert counters().get("post_send") is None
        wait_for(cq, depth)
        a.write(near, far.remote())


def test_a_thousand_posts_through_small_queues_are_all_told(ctx, pd, sides, is_soft):
    rounds = 1000 if is_soft else 200
    with (
        ctx.create_cq(16) as cq,
        pd.create_qp(cq, max_send_wr=16) as a,
        pd.create_qp(cq, max_send_wr=16) as b,
    ):
        a.connect(b.info)
        b.connect(a.info)
        told, posted, full = [], [], 0
        while len(posted) < rounds:
            try:
                posted.append(a.post_write(sides.local[:64], sides.target[:64]))
            except rv.VerbsError as refusal:
                assert refusal.errno == errno.ENOMEM
                full += 1
                told += cq.wait()
        told += wait_for(cq, rounds - len(told)) if len(told) < rounds else []
        assert full > 0
        assert [completion.wr_id for completion in told] == posted
        assert all(completion.ok for completion in told)


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("error", [errno.ENOMEM, -errno.ENOMEM, errno.EINVAL])
def test_a_post_that_failed_left_nothing_in_flight(error, pair, sides):
    rv.softverbs.fail("post_send", error)
    with pytest.raises(rv.VerbsError) as refusal:
        pair.a.post_write(sides.local[:8], sides.target[:8])
    assert refusal.value.errno == abs(error)
    assert refusal.value.verb == "ibv_post_send"
    for value in (repr(sides.local[:8]), repr(sides.target[:8]), "RDMA_WRITE"):
        assert value in str(refusal.value)
    assert pair.a.in_flight == 0
    pair.a.write(sides.local[:8], sides.target[:8])
    sides.local.close()


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("verb", ["write", "poll", "wait"])
def test_a_completion_queue_that_fails_says_so(verb, pair, sides):
    rv.softverbs.fail("poll_cq", errno.EINVAL)
    with pytest.raises(rv.VerbsError) as refusal:
        if verb == "write":
            pair.a.write(sides.local[:8], sides.target[:8])
        else:
            getattr(pair.cq, verb)()
    assert (refusal.value.errno, refusal.value.verb) == (errno.EIO, "ibv_poll_cq")
    if verb == "write":
        assert pair.a.in_flight == 1
        assert pair.cq.wait()[0].ok
    pair.a.write(sides.local[:8], sides.target[:8])


@pytest.mark.soft_only(reason="delays completions")
def test_closing_a_queue_pair_gives_up_its_work(make_pair, cq, sides):
    rv.softverbs.delay("completion", 0.2)
    sides.near[:8], sides.far[:8] = 1, 2
    qp, _ = make_pair()
    for _ in range(3):
        qp.post_write(sides.local[:8], sides.target[:8])
    qp.close()
    assert qp.in_flight == 0
    time.sleep(0.25)
    assert (sides.far[:8] == 2).all()
    assert cq.poll() == []


@pytest.mark.soft_only(reason="delays completions")
def test_memory_is_free_once_its_queue_pair_is_closed(make_pair, pd, sides):
    rv.softverbs.delay("completion", 10)
    qp, _ = make_pair()
    memory = bytearray(64)
    region = pd.reg_mr(memory, PEER)
    qp.post_write(region[:], sides.target[:64])
    with pytest.raises(rv.VerbsError):
        region.close()
    qp.close()
    region.close()
    memory.append(0)


@pytest.mark.soft_only(reason="delays completions")
def test_a_thread_that_waits_is_told_when_its_queue_pair_is_closed(make_pair, sides):
    rv.softverbs.delay("completion", 10)
    qp, _ = make_pair()
    told = []

    def write():
        try:
            qp.write(sides.local[:8], sides.target[:8], timeout=30)
        except rv.VerbsError as error:
            told.append(error)

    thread = threading.Thread(target=write)
    thread.start()
    assert eventually(lambda: qp.in_flight)
    qp.close()
    thread.join(5)
    assert not thread.is_alive()
    assert told[0].errno == errno.ECANCELED
    assert "RDMA_WRITE" in str(told[0])


def test_a_completion_that_was_seen_outlives_its_queue_pair(make_pair, cq, sides):
    qp, _ = make_pair()
    wr_id = qp.post_write(sides.local[:8], sides.target[:8])
    qp.write(sides.local[:8], sides.target[:8])
    qp.close()
    assert [completion.wr_id for completion in cq.poll()] == [wr_id]


def test_a_queue_pair_is_created_connected_and_broken_in_steps(pd, cq, sides):
    with pd.create_qp(cq) as a, pd.create_qp(cq) as b:
        assert a.state == QueuePairState.INIT
        assert not a.connected
        a.connect(b.info)
        b.connect(a.info)
        assert a.connected
        assert a.state == QueuePairState.RTS
        assert (a.cq, a.pd, a.port) == (cq, pd, 1)
        assert a.info.qp_num == a.qp_num != b.qp_num


def test_info_passes_as_bytes_both_ways(pd, cq):
    with pd.create_qp(cq) as qp:
        wire = qp.info.to_bytes()
        assert len(wire) == 34
        assert wire[:4] == b"RQP1"
        back = QueuePairInfo.from_bytes(wire)
        assert back == qp.info
        assert type(back) is QueuePairInfo
        assert pickle.loads(pickle.dumps(back)) == back
        assert back.qp_num == int.from_bytes(wire[4:8], "big")
        assert back.gid == wire[-16:] == qp.gid.raw


@pytest.mark.no_device
def test_hostile_bytes_of_a_queue_pair_are_refused_or_are_one():
    dice = random.Random(34)
    valid = QueuePairInfo(0x11, 0x22, 0, 1024, 16, 16, bytes(16)).to_bytes()
    taken = 0
    for _ in range(5_000):
        wire = bytearray(valid)
        for _ in range(dice.randrange(1, 4)):
            wire[dice.randrange(len(wire))] = dice.randrange(256)
        wire = bytes(wire) if dice.randrange(4) else dice.randbytes(dice.randrange(70))
        try:
            info = QueuePairInfo.from_bytes(wire)
        except ValueError:
            continue
        taken += 1
        assert info.to_bytes() == wire
        assert info.qp_num < 1 << 24
    assert 500 < taken < 4_500


def test_peers_agree_on_the_smaller_mtu_and_fewer_reads(pd, cq, sides):
    with pd.create_qp(cq) as a, pd.create_qp(cq) as b:
        small = b.info._replace(mtu=256, max_rd_atomic=1, max_dest_rd_atomic=1)
        a.connect(small)
        b.connect(a.info._replace(mtu=256, max_rd_atomic=1, max_dest_rd_atomic=1))
        sides.near[:] = payload(PAGE)
        a.write(sides.local[:], sides.target)
        assert np.array_equal(sides.far, payload(PAGE))
        for i in range(8):
            a.post_read(sides.local[i * 8 : i * 8 + 8], sides.target[:8])
        assert all(completion.ok for completion in wait_for(cq, 8))


@pytest.mark.soft_only(reason="injects a failure")
def test_a_connect_that_failed_can_be_tried_again(pd, cq, sides):
    with pd.create_qp(cq) as a, pd.create_qp(cq) as b:
        b.connect(a.info)
        rv.softverbs.fail("modify_qp", errno.ETIMEDOUT)
        with pytest.raises(rv.VerbsError, match="RTR, peer 0x") as refusal:
            a.connect(b.info)
        assert refusal.value.errno == errno.ETIMEDOUT
        assert not a.connected
        a.connect(b.info)
        a.write(sides.local[:8], sides.target[:8])


@pytest.mark.soft_only(reason="injects a failure, and counts objects")
def test_a_queue_pair_that_failed_half_way_leaves_nothing(pd, cq, counters):
    for verb in "create_qp", "modify_qp":
        rv.softverbs.fail(verb, errno.ENOMEM)
        with pytest.raises(rv.VerbsError) as refusal:
            pd.create_qp(cq)
        assert refusal.value.verb == f"ibv_{verb}"
    assert counters().get("live_qp", 0) == 0
    cq.close()
    pd.close()


@pytest.mark.soft_only(reason="sets a limit")
def test_too_many_queue_pairs_are_refused_by_name(pd, cq):
    rv.softverbs.configure(max_qp=1)
    with pd.create_qp(cq), pytest.raises(rv.VerbsError, match="max_qp 1"):
        pd.create_qp(cq)


def test_threads_share_a_queue_pair_and_a_completion_queue(pair, is_soft):
    rounds, threads = (200, 8) if is_soft else (20, 4)
    if is_soft:
        # So that several completions are there when a thread looks.
        rv.softverbs.delay("completion", 0.0005)
    source = payload(threads * 64)
    target = np.zeros_like(source)
    troubles = []
    with pair.pd.reg_mr(source) as local, pair.pd.reg_mr(target, PEER) as remote:

        def work(i):
            part = slice(i * 64, i * 64 + 64)
            try:
                for _ in range(rounds):
                    pair.a.write(local[part], remote[part].remote(), timeout=20)
            except Exception as error:
                troubles.append(error)

        run_in_threads([work] * threads)
    assert troubles == []
    assert pair.cq.poll() == []
    assert pair.a.in_flight == 0
    assert np.array_equal(target, source)


def run_in_threads(works):
    threads = [
        threading.Thread(target=work, args=(i,), daemon=True)
        for i, work in enumerate(works)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)


def test_blocking_and_polling_threads_each_get_their_own(make_pair, cq, sides, is_soft):
    rounds = 200 if is_soft else 30
    if is_soft:
        rv.softverbs.delay("completion", 0.0005)
    blocking, _ = make_pair(max_send_wr=8)
    posting, _ = make_pair(max_send_wr=8)
    posted, told, troubles = [], [], []

    def guard(work):
        def guarded(i):
            try:
                work()
            except Exception as error:
                troubles.append(error)

        return guarded

    def block():
        for _ in range(rounds):
            blocking.write(sides.local[:8], sides.target[:8], timeout=20)

    def post():
        while len(posted) < rounds:
            try:
                posted.append(posting.post_read(sides.local[8:16], sides.target[8:16]))
            except rv.VerbsError as error:
                if error.errno != errno.ENOMEM:
                    raise
                time.sleep(0.0002)

    def poll():
        while len(told) < rounds:
            told.extend(cq.poll(3))
            time.sleep(0)

    def wait():
        while len(told) < rounds:
            try:
                told.extend(cq.wait(0.05))
            except TimeoutError:
                pass

    run_in_threads([guard(work) for work in (block, block, post, poll, wait)])
    assert troubles == []
    assert sorted(completion.wr_id for completion in told) == posted
    assert all(completion.ok for completion in told)
    assert blocking.in_flight == posting.in_flight == 0


def test_the_first_error_is_named_when_threads_share_the_queue(
    make_pair, sides, pd, is_soft
):
    if is_soft:
        rv.softverbs.delay("completion", 0.0005)
    wrong = unknown_rkey(sides, pd)
    for _ in range(20 if is_soft else 3):
        qp, peer = make_pair(max_send_wr=16)
        told = []

        def write(i, qp=qp, told=told):
            target = wrong if i == 0 else sides.target[:64]
            try:
                qp.write(sides.local[:64], target, timeout=20)
            except rv.WorkCompletionError as refusal:
                told.append(refusal)

        run_in_threads([write] * 6)
        (first,) = [bad for bad in told if bad.status != Status.WR_FLUSH_ERR]
        assert first.status == Status.REM_ACCESS_ERR
        for later in told:
            if later is not first:
                assert later.first_error is first.completion
        qp.close()
        peer.close()


@pytest.mark.no_device
def test_a_status_that_the_header_does_not_know_keeps_its_number():
    assert rv.Status(99) == 99
    assert rv.Status(99).name == "UNKNOWN_99"
