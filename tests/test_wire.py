"""The view as bytes: what peers, pickles and processes are handed."""

import concurrent.futures
import copy
import multiprocessing
import pickle
import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rdmaview import MemoryRegionView, RemoteView

VIEW = MemoryRegionView(
    0xABCDEF0000000001, 0x7F0000001000, 0x100000, 2**34, 0x01020304, 0xA0B0C0D0
)
BOTH = pytest.mark.parametrize("view", [VIEW, VIEW.remote()], ids=["view", "remote"])
PRIVATE_DATA_OF_A_CONNECTION_REQUEST = 56


def pack_view(id, virtual_addr, rdma_addr, size, lkey, rkey, magic=b"RMV1"):
    return struct.pack(
        "!4sQQQQII", magic, id, virtual_addr, rdma_addr, size, lkey, rkey
    )


def pack_remote(id, rdma_addr, size, rkey, magic=b"RRV1"):
    return struct.pack("!4sQQQI", magic, id, rdma_addr, size, rkey)


u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)


@st.composite
def view_fields(draw):
    size = draw(u64 | st.integers(0, 2**16))
    address = st.integers(0, 2**64 - 1 - size)
    return draw(u64), draw(address), draw(address), size, draw(u32), draw(u32)


@given(view_fields())
def test_a_view_is_its_magic_and_fields_in_network_order(fields):
    view = MemoryRegionView(*fields)
    assert view.to_bytes() == pack_view(*fields)
    assert len(view.to_bytes()) == 44


@given(view_fields())
def test_a_remote_view_is_its_magic_and_fields_in_network_order(fields):
    id, _, rdma_addr, size, _, rkey = fields
    remote = RemoteView(id, rdma_addr, size, rkey)
    assert remote.to_bytes() == pack_remote(id, rdma_addr, size, rkey)
    assert len(remote.to_bytes()) == 32


@BOTH
def test_a_wire_form_fits_a_connection_request(view):
    assert len(view.to_bytes()) <= PRIVATE_DATA_OF_A_CONNECTION_REQUEST


@given(view_fields())
def test_a_view_comes_back_equal_from_its_bytes(fields):
    view = MemoryRegionView(*fields)
    back = MemoryRegionView.from_bytes(view.to_bytes())
    assert back == view
    assert hash(back) == hash(view)
    assert tuple(back.to_dict().values()) == fields


@given(view_fields())
def test_a_remote_view_comes_back_equal_from_its_bytes(fields):
    id, _, rdma_addr, size, _, rkey = fields
    remote = RemoteView(id, rdma_addr, size, rkey)
    back = RemoteView.from_bytes(remote.to_bytes())
    assert back == remote
    assert hash(back) == hash(remote)
    assert tuple(back.to_dict().values()) == (id, rdma_addr, size, rkey)


@BOTH
@pytest.mark.parametrize(
    "container",
    [bytearray, memoryview, lambda wire: np.frombuffer(wire, "u4")],
    ids=["bytearray", "memoryview", "ndarray"],
)
def test_any_contiguous_bytes_are_read(view, container):
    assert type(view).from_bytes(container(view.to_bytes())) == view


@BOTH
@pytest.mark.parametrize("data", [None, 44, "R" * 44, [0] * 44], ids=repr)
def test_what_is_not_bytes_is_refused(view, data):
    with pytest.raises(TypeError):
        type(view).from_bytes(data)


@BOTH
def test_strided_bytes_are_refused(view):
    doubled = bytes(byte for byte in view.to_bytes() for _ in range(2))
    with pytest.raises(BufferError):
        type(view).from_bytes(memoryview(doubled)[::2])


@BOTH
def test_another_length_is_refused(view):
    wire = view.to_bytes()
    for length in {*range(100)} - {len(wire)}:
        with pytest.raises(ValueError, match=f"{len(wire)} bytes, not {length}"):
            type(view).from_bytes((wire + bytes(100))[:length])


@pytest.mark.parametrize(
    "magic", [b"RRV1", b"RMV0", b"RMV2", b"rmv1", b"1VMR", bytes(4), b"\xff" * 4]
)
def test_another_magic_is_refused_in_a_view(magic):
    with pytest.raises(ValueError, match="starts with b'RMV1'"):
        MemoryRegionView.from_bytes(pack_view(1, 2, 3, 4, 5, 6, magic=magic))


@pytest.mark.parametrize(
    "magic", [b"RMV1", b"RRV0", b"RRV2", b"rrv1", b"1VRR", bytes(4), b"\xff" * 4]
)
def test_another_magic_is_refused_in_a_remote_view(magic):
    with pytest.raises(ValueError, match="starts with b'RRV1'"):
        RemoteView.from_bytes(pack_remote(1, 2, 3, 4, magic=magic))


WRAPPING = pytest.mark.parametrize(
    ("address", "size"),
    [(2**64 - 16, 32), (1, 2**64 - 1), (2**63, 2**63), (2**64 - 1, 2**64 - 1)],
)


@WRAPPING
def test_a_range_that_wraps_is_refused_in_a_view(address, size):
    for fields in (1, address, 0, size, 5, 6), (1, 0, address, size, 5, 6):
        with pytest.raises(ValueError, match=f"{address:#x} .*{size}"):
            MemoryRegionView.from_bytes(pack_view(*fields))


@WRAPPING
def test_a_range_that_wraps_is_refused_in_a_remote_view(address, size):
    with pytest.raises(ValueError, match=f"{address:#x} .*{size}"):
        RemoteView.from_bytes(pack_remote(1, address, size, 6))


@BOTH
def test_hostile_bytes_are_refused_or_are_a_view(view):
    dice = random.Random(20_000)
    cls, valid = type(view), view.to_bytes()
    views = 0
    for _ in range(20_000):
        wire = hostile_bytes(dice, valid)
        try:
            read = cls.from_bytes(wire)
        except ValueError:
            continue
        views += 1
        assert read.to_bytes() == wire
        assert read.rdma_addr + read.size < 2**64
        assert cls(**read.to_dict()) == read
    assert 4_000 < views < 16_000


def hostile_bytes(dice, valid):
    wire = bytearray(valid)
    kind = dice.randrange(4)
    if kind == 0:
        return dice.randbytes(dice.randrange(2 * len(valid)))
    if kind == 1:
        wire[4:] = dice.randbytes(len(valid) - 4)
    else:
        for _ in range(dice.randrange(1, 4)):
            wire[dice.randrange(4 * (kind == 2), len(wire))] = dice.randrange(256)
    return bytes(wire)


def test_what_a_peer_is_told_has_no_lkey():
    remote = VIEW.remote()
    assert VIEW.lkey.to_bytes(4, "big") in VIEW.to_bytes()
    assert VIEW.lkey.to_bytes(4, "big") not in remote.to_bytes()
    assert VIEW.lkey.to_bytes(4, "little") not in remote.to_bytes()
    assert "lkey" not in remote.to_dict()
    assert not hasattr(remote, "lkey")


def test_what_a_peer_is_told_has_no_local_address():
    remote = VIEW.remote()
    assert not hasattr(remote, "virtual_addr")
    assert VIEW.virtual_addr.to_bytes(8, "big") not in remote.to_bytes()


@BOTH
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_every_pickle_protocol_gives_an_equal_view(view, protocol):
    for original in view, view[8:16], view[0:0]:
        back = pickle.loads(pickle.dumps(original, protocol))
        assert type(back) is type(original)
        assert back == original
        assert hash(back) == hash(original)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickled_view_comes_back_detached(protocol):
    assert pickle.loads(pickle.dumps(VIEW, protocol)).attached is False


@BOTH
def test_a_tampered_pickle_is_refused(view):
    wire = view.to_bytes()
    data = pickle.dumps(view)
    assert data.count(wire) == 1
    with pytest.raises(ValueError, match="starts with"):
        pickle.loads(data.replace(wire[:4], b"XXXX"))


@BOTH
def test_copies_of_containers_hold_the_same_view(view):
    assert copy.deepcopy({"views": [view, view]}) == {"views": [view, view]}
    assert copy.copy([view])[0] is view


def test_views_pass_to_a_spawned_process_and_back():
    views = [VIEW, VIEW[8:16], VIEW.remote()]
    spawn = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawn) as pool:
        assert list(pool.map(copy.copy, views)) == views
        assert list(pool.map(hash, views)) == [hash(view) for view in views]
