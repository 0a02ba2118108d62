"""Arrays of views: packed, cut many at a time, sorted, joined, and sent as one block."""

import copy
import gc
import itertools
import pickle
import struct
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdmaview as rv
from rdmaview import MemoryRegionView, RemoteView, RemoteViewArray, ViewArray

WHOLE = MemoryRegionView(0xABC0000000001, 2**40, 2**20, 4096, 0x11, 0x22)
BOTH = pytest.mark.parametrize("whole", [WHOLE, WHOLE.remote()], ids=["view", "remote"])

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
ranges = st.lists(
    st.integers(0, 4096).flatmap(
        lambda offset: st.tuples(st.just(offset), st.integers(0, 4096 - offset))
    )
)
# Above and below where the loops begin to write past the cache.
COUNTS = [0, 1, 3, 4097, 40_000]


@st.composite
def any_view(draw):
    size = draw(u64 | st.integers(0, 2**16))
    address = st.integers(0, 2**64 - 1 - size)
    return MemoryRegionView(
        draw(u64), draw(address), draw(address), size, draw(u32), draw(u32)
    )


@st.composite
def any_remote(draw):
    size = draw(u64 | st.integers(0, 2**16))
    address = st.integers(0, 2**64 - 1 - size)
    return RemoteView(draw(u64), draw(address), size, draw(u32))


any_array = st.lists(any_view()).map(ViewArray) | st.lists(any_remote()).map(
    RemoteViewArray
)
indices = st.integers(-12, 12) | st.none()
slices = st.builds(slice, indices, indices, indices.filter(lambda step: step != 0))


@pytest.fixture
def array():
    return np.random.default_rng(7).integers(0, 256, 8192, np.uint8)


@pytest.fixture
def mr(pd, array):
    with pd.reg_mr(array, rv.Access.LOCAL_WRITE | rv.Access.REMOTE_READ) as mr:
        yield mr


# Cutting.


@BOTH
@given(ranges=ranges)
def test_many_views_are_those_that_are_cut_one_by_one(whole, ranges):
    offsets = [offset for offset, _ in ranges]
    sizes = [size for _, size in ranges]
    assert list(whole.views(offsets, sizes)) == [
        whole.subview(*place) for place in ranges
    ]


@pytest.mark.parametrize("count", COUNTS)
def test_any_number_of_views_is_cut(mr, count):
    offsets = np.arange(count) % 8000
    sizes = np.arange(count) % 192
    views = mr.views(offsets, sizes)
    packed = np.asarray(views)
    assert len(views) == count
    assert np.array_equal(packed["virtual_addr"], offsets + mr.addr)
    assert np.array_equal(packed["rdma_addr"], offsets + mr.iova)
    assert np.array_equal(packed["size"], sizes)
    for name in ("id", "lkey", "rkey"):
        assert (packed[name] == getattr(mr, name)).all()


def test_views_of_a_region_show_its_bytes(mr, array):
    for view, offset in zip(
        mr.views([0, 100, 8191], [8192, 7, 1]), [0, 100, 8191], strict=True
    ):
        assert bytes(view) == array[offset : offset + len(view)].tobytes()
        assert view.mr is mr


def test_one_number_is_for_all(mr):
    assert list(mr.views([0, 64], 8)) == [mr[0:8], mr[64:72]]
    assert list(mr.views(16, [1, 2, 3])) == [mr[16:17], mr[16:18], mr[16:19]]
    assert list(mr.views(16, 4)) == [mr[16:20]]
    assert list(mr.views(np.int64(16), np.uint8(4))) == [mr[16:20]]
    assert list(mr.views(np.array(16), np.array(4))) == [mr[16:20]]


@pytest.mark.parametrize("dtype", ["i1", "u2", "i4", "u4", "i8", "u8", ">i8", ">u4"])
def test_integers_of_any_width_and_step_are_taken(mr, dtype):
    numbers = np.array([0, 9, 90, 9, 100, 9], dtype)
    expected = [mr[0:9], mr[90:99], mr[100:109]]
    assert list(mr.views(numbers[::2], numbers[1::2])) == expected
    assert list(mr.views(numbers[-2::-2], 9)) == expected[::-1]


@BOTH
@pytest.mark.parametrize("n", [1, 5000, 40_000])
@pytest.mark.parametrize(
    ("offset", "size"),
    [(4097, 0), (4096, 1), (0, 4097), (-1, 1), (1, -1), (2**63, 2**63 - 1)],
)
def test_one_that_is_outside_is_named_and_none_is_cut(whole, n, offset, size):
    offsets, sizes = np.zeros(n, object), np.ones(n, object)
    offsets[n // 2], sizes[n // 2] = offset, size
    kind = np.int64 if min(offset, size) < 0 else np.uint64
    with pytest.raises(IndexError) as refused:
        whole.views(offsets.astype(kind), sizes.astype(kind))
    assert f"view {n // 2}: offset {offset} and size {size}" in str(refused.value)
    with pytest.raises(IndexError, match=str(offset if offset < 0 else size)):
        whole.views(list(offsets), list(sizes))


@pytest.mark.parametrize(
    ("offsets", "sizes", "error"),
    [
        ([0.0], [1], TypeError),
        (np.zeros(2), 1, TypeError),
        ([True], [1], TypeError),
        (np.zeros(2, bool), 1, TypeError),
        ("01", 1, TypeError),
        ([None], 1, TypeError),
        (None, 1, TypeError),
        ([0, 1], [1], ValueError),
        (np.zeros(3, int), np.zeros(2, int), ValueError),
        (np.zeros((2, 2), int), 1, ValueError),
        ([10**5000], 1, IndexError),
        (-(10**5000), 1, IndexError),
        ([[0]], 1, TypeError),
    ],
    ids=range(13),
)
def test_what_is_no_column_of_integers_is_refused(offsets, sizes, error):
    with pytest.raises(error, match="offsets|sizes"):
        WHOLE.views(offsets, sizes)


def test_a_closed_region_gives_no_views(pd, array):
    mr = pd.reg_mr(array)
    mr.close()
    with pytest.raises(rv.StaleViewError):
        mr.views(0, 1)


@BOTH
@given(size=st.integers(1, 5000))
def test_split_covers_the_view_in_order(whole, size):
    pieces = list(whole.split(size))
    assert [piece.size for piece in pieces[:-1]] == [size] * (len(pieces) - 1)
    assert sum(piece.size for piece in pieces) == 4096
    assert pieces == [whole[at : at + size] for at in range(0, 4096, size)]


@BOTH
@pytest.mark.parametrize("size", [0, -1, 2**64, 10**5000], ids=hex)
def test_split_needs_a_size(whole, size):
    with pytest.raises(ValueError, match="size must be from 1"):
        whole.split(size)


@BOTH
def test_an_empty_view_has_no_pieces(whole):
    assert len(whole[:0].split(8)) == 0


@BOTH
@given(st.integers(0, 20), st.integers(0, 5000), st.integers(0, 5000))
def test_a_grid_is_its_pieces_or_an_error(whole, count, stride, size):
    if count and (count - 1) * stride + size > 4096:
        with pytest.raises(IndexError, match="aren't inside the 4096 bytes"):
            whole.grid(count, stride, size)
    else:
        assert list(whole.grid(count, stride, size)) == [
            whole.subview(i * stride, size) for i in range(count)
        ]


@BOTH
@pytest.mark.parametrize(
    "grid", [(2, 2**64 - 1, 1), (2**63, 2, 1), (2**64 - 1, 2**64 - 1, 1), (-1, 1, 1)]
)
def test_a_grid_that_would_wrap_is_outside(whole, grid):
    with pytest.raises(IndexError):
        whole.grid(*grid)


@BOTH
def test_a_grid_that_no_memory_holds_is_refused(whole):
    with pytest.raises(MemoryError):
        whole.grid(2**60, 0, 1)


# A sequence.


@given(any_array, slices)
def test_slices_are_those_of_a_list(views, key):
    assert list(views[key]) == list(views)[key]
    assert views[key] == type(views)(list(views)[key])


@given(any_array, slices, slices)
def test_a_slice_of_a_slice_is_that_of_a_list(views, first, second):
    assert list(views[first][second]) == list(views)[first][second]


@given(any_array, st.data())
def test_chosen_ones_are_those_that_numpy_chooses(views, data):
    n = len(views)
    chosen = data.draw(st.lists(st.integers(-n, n - 1))) if n else []
    assert list(views[chosen]) == [views[i] for i in chosen]
    assert list(views[np.array(chosen, int)]) == [views[i] for i in chosen]
    mask = np.array(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), bool)
    assert list(views[mask]) == [
        view for view, wanted in zip(views, mask, strict=True) if wanted
    ]


def test_chosen_ones_are_attached(mr):
    views = mr.view().split(8)
    assert views[[3, 1]][0].mr is mr
    assert views[::-1][0].mr is mr


@pytest.mark.parametrize("key", [10, -11, 2**70, 10**5000], ids=hex)
def test_an_index_that_is_outside_is_refused(key):
    with pytest.raises(IndexError):
        WHOLE.grid(10, 8, 8)[key]


@pytest.mark.parametrize(
    "key", ["a", 1.5, True, None, [1.5], [[0]], np.zeros((1, 1), int)]
)
def test_what_is_no_index_is_refused(key):
    with pytest.raises(TypeError, match="indexed by an int, a slice"):
        WHOLE.grid(10, 8, 8)[key]


def test_chosen_ones_that_are_outside_are_refused():
    with pytest.raises(IndexError):
        WHOLE.grid(10, 8, 8)[[0, 10]]


# Values.


@given(any_array)
def test_equal_arrays_hash_alike(views):
    same = type(views)(list(views))
    assert (views == same, views != same) == (True, False)
    assert hash(views) == hash(same)
    assert hash(views[::-1]) == hash(type(views)(list(views)[::-1]))
    assert copy.copy(views) is views and copy.deepcopy(views) is views


def test_arrays_of_other_views_differ():
    views = WHOLE.split(8)
    assert views != views[1:] and views != views[::-1]
    assert views != WHOLE.remote().split(8)
    assert views != list(views)


@given(any_array)
def test_each_hash_is_that_of_its_view(views):
    hashes = views.hash_array()
    assert hashes.dtype == np.uint64
    for view, hashed in zip(views, hashes.tolist(), strict=True):
        assert hash(view) % 2**64 == hashed or hashed == 2**64 - 1


@BOTH
@given(ranges=ranges)
def test_sorted_is_by_address_and_then_size(whole, ranges):
    views = type(whole.split(8))([whole.subview(*place) for place in ranges])
    assert list(views.sorted()) == [whole.subview(*place) for place in sorted(ranges)]


@BOTH
@given(ranges=ranges)
def test_coalesced_views_cover_the_same_bytes_with_no_neighbours(whole, ranges):
    views = type(whole.split(8))([whole.subview(*place) for place in ranges])
    joined = list(views.coalesce())
    content = bytes(range(256)) * 16
    start = whole.rdma_addr

    def text(views):
        return b"".join(
            content[view.rdma_addr - start :][: view.size] for view in views
        )

    assert text(joined) == text(views)
    for view, following in itertools.pairwise(joined):
        assert view.rdma_addr + view.size != following.rdma_addr


@BOTH
def test_coalesce_never_joins_two_registrations(whole):
    fields = whole.to_dict()
    fields["id"] += 1
    for name in ("virtual_addr", "rdma_addr"):
        if name in fields:
            fields[name] += whole.size
    other = type(whole).from_dict(fields)
    assert len(type(whole.split(8))([whole, other]).coalesce()) == 2


def test_sizes_are_summed_exactly():
    assert ViewArray([]).total_size == 0
    assert WHOLE.split(7).total_size == 4096
    large = MemoryRegionView(1, 0, 0, 2**64 - 1, 1, 1)
    assert ViewArray([large] * 3).total_size == 3 * (2**64 - 1)


def test_a_view_takes_40_bytes_and_a_remote_one_32():
    assert WHOLE.split(1).nbytes == 40 * 4096
    assert WHOLE.remote().split(1).nbytes == 32 * 4096
    assert sys.getsizeof(WHOLE.split(1)) < 40 * 4096 + 200


# NumPy.


@given(any_array)
def test_numpy_sees_the_packed_views(views):
    dtype = rv.VIEW_DTYPE if type(views) is ViewArray else rv.REMOTE_DTYPE
    packed = np.asarray(views)
    assert packed.dtype == dtype
    assert packed.shape == (len(views),)
    for row, view in zip(packed, views, strict=True):
        for name, number in view.to_dict().items():
            assert row[name] == number
    assert np.shares_memory(packed, np.asarray(views)) or not len(views)
    assert type(views).from_array(packed) == views
    assert type(views).from_array(packed[::-1]) == views[::-1]


def test_numpy_sees_a_stride_as_a_stride():
    views = WHOLE.split(8)
    assert np.asarray(views[::-3]).strides == (-120,)
    assert np.shares_memory(np.asarray(views[::-3]), np.asarray(views))


def test_the_packed_views_cant_be_written_to():
    packed = np.asarray(WHOLE.split(8))
    with pytest.raises(ValueError, match="read-only"):
        packed["size"] = 0
    with pytest.raises(ValueError, match="WRITEABLE"):
        packed.flags.writeable = True


def test_strided_views_are_no_contiguous_bytes():
    views = WHOLE.split(8)
    assert bytes(memoryview(views)) == np.asarray(views).tobytes()
    with pytest.raises(BufferError, match="80 bytes apart"):
        struct.unpack_from("B", views[::2])


def test_from_array_copies():
    packed = np.array(WHOLE.split(8))
    views = ViewArray.from_array(packed)
    packed["size"] = 7
    assert views == WHOLE.split(8)


def test_from_array_checks_what_it_is_given():
    packed = np.array(WHOLE.split(8))
    with pytest.raises(TypeError, match="must be VIEW_DTYPE, not uint8"):
        ViewArray.from_array(np.zeros(40, np.uint8))
    with pytest.raises(TypeError, match="must be VIEW_DTYPE, not list"):
        ViewArray.from_array([])
    with pytest.raises(TypeError, match="must be REMOTE_DTYPE"):
        RemoteViewArray.from_array(packed)
    with pytest.raises(ValueError, match="one dimension, not 2"):
        ViewArray.from_array(packed.reshape(2, -1))
    packed["size"][3] = 2**64 - 1
    with pytest.raises(ValueError, match=r"view 3 ends past 2\*\*64 - 1"):
        ViewArray.from_array(packed)


def test_an_array_outlives_the_views_that_it_was_made_of():
    packed = np.asarray(WHOLE.split(8))[::2]
    gc.collect()
    assert packed["size"].tolist() == [8] * 256


# Attachment.


def test_an_array_holds_its_registration(pd, array):
    context = pd.context
    before = context.mr_count
    views = pd.reg_mr(array).views([0, 8], 8)
    part = views[1:]
    del views
    gc.collect()
    assert context.mr_count == before + 1
    assert bytes(part[0]) == array[8:16].tobytes()
    del part
    gc.collect()
    assert context.mr_count == before


def test_each_view_finds_its_own_registration(pd):
    arrays = [np.full(64, i, np.uint8) for i in range(5)]
    regions = [pd.reg_mr(each) for each in arrays]
    views = ViewArray([mr[i : i + 8] for i in range(3) for mr in regions[::-1]])
    assert [view.mr for view in views] == regions[::-1] * 3
    assert views.mrs == tuple(regions)
    assert views[:2].mrs == (regions[3], regions[4])
    assert [bytes(view)[0] for view in views] == [4, 3, 2, 1, 0] * 3


def test_what_is_rebuilt_is_detached(mr):
    views = mr.view().split(8)
    assert views.attached and views.mrs == (mr,)
    for rebuilt in (
        ViewArray.from_bytes(views.to_bytes()),
        ViewArray.from_array(np.asarray(views)),
        pickle.loads(pickle.dumps(views)),
    ):
        assert rebuilt == views and hash(rebuilt) == hash(views)
        assert not rebuilt.attached and rebuilt.mrs == ()
        assert rebuilt[0].mr is None


def test_attached_and_detached_views_make_no_array(mr):
    with pytest.raises(ValueError, match="some not"):
        ViewArray([mr[0:8], WHOLE])


@pytest.mark.parametrize("cls", [ViewArray, RemoteViewArray])
@pytest.mark.parametrize("views", [[1], [None], None, 7, ["view"]])
def test_an_array_is_made_of_views_only(cls, views):
    with pytest.raises(TypeError):
        cls(views)


def test_an_array_is_not_of_views_of_the_other_kind():
    with pytest.raises(TypeError, match="view 0 is a RemoteView"):
        ViewArray([WHOLE.remote()])
    with pytest.raises(TypeError, match="view 0 is a MemoryRegionView"):
        RemoteViewArray([WHOLE])


def test_a_cycle_of_an_array_and_the_owner_of_its_memory_is_collected(pd):
    class Owner(bytearray):
        pass

    context = pd.context
    before = context.mr_count
    owner = Owner(64)
    owner.views = pd.reg_mr(owner).views([0, 8], 8)
    del owner
    gc.collect()
    assert context.mr_count == before


# For a peer.


def test_remote_views_are_what_each_view_tells(mr):
    views = mr.views([0, 5, 9], [4, 3, 2])
    assert list(views.remote()) == [view.remote() for view in views]
    assert list(views[::-2].remote()) == [view.remote() for view in views[::-2]]


def test_views_that_give_no_right_are_not_told(pd, array):
    with pytest.raises(ValueError, match="view 0.* gives a peer no right"):
        pd.reg_mr(array).views(0, 8).remote()


def test_stale_views_are_not_told(pd, array):
    mr = pd.reg_mr(array, rv.Access.REMOTE_READ)
    views = mr.views(0, 8)
    mr.close()
    with pytest.raises(rv.StaleViewError):
        views.remote()


@BOTH
@pytest.mark.parametrize("count", [2**58, 2**60, 2**61, 2**62])
def test_more_views_than_any_memory_holds_are_refused(whole, count):
    with pytest.raises(MemoryError, match=f"no memory for {count} views"):
        whole.grid(count, 0, 1)
    zeros = np.broadcast_to(np.uint64(0), (count // 8,))
    with pytest.raises(MemoryError):
        whole.views(zeros, 1)
    with pytest.raises(MemoryError):
        whole.views(zeros.view("i8"), zeros)


# The wire.


@given(any_array)
def test_the_wire_form_is_magic_count_and_fields_in_network_order(views):
    near = type(views) is ViewArray
    expected = struct.pack("!4sQ", b"RVA1" if near else b"RRA1", len(views))
    for view in views:
        fields = view.to_dict().values()
        expected += struct.pack("!QQQQII" if near else "!QQQI", *fields)
    assert views.to_bytes() == expected
    assert views[::-1].to_bytes()[-40 if near else -28 :] == (
        expected[12:][: 40 if near else 28] if len(views) else expected[-40:]
    )
    rebuilt = type(views).from_bytes(expected)
    assert rebuilt == views and rebuilt.to_bytes() == expected


@BOTH
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_goes_over_the_wire(whole, count):
    views = whole.views(np.arange(count) % 4000, np.arange(count) % 96)
    wire = views.to_bytes()
    assert type(views).from_bytes(wire) == views
    assert type(views).from_bytes(memoryview(bytearray(wire))) == views
    strided = views[::2]
    assert type(views).from_bytes(strided.to_bytes()) == strided


@BOTH
def test_a_wire_form_at_an_odd_address_is_read(whole):
    views = whole.split(100)
    wire = memoryview(b"x" + views.to_bytes())[1:]
    assert type(views).from_bytes(wire) == views


@BOTH
def test_a_damaged_wire_form_is_refused(whole):
    cls = type(whole.split(8))
    wire = whole.split(512).to_bytes()
    for bad in (
        b"",
        wire[:11],
        wire[:-1],
        wire + b"\0",
        wire[:4] + bytes(8) + wire[12:],
    ):
        with pytest.raises(ValueError, match="bytes, not"):
            cls.from_bytes(bad)
    with pytest.raises(ValueError, match="starts with"):
        cls.from_bytes(b"RMV1" + wire[4:])
    with pytest.raises(ValueError, match="bytes, not"):
        cls.from_bytes(wire[:4] + b"\xff" * 8 + wire[12:])
    with pytest.raises(TypeError):
        cls.from_bytes("text")


@pytest.mark.parametrize("count", [1, 9, 5000])
@pytest.mark.parametrize("name", ["virtual_addr", "rdma_addr"])
@pytest.mark.parametrize("cls", [ViewArray, RemoteViewArray])
def test_a_view_that_wraps_around_is_refused(cls, name, count):
    views = WHOLE.grid(count, 0, 8)
    wire = bytearray((views if cls is ViewArray else views.remote()).to_bytes())
    # The last one: its address becomes the highest there is.
    if cls is ViewArray:
        at = len(wire) - 40 + (8 if name == "virtual_addr" else 16)
    else:
        at = len(wire) - 28 + 8
    wire[at : at + 8] = struct.pack("!Q", 2**64 - 8)
    with pytest.raises(ValueError, match=rf"view {count - 1} ends past 2\*\*64"):
        cls.from_bytes(wire)
    wire[at : at + 8] = struct.pack("!Q", 2**64 - 9)
    assert len(cls.from_bytes(wire)) == count


edges = st.sampled_from([0, 1, 2**63 - 1, 2**63, 2**64 - 2, 2**64 - 1])


@given(st.lists(st.tuples(*[edges | u64] * 4), min_size=1, max_size=5))
def test_bytes_from_anywhere_give_views_that_end_below_2_to_the_64(fields):
    wire = struct.pack("!4sQ", b"RVA1", len(fields))
    wire += b"".join(struct.pack("!QQQQII", *four, 1, 2) for four in fields)
    wrong = [
        i
        for i, (_, virtual_addr, rdma_addr, size) in enumerate(fields)
        if max(virtual_addr, rdma_addr) + size >= 2**64
    ]
    if wrong:
        with pytest.raises(ValueError, match=f"^view {wrong[0]} ends past"):
            ViewArray.from_bytes(wire)
    else:
        assert ViewArray.from_bytes(wire).to_bytes() == wire


@BOTH
def test_pickle_5_takes_the_block_out_of_band(whole):
    views = whole.split(8)
    blocks = []
    data = pickle.dumps(views, 5, buffer_callback=blocks.append)
    assert len(data) < 200 and len(blocks) == 1
    assert pickle.loads(data, buffers=blocks) == views
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        assert pickle.loads(pickle.dumps(views, protocol)) == views
