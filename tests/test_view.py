"""The view as a value."""

import array
import copy
import gc
import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import weakref

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import rdmaview as rv
from rdmaview import MemoryRegionView, RemoteView

FIELDS = ("id", "virtual_addr", "rdma_addr", "size", "lkey", "rkey")
REMOTE_FIELDS = ("id", "rdma_addr", "size", "rkey")
HUGE_SIZES = [
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**32 + 1,
    2**63 - 1,
    2**63,
    2**64 - 1,
]


def make_view(
    size=64, id=0xABC001, virtual_addr=0x10000, rdma_addr=0x2000, lkey=0x11, rkey=0x22
):
    return MemoryRegionView(id, virtual_addr, rdma_addr, size, lkey, rkey)


def make_remote(size=64, **fields):
    return make_view(size, **fields).remote()


def fields_of(view):
    names = FIELDS if isinstance(view, MemoryRegionView) else REMOTE_FIELDS
    return tuple(getattr(view, name) for name in names)


BOTH = pytest.mark.parametrize("make", [make_view, make_remote])
u64 = st.integers(0, 2**64 - 1)
u32 = st.integers(0, 2**32 - 1)


def test_fields_are_those_given_in_their_order():
    view = MemoryRegionView(1, 2, 3, 4, 5, 6)
    assert fields_of(view) == (1, 2, 3, 4, 5, 6)


def test_fields_may_be_given_by_name():
    named = MemoryRegionView(rkey=6, lkey=5, size=4, rdma_addr=3, virtual_addr=2, id=1)
    assert named == MemoryRegionView(1, 2, 3, 4, 5, 6)


def test_fields_may_be_given_by_place_and_by_name():
    assert MemoryRegionView(1, 2, 3, rkey=6, lkey=5, size=4) == MemoryRegionView(
        1, 2, 3, 4, 5, 6
    )
    with pytest.raises(TypeError):
        MemoryRegionView(1, 2, 3, 4, 5, 6, id=1)


def test_remote_fields_are_those_given_in_their_order():
    assert fields_of(RemoteView(1, 2, 3, 4)) == (1, 2, 3, 4)


def test_fields_hold_their_full_width():
    top, key = 2**64 - 1, 2**32 - 1
    assert fields_of(MemoryRegionView(top, top, top, 0, key, key)) == (
        top, top, top, 0, key, key,
    )  # fmt: skip
    assert fields_of(MemoryRegionView(0, 0, 0, top, 0, 0)) == (0, 0, 0, top, 0, 0)
    assert fields_of(RemoteView(top, top, 0, key)) == (top, top, 0, key)


def test_numpy_integers_are_integers():
    view = MemoryRegionView(*map(np.uint64, [1, 2, 3, 4, 5, 6]))
    assert view == MemoryRegionView(1, 2, 3, 4, 5, 6)
    assert type(view.size) is int


@BOTH
def test_views_made_after_others_went_are_their_own_objects(make):
    gone = [make(size) for size in range(1000)]
    del gone
    kept = [make(size) for size in range(1000)]
    assert len({id(view) for view in kept}) == 1000
    assert [view.size for view in kept] == [*range(1000)]


def test_there_is_no_ambiguous_key():
    assert not hasattr(make_view(), "key")
    assert not hasattr(make_remote(), "key")


@pytest.mark.parametrize("name", FIELDS)
def test_a_field_of_a_view_cannot_be_changed(name):
    view = make_view()
    with pytest.raises(AttributeError):
        setattr(view, name, 1)
    with pytest.raises(AttributeError):
        delattr(view, name)
    assert view == make_view()


@pytest.mark.parametrize("name", REMOTE_FIELDS)
def test_a_field_of_a_remote_view_cannot_be_changed(name):
    remote = make_remote()
    with pytest.raises(AttributeError):
        setattr(remote, name, 1)
    with pytest.raises(AttributeError):
        delattr(remote, name)
    assert remote == make_remote()


@BOTH
def test_nothing_can_be_added_to_a_view(make):
    with pytest.raises(AttributeError):
        make().note = 1


@BOTH
def test_bytes_cannot_be_assigned_through_a_view(make):
    view = make()
    with pytest.raises(TypeError):
        view[0:4] = b"abcd"
    with pytest.raises(TypeError):
        del view[0:4]


@BOTH
def test_initialising_again_changes_nothing(make):
    view = make()
    type(view).__init__(view, *[1] * 6)
    assert view == make()


@pytest.mark.parametrize("cls", [MemoryRegionView, RemoteView])
def test_a_view_type_is_final(cls):
    with pytest.raises(TypeError):
        type("Sub", (cls,), {})


@pytest.mark.parametrize("cls", [MemoryRegionView, RemoteView])
def test_a_view_is_never_made_without_its_fields(cls):
    with pytest.raises(TypeError):
        cls()
    with pytest.raises(TypeError):
        cls.__new__(cls)
    with pytest.raises(TypeError):
        object.__new__(cls)


@pytest.mark.parametrize(("cls", "count"), [(MemoryRegionView, 6), (RemoteView, 4)])
def test_a_view_takes_exactly_its_fields(cls, count):
    for other in {*range(8)} - {count}:
        with pytest.raises(TypeError):
            cls(*[1] * other)
    with pytest.raises(TypeError):
        cls(*[1] * count, key=1)


BAD_FIELDS = [
    (-1, ValueError),
    (2**64, ValueError),
    (2**100, ValueError),
    (np.int64(-1), ValueError),
    (1.5, TypeError),
    (np.float64(1), TypeError),
    (True, TypeError),
    (np.True_, TypeError),
    ("1", TypeError),
    (b"1", TypeError),
    (None, TypeError),
]


@pytest.mark.parametrize("name", FIELDS)
@pytest.mark.parametrize(("value", "error"), BAD_FIELDS, ids=repr)
def test_a_bad_field_of_a_view_is_refused(name, value, error):
    fields = make_view().to_dict() | {name: value}
    with pytest.raises(error, match=name):
        MemoryRegionView(**fields)
    with pytest.raises(error, match=name):
        MemoryRegionView.from_dict(fields)


@pytest.mark.parametrize("name", REMOTE_FIELDS)
@pytest.mark.parametrize(("value", "error"), BAD_FIELDS, ids=repr)
def test_a_bad_field_of_a_remote_view_is_refused(name, value, error):
    fields = make_remote().to_dict() | {name: value}
    with pytest.raises(error, match=name):
        RemoteView(**fields)
    with pytest.raises(error, match=name):
        RemoteView.from_dict(fields)


@pytest.mark.parametrize("name", ["lkey", "rkey"])
@pytest.mark.parametrize("key", [2**32, 2**63, 2**64 - 1])
def test_a_key_over_32_bits_is_refused(name, key):
    with pytest.raises(ValueError, match=f"{name}.*{key}"):
        make_view(**{name: key})


def test_a_remote_key_over_32_bits_is_refused():
    with pytest.raises(ValueError, match=f"rkey.*{2**32}"):
        RemoteView(1, 0, 1, 2**32)


@pytest.mark.parametrize("value", [-1, 2**64, 1.5, True])
def test_a_refused_field_is_shown(value):
    with pytest.raises((ValueError, TypeError), match=f"size .*{value}"):
        make_view(size=value)


@pytest.mark.parametrize(
    ("address", "size"),
    [(2**64 - 16, 32), (2**64 - 1, 2), (1, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 1)],
)
def test_a_range_that_passes_the_end_of_memory_is_refused(address, size):
    with pytest.raises(ValueError, match=f"virtual_addr {address:#x} .*size {size} "):
        MemoryRegionView(1, address, 0, size, 1, 1)
    with pytest.raises(ValueError, match=f"rdma_addr {address:#x} .*size {size} "):
        MemoryRegionView(1, 0, address, size, 1, 1)
    with pytest.raises(ValueError, match=f"rdma_addr {address:#x} .*size {size} "):
        RemoteView(1, address, size, 1)


def test_a_range_may_end_at_the_last_address():
    end = 2**64 - 1
    assert MemoryRegionView(1, end - 16, end - 16, 16, 1, 1).size == 16
    assert RemoteView(1, 0, end, 1).size == end


@BOTH
def test_equal_fields_are_equal_views(make):
    assert make() == make()
    assert (make() != make()) is False
    assert make()[8:16] == make()[4:20][4:12]


@pytest.mark.parametrize("name", FIELDS)
def test_a_view_differs_by_each_field(name):
    view = make_view()
    other = MemoryRegionView(**view.to_dict() | {name: getattr(view, name) + 1})
    assert view != other
    assert hash(view) != hash(other)


@pytest.mark.parametrize("name", REMOTE_FIELDS)
def test_a_remote_view_differs_by_each_field(name):
    remote = make_remote()
    other = RemoteView(**remote.to_dict() | {name: getattr(remote, name) + 1})
    assert remote != other
    assert hash(remote) != hash(other)


@BOTH
def test_a_view_equals_only_its_own_kind(make):
    view = make()
    assert view != fields_of(view)
    assert view != view.to_bytes()
    assert view != view.to_dict()
    assert view != None  # noqa: E711
    assert make_view() != make_remote()


@BOTH
def test_views_have_no_order(make):
    with pytest.raises(TypeError):
        make() < make()  # noqa: B015


@given(u64, st.integers(0, 2**63), st.integers(0, 2**63), st.integers(0, 2**62), u32)
def test_equal_views_have_equal_hashes(id, address, rdma_address, size, key):
    fields = (id, address, rdma_address, size, key, key ^ 1)
    assert hash(MemoryRegionView(*fields)) == hash(MemoryRegionView(*fields))
    remote_fields = (id, rdma_address, size, key)
    assert hash(RemoteView(*remote_fields)) == hash(RemoteView(*remote_fields))


HASHES = [
    ((0, 0, 0, 0, 0, 0), 0, 0),
    ((1, 2, 3, 4, 5, 6), 5522143520993224712, -6439043010593783384),
    (
        (0xABCDEF0000000001, 0x01100000, 0x100000, 65536, 7, 9),
        -2108513301555439976,
        6182896135175608803,
    ),
    (
        (2**64 - 1, 2**64 - 1, 2**64 - 1, 0, 2**32 - 1, 2**32 - 1),
        6311673621417497917,
        -4485059637592202731,
    ),
    (
        (2**40, 0x7F0000000000, 0, 2**34, 0x1234, 0x5A5A1234),
        1986180656668745672,
        -7437910190100851253,
    ),
]


def hashes_of(cases):
    hashes = []
    for id, virtual_addr, rdma_addr, size, lkey, rkey in cases:
        view = MemoryRegionView(id, virtual_addr, rdma_addr, size, lkey, rkey)
        hashes += [hash(view), hash(RemoteView(id, rdma_addr, size, rkey))]
    return hashes


def test_hashes_are_fixed():
    expected = [part for _, view, remote in HASHES for part in (view, remote)]
    assert hashes_of(fields for fields, _, _ in HASHES) == expected


def test_hashes_are_the_same_in_a_process_with_another_hash_seed():
    script = (
        "import pickle, sys; views = pickle.load(sys.stdin.buffer); "
        "print([hash(view) for view in views], hash('salted'))"
    )
    views = [make_view(), make_remote(), make_view()[8:16]]
    outputs = [
        subprocess.run(
            [sys.executable, "-c", script],
            input=pickle.dumps(views),
            env=os.environ | {"PYTHONHASHSEED": seed},
            check=True,
            capture_output=True,
        ).stdout.decode()
        for seed in ("1", "2")
    ]
    expected = str([hash(view) for view in views])
    assert outputs[0].startswith(expected)
    assert outputs[1].startswith(expected)
    assert outputs[0] != outputs[1]


@BOTH
@pytest.mark.parametrize("step", [64, 4096, 1 << 20])
def test_hashes_of_neighbours_spread(make, step):
    whole = make(4096 * step)
    hashes = [hash(whole[i * step : (i + 1) * step]) for i in range(4096)]
    assert len(set(hashes)) == 4096
    # A random function leaves 63 % of the buckets in use.
    assert len({number & 4095 for number in hashes}) > 0.6 * 4096
    assert len({number >> 52 for number in hashes}) > 0.6 * 4096


@BOTH
def test_views_are_keys_of_a_dict(make):
    whole = make()
    names = {whole[i : i + 4]: i for i in range(60)}
    assert len(names) == 60
    assert names[make()[30:34]] == 30
    assert make()[30:35] not in names


@BOTH
def test_a_copy_is_the_object_itself(make):
    view = make()
    assert copy.copy(view) is view
    assert copy.deepcopy(view) is view
    assert copy.deepcopy([view])[0] is view


@BOTH
def test_repr_makes_an_equal_view(make):
    view = make()
    assert eval(repr(view), vars(rv)) == view


def test_repr_shows_addresses_in_hex():
    view = MemoryRegionView(0xAB, 0x1000, 0x2000, 64, 0x5, 0x6)
    assert repr(view) == (
        "MemoryRegionView(id=0xab, virtual_addr=0x1000, rdma_addr=0x2000, "
        "size=64, lkey=0x5, rkey=0x6)"
    )
    assert repr(view.remote()) == (
        "RemoteView(id=0xab, rdma_addr=0x2000, size=64, rkey=0x6)"
    )


@BOTH
@pytest.mark.parametrize("size", [0, 1, 64, *HUGE_SIZES])
def test_a_view_is_true_unless_it_is_empty(make, size):
    assert bool(make(size, virtual_addr=0, rdma_addr=0)) is (size > 0)


@BOTH
@pytest.mark.parametrize("size", [0, 1, 64, 2**32, sys.maxsize])
def test_len_is_the_size_in_bytes(make, size):
    assert len(make(size, virtual_addr=0, rdma_addr=0)) == size


@BOTH
@pytest.mark.parametrize("size", [sys.maxsize + 1, 2**64 - 1])
def test_len_refuses_a_size_that_it_cannot_give(make, size):
    with pytest.raises(OverflowError, match=str(size)):
        len(make(size, virtual_addr=0, rdma_addr=0))


@pytest.mark.parametrize("size", HUGE_SIZES)
def test_a_huge_size_is_kept_everywhere(size):
    view = make_view(size, virtual_addr=0, rdma_addr=0)
    assert view.size == view.to_dict()["size"] == size
    assert view.remote().size == size
    assert view.subview(0, size).size == size
    assert MemoryRegionView.from_bytes(view.to_bytes()).size == size
    assert RemoteView.from_bytes(view.remote().to_bytes()).size == size
    assert pickle.loads(pickle.dumps(view)).size == size
    assert pickle.loads(pickle.dumps(view.remote())).size == size


@BOTH
@pytest.mark.parametrize("end", [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1])
def test_a_slice_may_end_around_31_and_32_bits(make, end):
    whole = make(2**32 + 4096)
    assert whole[:end].size == end
    assert whole[1:end].size == end - 1
    assert whole[end:].size == 2**32 + 4096 - end
    assert whole[end:].rdma_addr == whole.rdma_addr + end
    assert whole.subview(4, end - 4).size == end - 4
    assert whole[-end:].rdma_addr == whole.rdma_addr + whole.size - end


@BOTH
def test_a_view_over_63_bits_is_cut_where_a_slice_can_reach(make):
    whole = make(2**64 - 1, virtual_addr=0, rdma_addr=0)
    assert whole[4096:8192].rdma_addr == 4096
    assert whole.subview(2**63, 4096).rdma_addr == 2**63
    assert whole.subview(2**64 - 2, 1).rdma_addr == 2**64 - 2
    with pytest.raises(OverflowError, match="subview"):
        whole[4096:]
    with pytest.raises(OverflowError, match="subview"):
        whole[-4096:]


BOUND = st.none() | st.integers(-80, 80) | st.integers(-(2**70), 2**70)


@BOTH
def test_every_slice_of_a_short_view_is_that_of_a_range(make):
    bounds = [None, *range(-11, 12)]
    cases = [*itertools.product(range(10), bounds, bounds)]
    assert len(cases) > 5000
    for size, start, stop in cases:
        part = range(size)[start:stop]
        expected = make(size).subview(part.start, len(part))
        assert make(size)[start:stop] == expected, (size, start, stop)


@given(st.integers(0, 64), BOUND, BOUND)
def test_slices_are_those_of_a_bytearray(size, start, stop):
    part = bytearray(range(size))[start:stop]
    sliced = make_view(size)[start:stop]
    assert sliced.size == len(part)
    if part:
        assert sliced.virtual_addr == make_view().virtual_addr + part[0]


@BOTH
@given(bounds=st.lists(st.tuples(BOUND, BOUND), max_size=5))
def test_a_slice_of_a_slice_is_relative_to_it(make, bounds):
    view, model = make(64), range(64)
    for start, stop in bounds:
        view, model = view[start:stop], model[start:stop]
    assert view == make(64).subview(model.start, len(model))


def test_slicing_moves_both_addresses_and_keeps_the_rest():
    assert fields_of(MemoryRegionView(1, 0x1000, 0x20, 64, 5, 6)[10:30]) == (
        1, 0x100A, 0x2A, 20, 5, 6,
    )  # fmt: skip


def test_slicing_a_remote_view_moves_its_address_and_keeps_the_rest():
    assert fields_of(RemoteView(1, 0x20, 64, 6)[10:30]) == (1, 0x2A, 20, 6)


@BOTH
@pytest.mark.parametrize(
    ("cut", "offset", "size"),
    [
        (lambda v: v[1:], 1, 63),
        (lambda v: v[63:64], 63, 1),
        (lambda v: v[64:64], 64, 0),
        (lambda v: v[-8:], 56, 8),
        (lambda v: v[:-8], 0, 56),
        (lambda v: v[:], 0, 64),
        (lambda v: v[10:20][5:10], 15, 5),
        (lambda v: v[60:100], 60, 4),
        (lambda v: v[100:], 64, 0),
        (lambda v: v[20:10], 20, 0),
        (lambda v: v[8:16:1], 8, 8),
        (lambda v: v[np.int64(8) : np.uint8(16)], 8, 8),
    ],
    ids=range(12),
)
def test_a_slice_moves_its_start_and_its_length_together(make, cut, offset, size):
    view = make(64)
    assert cut(view).rdma_addr == view.rdma_addr + offset
    assert cut(view).size == size


@BOTH
def test_an_empty_slice_is_an_empty_view(make):
    empty = make()[5:5]
    assert not empty
    assert empty.size == 0
    assert empty[0:0] == empty
    assert empty.subview(0, 0) == empty


@BOTH
@pytest.mark.parametrize("step", [2, -1, 0, 2**70, -(2**70)])
def test_a_step_is_refused(make, step):
    with pytest.raises(ValueError, match="step"):
        make()[::step]


@BOTH
@pytest.mark.parametrize(
    "key", [0, -1, "a", None, ..., (slice(0, 4), slice(0, 4)), 1.5]
)
def test_only_a_slice_cuts_a_view(make, key):
    with pytest.raises(TypeError):
        make()[key]


@BOTH
@pytest.mark.parametrize(
    "key", [slice("a", None), slice(None, 1.5), slice(None, None, 1.5)]
)
def test_slice_bounds_must_be_integers(make, key):
    with pytest.raises(TypeError):
        make()[key]


@BOTH
def test_a_view_is_not_iterated(make):
    with pytest.raises(TypeError):
        list(make())


@BOTH
@pytest.mark.parametrize(
    ("offset", "size", "inside"),
    [
        (0, 96, True),
        (96, 0, True),
        (95, 1, True),
        (0, 0, True),
        (97, 0, False),
        (95, 2, False),
        (96, 1, False),
        (0, 97, False),
        (2**64 - 80, 96, False),
        (0, 2**64 - 1, False),
        (2**64 - 1, 2, False),
        (2**63, 2**63, False),
        (2**63, 0, False),
        (2**64, 0, False),
        (0, 2**64, False),
        (-1, 1, False),
        (0, -1, False),
        (96, -1, False),
        (np.int64(-1), 1, False),
        (0, np.int64(-1), False),
    ],
)
def test_subview_never_clamps(make, offset, size, inside):
    view = make(96)
    if inside:
        part = view.subview(offset, size)
        assert (part.rdma_addr - view.rdma_addr, part.size) == (offset, size)
    else:
        with pytest.raises(IndexError, match=f"{offset}.*{size}.*96"):
            view.subview(offset, size)


@BOTH
@pytest.mark.parametrize("bad", [1.5, True, np.True_, None, "1", np.float64(1)])
def test_subview_takes_integers(make, bad):
    with pytest.raises(TypeError, match="offset"):
        make().subview(bad, 1)
    with pytest.raises(TypeError, match="size"):
        make().subview(0, bad)


@BOTH
@given(
    whole=st.integers(0, 2**64 - 1),
    offset=st.integers(-(2**65), 2**65),
    size=st.integers(-(2**65), 2**65),
)
def test_subview_stays_inside_at_any_width(make, whole, offset, size):
    view = make(whole, virtual_addr=0, rdma_addr=0)
    if offset >= 0 and size >= 0 and offset + size <= whole:
        assert view.subview(offset, size).rdma_addr == offset
    else:
        with pytest.raises(IndexError):
            view.subview(offset, size)


near = st.integers(0, 12)
far = st.integers(2**63 - 6, 2**63 + 6)


@st.composite
def some_view(draw):
    address = draw(near | far)
    return make_view(
        draw(near | far.map(lambda size: min(size, 2**64 - 20 - address))),
        id=draw(st.integers(1, 2)),
        virtual_addr=address,
        rdma_addr=draw(st.sampled_from([address, address, address + 5])),
        lkey=draw(st.integers(1, 2)),
        rkey=draw(st.integers(1, 2)),
    )


def lies_in(inner, outer):
    return (
        outer.rdma_addr <= inner.rdma_addr
        and inner.rdma_addr + inner.size <= outer.rdma_addr + outer.size
    )


@given(some_view(), some_view())
def test_a_view_contains_the_slices_of_it(outer, inner):
    same_registration = (
        outer.id == inner.id
        and outer.lkey == inner.lkey
        and outer.rkey == inner.rkey
        and outer.virtual_addr - outer.rdma_addr == inner.virtual_addr - inner.rdma_addr
    )
    assert (inner in outer) is (same_registration and lies_in(inner, outer))


@given(some_view(), some_view())
def test_a_remote_view_contains_the_slices_of_it(outer, inner):
    outer, inner = outer.remote(), inner.remote()
    same_registration = outer.id == inner.id and outer.rkey == inner.rkey
    assert (inner in outer) is (same_registration and lies_in(inner, outer))


@given(some_view(), some_view())
def test_views_overlap_where_they_share_a_byte(a, b):
    first_shared = max(a.rdma_addr, b.rdma_addr)
    end_shared = min(a.rdma_addr + a.size, b.rdma_addr + b.size)
    shared = a.id == b.id and first_shared < end_shared
    assert a.overlaps(b) is b.overlaps(a) is shared
    assert a.remote().overlaps(b.remote()) is shared


@BOTH
@given(bounds=st.tuples(BOUND, BOUND))
def test_every_slice_is_contained(make, bounds):
    whole = make()
    part = whole[slice(*bounds)]
    assert part in whole
    assert (whole in part) is (part.size == whole.size)
    assert whole.overlaps(part) is bool(part)


@BOTH
def test_the_registration_before_in_memory_is_not_contained(make):
    assert make(8, virtual_addr=0, rdma_addr=0) not in make(
        2**63, virtual_addr=8, rdma_addr=8
    )


@BOTH
@pytest.mark.parametrize("other", [0, None, b"", "view"])
def test_only_views_are_contained_or_overlap(make, other):
    with pytest.raises(TypeError):
        other in make()  # noqa: B015
    with pytest.raises(TypeError):
        make().overlaps(other)


def test_a_view_and_a_remote_view_are_not_compared_by_range():
    with pytest.raises(TypeError):
        make_remote() in make_view()  # noqa: B015
    with pytest.raises(TypeError):
        make_view() in make_remote()  # noqa: B015
    with pytest.raises(TypeError):
        make_view().overlaps(make_remote())


def test_remote_has_what_a_peer_needs():
    remote = MemoryRegionView(1, 0x1000, 0x2000, 64, 5, 6).remote()
    assert type(remote) is RemoteView
    assert fields_of(remote) == (1, 0x2000, 64, 6)


@given(BOUND, BOUND)
def test_slicing_before_or_after_remote_is_the_same(start, stop):
    assert make_view()[start:stop].remote() == make_view().remote()[start:stop]


def test_a_view_without_remote_right_has_no_remote_view():
    with pytest.raises(ValueError, match="REMOTE_READ"):
        make_view(rkey=0).remote()


def test_to_dict_has_the_fields_in_their_order():
    view = MemoryRegionView(1, 2, 3, 4, 5, 6)
    assert list(view.to_dict().items()) == list(
        zip(FIELDS, [1, 2, 3, 4, 5, 6], strict=True)
    )
    assert list(view.remote().to_dict().items()) == list(
        zip(REMOTE_FIELDS, [1, 3, 4, 6], strict=True)
    )


@BOTH
def test_from_dict_takes_what_to_dict_gave(make):
    view = make()
    assert type(view).from_dict(view.to_dict()) == view
    assert type(view).from_dict(json.loads(json.dumps(view.to_dict()))) == view


@BOTH
def test_from_dict_refuses_a_missing_or_unknown_field(make):
    view = make()
    for name in view.to_dict():
        fields = view.to_dict()
        del fields[name]
        with pytest.raises(TypeError):
            type(view).from_dict(fields)
    with pytest.raises(TypeError):
        type(view).from_dict(view.to_dict() | {"key": 1})
    with pytest.raises(TypeError):
        type(view).from_dict(7)


@BOTH
def test_a_view_is_at_most_72_bytes(make):
    assert sys.getsizeof(make()) <= 72


def test_a_view_of_values_is_detached():
    view = make_view()
    assert view.mr is None
    assert view.attached is False
    assert view[8:16].attached is False


@pytest.mark.parametrize("size", [0, 64])
@pytest.mark.parametrize(
    "touch",
    [
        memoryview,
        bytes,
        bytearray,
        lambda view: view.array(),
        lambda view: np.frombuffer(view, "u1"),
        np.asarray,
    ],
    ids=["memoryview", "bytes", "bytearray", "array", "frombuffer", "asarray"],
)
def test_a_detached_view_has_no_memory_to_touch(touch, size):
    view = make_view(size)
    with pytest.raises(rv.DetachedViewError, match=r"detached.*memory"):
        touch(view)


def test_a_remote_view_has_no_memory_to_touch():
    with pytest.raises(TypeError):
        memoryview(make_remote())


REMOTE = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_READ | rv.Access.REMOTE_WRITE


@pytest.fixture
def mr(pd):
    with pd.reg_mr(bytearray(range(64)), REMOTE) as mr:
        yield mr


def detached(view):
    return MemoryRegionView(**view.to_dict())


def test_an_attached_view_is_the_value_of_its_detached_twin(mr):
    view = mr.view()
    twin = detached(view)
    assert view == twin
    assert hash(view) == hash(twin)
    assert repr(view) == repr(twin)
    assert view.to_bytes() == twin.to_bytes()
    assert view in twin
    assert twin in view
    assert view.attached
    assert not twin.attached


def test_every_slice_of_an_attached_view_is_attached(mr):
    view = mr.view()
    for part in view, view[8:16], view[8:16][2:4], view.subview(8, 8), view[5:5]:
        assert part.attached
        assert part.mr is mr


def test_a_copy_of_an_attached_view_is_the_object_itself(mr):
    view = mr.view()
    assert copy.copy(view) is view
    assert copy.deepcopy(view) is view


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_an_attached_view_is_pickled_as_its_value(mr, protocol):
    back = pickle.loads(pickle.dumps(mr.view(), protocol))
    assert back == mr.view()
    assert not back.attached


def test_a_view_reads_and_writes_the_registered_bytes(pd):
    buffer = bytearray(range(64))
    view = pd.reg_mr(buffer).view()
    assert bytes(view[8:16]) == bytes(range(8, 16))
    view[8:16].array()[:] = 7
    memoryview(view)[60:] = b"abcd"
    np.asarray(view[20:24])[:] = 9
    assert buffer[8:16] == b"\x07" * 8
    assert buffer[60:] == b"abcd"
    assert buffer[20:24] == b"\x09" * 4


def test_an_array_of_a_view_has_the_dtype_and_shape_asked_for(mr):
    view = mr.view()
    array = view.array("<u4", (4, -1))
    assert array.dtype == np.dtype("<u4")
    assert array.shape == (4, 4)
    assert array[1, 0] == 0x13121110
    assert view[5:5].array().shape == (0,)


@pytest.mark.parametrize(
    ("dtype", "shape", "text"),
    [("u8", None, "60.*8"), ("O", None, "object"), ("u1", (7, 9), None)],
)
def test_an_array_that_does_not_fit_the_view_is_refused(mr, dtype, shape, text):
    with pytest.raises(ValueError, match=text):
        mr.view(0, 60).array(dtype, shape)


def test_a_view_of_a_read_only_buffer_is_read_only(pd):
    view = pd.reg_mr(bytes(64)).view()
    assert memoryview(view).readonly
    assert not view.array().flags.writeable
    with pytest.raises(TypeError):
        io.BytesIO(b"overwritten").readinto(view)
    assert bytes(view) == bytes(64)


@pytest.mark.parametrize(
    "buffer",
    [
        np.zeros(10),
        np.zeros((3, 5), "i2"),
        np.zeros(4, "i1, f8"),
        array.array("d", [1, 2, 3]),
        bytearray(17),
        memoryview(bytearray(16)).cast("i"),
        memoryview(bytearray(16)).cast("i").cast("B"),
    ],
    ids=["f8", "2d", "struct", "array", "bytearray", "i4", "cast"],
)
def test_the_size_of_a_view_is_its_buffer_in_bytes(pd, buffer):
    view = pd.reg_mr(buffer).view()
    assert view.size == len(view) == memoryview(buffer).nbytes
    assert view.array().nbytes == view.size


@pytest.mark.soft_only("rxe's two keys are equal")
def test_the_local_and_the_remote_key_are_told_apart(mr):
    assert mr.view().lkey == mr.lkey
    assert mr.view().rkey == mr.rkey
    assert mr.lkey != mr.rkey


def test_a_view_keeps_its_registration(pd):
    view = pd.reg_mr(bytearray(b"kept" * 16)).view()[60:]
    gc.collect()
    assert not view.mr.closed
    assert bytes(view) == b"kept"


class Segment(bytearray):
    """Memory that may refer to a view of itself."""


def test_memory_that_holds_its_own_view_is_collected(pd):
    segment = Segment(64)
    segment.view = pd.reg_mr(segment).view()[8:16]
    gone = weakref.ref(segment)
    del segment
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize(
    "touch",
    [
        memoryview,
        bytes,
        lambda view: view.array(),
        np.asarray,
        lambda view: view.remote(),
    ],
    ids=["memoryview", "bytes", "array", "asarray", "remote"],
)
def test_a_stale_view_refuses_its_use(mr, touch):
    view = mr.view(8, 8)
    touch(view)
    mr.close()
    with pytest.raises(rv.StaleViewError, match="stale"):
        touch(view)


def test_a_stale_view_is_still_a_value(mr):
    view = mr.view()
    fields, number, wire = fields_of(view), hash(view), view.to_bytes()
    mr.close()
    assert fields_of(view) == fields
    assert hash(view) == number
    assert view.to_bytes() == wire
    assert view[8:16] == detached(view)[8:16]
    assert view.attached


def test_an_array_outlives_the_registration(pd):
    mr = pd.reg_mr(bytearray(b"kept" * 16))
    memory = mr.view()[60:].array()
    mr.close()
    del mr
    gc.collect()
    assert bytes(memory) == b"kept"


def test_a_buffer_registered_again_gives_different_views(pd):
    buffer = bytearray(64)
    with pd.reg_mr(buffer) as mr:
        first = mr.view()
    with pd.reg_mr(buffer) as mr:
        second = mr.view()
    assert first.virtual_addr == second.virtual_addr
    assert first.id != second.id
    assert first != second
    assert not first.overlaps(second)
