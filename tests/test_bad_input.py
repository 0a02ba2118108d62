"""The table of what is refused before any verb, with the values in its text."""

import array
import ctypes
import errno
import gc
import mmap
import pickle
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
from helpers import PAGE, mapping, unmap

import rdmaview as rv
from rdmaview import Access, MemoryRegionView, QueuePairInfo, RemoteView

SIZE = 4 * PAGE
PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


class Case(NamedTuple):
    id: str
    call: object
    error: type
    said: tuple = ()


def table(*rows):
    cases = [Case(*row) for row in rows]
    assert len({case.id for case in cases}) == len(cases)
    return pytest.mark.parametrize(
        "case", [pytest.param(case, id=case.id) for case in cases]
    )


class DeviceMemory:
    __cuda_array_interface__ = {
        "shape": (64,),
        "typestr": "|u1",
        "data": (0x7F0000000000, False),
        "version": 3,
    }


class DeviceArray(np.ndarray):
    """Has a buffer, as managed memory does, and says that a device owns it."""

    __cuda_array_interface__ = DeviceMemory.__cuda_array_interface__


def wire(view):
    return view.to_bytes()


@pytest.fixture
def world(ctx, pd, cq, pair):
    """What a call is made on; `fresh` is what it may try to register."""
    memory = mmap.mmap(-1, SIZE)
    other = mmap.mmap(-1, SIZE)
    with (
        pd.reg_mr(memory, PEER) as mr,
        pd.reg_mr(other, PEER) as peer,
        pd.reg_mr(bytes(64)) as readonly,
        pd.reg_mr(bytearray(64)) as local_only,
        ctx.alloc_pd() as other_pd,
        other_pd.reg_mr(bytearray(64)) as other_mr,
        pd.create_qp(cq) as unconnected,
    ):
        yield SimpleNamespace(
            ctx=ctx,
            pd=pd,
            cq=cq,
            qp=pair.a,
            peer_info=pair.b.info,
            unconnected=unconnected,
            mr=mr,
            address=mr.addr,
            view=mr[:64],
            remote=peer[:64].remote(),
            readonly=readonly,
            local_only=local_only,
            other_mr=other_mr,
            fresh=bytearray(SIZE),
        )
    del memory, other


@pytest.fixture
def closed(ctx, pd, cq, world):
    """Handles after their close()."""
    with rv.open(ctx.name) as closed_ctx:
        pass
    with ctx.alloc_pd() as closed_pd:
        pass
    with ctx.create_cq(8) as closed_cq:
        pass
    with pd.reg_mr(bytearray(64), PEER) as closed_mr:
        stale = closed_mr[:64]
    with pd.create_qp(cq) as closed_qp:
        pass
    return SimpleNamespace(
        ctx=closed_ctx,
        pd=closed_pd,
        cq=closed_cq,
        mr=closed_mr,
        stale=stale,
        qp=closed_qp,
        open=world,
    )


@pytest.fixture
def refuse(is_soft, request):
    """Make a case's call; prove that it was refused, and that no verb was called."""
    calls = request.getfixturevalue("counters") if is_soft else None

    def call(case, on):
        if calls:
            calls.restart()
        with pytest.raises(case.error) as refusal:
            case.call(on)
        if calls:
            assert calls() == {}
        assert type(refusal.value) is case.error
        for value in case.said:
            assert value in str(refusal.value)

    return call


def assert_released(fresh):
    gc.collect()
    # A bytearray that is exported can't be resized.
    fresh.append(0)


def readonly_array(w):
    array = np.frombuffer(w.fresh, "u1")
    array.setflags(write=False)
    return array


def strided(w, shape, *cut, dtype="f8"):
    return np.frombuffer(w.fresh, dtype, int(np.prod(shape))).reshape(shape)[cut]


EVERY_2ND = slice(None, None, 2)
REVERSED = slice(None, None, -1)


@table(
    ("bytearray", lambda w: w.pd.reg_mr(bytearray()), ValueError, ("zero bytes",)),
    ("bytes", lambda w: w.pd.reg_mr(b""), ValueError, ("zero bytes",)),
    ("memoryview", lambda w: w.pd.reg_mr(memoryview(b"")), ValueError, ("zero bytes",)),
    (
        "array.array",
        lambda w: w.pd.reg_mr(array.array("d")),
        ValueError,
        ("zero bytes",),
    ),
    (
        "ctypes array",
        lambda w: w.pd.reg_mr((ctypes.c_int * 0)()),
        ValueError,
        ("zero bytes",),
    ),
    ("ndarray (0,)", lambda w: w.pd.reg_mr(np.empty(0)), ValueError, ("zero bytes",)),
    (
        "ndarray (2,0)",
        lambda w: w.pd.reg_mr(np.empty((2, 0))),
        ValueError,
        ("zero bytes",),
    ),
    (
        "ndarray (0,3) in Fortran order",
        lambda w: w.pd.reg_mr(np.empty((0, 3), order="F")),
        ValueError,
        ("zero bytes",),
    ),
    (
        "strided ndarray (2,0,3)",
        lambda w: w.pd.reg_mr(np.empty((4, 0, 6))[::2, :, ::2]),
        ValueError,
        ("zero bytes",),
    ),
    (
        "ndarray of items of no size",
        lambda w: w.pd.reg_mr(np.empty(3, np.dtype([]))),
        ValueError,
        ("zero bytes",),
    ),
    (
        "slice at an aligned address",
        lambda w: w.pd.reg_mr(w.mr[:0]),
        ValueError,
        ("zero bytes",),
    ),
    (
        "slice at an odd address",
        lambda w: w.pd.reg_mr(w.mr[1:1]),
        ValueError,
        ("zero bytes",),
    ),
    (
        "aligned raw address",
        lambda w: w.pd.reg_mr_address(w.address, 0),
        ValueError,
        ("zero bytes",),
    ),
    (
        "odd raw address",
        lambda w: w.pd.reg_mr_address(w.address + 1, 0),
        ValueError,
        ("zero bytes",),
    ),
    (
        "no address",
        lambda w: w.pd.reg_mr_address(0, 0),
        ValueError,
        ("zero bytes",),
    ),
    (
        "with a peer's rights",
        lambda w: w.pd.reg_mr(bytearray(), PEER),
        ValueError,
        ("zero bytes",),
    ),
)
def test_zero_bytes_are_not_registered(case, world, refuse):
    refuse(case, world)


@table(
    (
        "every second",
        lambda w: w.pd.reg_mr(strided(w, (8,), EVERY_2ND, dtype="i1")),
        BufferError,
        ("shape (4,)", "strides (2,)", "ascontiguousarray"),
    ),
    (
        "reversed",
        lambda w: w.pd.reg_mr(strided(w, (8,), REVERSED, dtype="i1")),
        BufferError,
        ("shape (8,)", "strides (-1,)", "ascontiguousarray"),
    ),
    (
        "columns",
        lambda w: w.pd.reg_mr(strided(w, (4, 6), slice(None), slice(0, 3))),
        BufferError,
        ("shape (4, 3)", "strides (48, 8)"),
    ),
    (
        "transposed in 3 dimensions",
        lambda w: w.pd.reg_mr(strided(w, (2, 3, 4)).transpose(0, 2, 1)),
        BufferError,
        ("shape (2, 4, 3)", "strides (96, 8, 32)"),
    ),
    (
        "broadcast",
        lambda w: w.pd.reg_mr(np.broadcast_to(np.frombuffer(w.fresh, "u1", 1), 8)),
        BufferError,
        ("shape (8,)", "strides (0,)"),
    ),
    (
        "writable with a zero stride",
        lambda w: w.pd.reg_mr(
            np.lib.stride_tricks.as_strided(np.frombuffer(w.fresh, "u1"), (8,), (0,))
        ),
        BufferError,
        ("shape (8,)", "strides (0,)"),
    ),
    (
        "memoryview, every second",
        lambda w: w.pd.reg_mr(memoryview(w.fresh)[::2]),
        BufferError,
        (f"shape ({SIZE // 2},)", "strides (2,)"),
    ),
    (
        "read-only and strided",
        lambda w: w.pd.reg_mr(memoryview(bytes(8))[::2], Access(0)),
        BufferError,
        ("shape (4,)", "strides (2,)"),
    ),
    (
        "strided, with a peer's rights",
        lambda w: w.pd.reg_mr(strided(w, (8,), EVERY_2ND), PEER),
        BufferError,
        ("shape (4,)", "strides (16,)"),
    ),
    (
        "view_of a strided array",
        lambda w: w.mr.view_of(w.mr[:64].array()[::2]),
        BufferError,
        ("shape (32,)", "strides (2,)"),
    ),
)
def test_what_is_not_contiguous_is_refused_with_its_strides(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


WRITES = {
    "LOCAL_WRITE": Access.LOCAL_WRITE,
    "LOCAL_WRITE|REMOTE_WRITE": Access.LOCAL_WRITE | Access.REMOTE_WRITE,
    "LOCAL_WRITE|REMOTE_ATOMIC": Access.LOCAL_WRITE | Access.REMOTE_ATOMIC,
    "REMOTE_WRITE": Access.REMOTE_WRITE,
}
READ_ONLY = {
    "bytes": lambda w: b"x" * 4096,
    "ndarray of bytes": lambda w: np.frombuffer(b"x" * 4096, "u1"),
    "ndarray": readonly_array,
    "memoryview": lambda w: memoryview(w.fresh).toreadonly(),
    "mmap": lambda w: mmap.mmap(-1, PAGE, access=mmap.ACCESS_READ),
    "view of a read-only region": lambda w: w.readonly[:],
}


@table(
    *(
        (
            f"{kind} with {name}",
            lambda w, make=make, access=access: w.pd.reg_mr(make(w), access),
            BufferError,
            ("read-only", name),
        )
        for kind, make in READ_ONLY.items()
        for name, access in WRITES.items()
    )
)
def test_a_read_only_buffer_gets_no_write_right(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


@table(
    *(
        (
            f"{access!r}",
            lambda w, access=access: w.pd.reg_mr(w.fresh, access),
            ValueError,
            (*names, "LOCAL_WRITE"),
        )
        for access, names in (
            (Access.REMOTE_WRITE, ["REMOTE_WRITE"]),
            (Access.REMOTE_ATOMIC, ["REMOTE_ATOMIC"]),
            (Access.REMOTE_WRITE | Access.REMOTE_READ, ["REMOTE_WRITE", "REMOTE_READ"]),
            (2, ["REMOTE_WRITE"]),
        )
    ),
    (
        "raw address",
        lambda w: w.pd.reg_mr_address(w.address, 64, Access.REMOTE_WRITE),
        ValueError,
        ("REMOTE_WRITE",),
    ),
)
def test_a_peer_may_not_write_where_the_owner_may_not(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


@table(
    ("-1", lambda w: w.pd.reg_mr(w.fresh, -1), ValueError, ("-0x1",)),
    ("2**12", lambda w: w.pd.reg_mr(w.fresh, 1 << 12), ValueError, ("0x1000",)),
    ("2**64", lambda w: w.pd.reg_mr(w.fresh, 1 << 64), ValueError, (hex(1 << 64),)),
    ("True", lambda w: w.pd.reg_mr(w.fresh, True), TypeError, ("bool", "True")),
    ("1.0", lambda w: w.pd.reg_mr(w.fresh, 1.0), TypeError, ("float", "1.0")),
    ("text", lambda w: w.pd.reg_mr(w.fresh, "rw"), TypeError, ("str", "'rw'")),
    (
        "None at an address",
        lambda w: w.pd.reg_mr_address(w.address, 64, None),
        TypeError,
        ("NoneType",),
    ),
)
def test_access_is_made_of_known_rights(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


@table(
    ("None", lambda w: w.pd.reg_mr(None), TypeError, ("NoneType",)),
    ("str", lambda w: w.pd.reg_mr("abc"), TypeError, ("str", "buffer")),
    ("list", lambda w: w.pd.reg_mr([1, 2]), TypeError, ("list", "buffer")),
    ("int", lambda w: w.pd.reg_mr(4096), TypeError, ("int", "reg_mr_address")),
    ("float", lambda w: w.pd.reg_mr(1.5), TypeError, ("float", "buffer")),
    ("remote view", lambda w: w.pd.reg_mr(w.remote), TypeError, ("RemoteView",)),
    (
        "ndarray of objects",
        lambda w: w.pd.reg_mr(np.array([w, None])),
        TypeError,
        ("ndarray", "object"),
    ),
    (
        "memoryview of objects",
        lambda w: w.pd.reg_mr(memoryview(np.array([w, None]))),
        TypeError,
        ("memoryview", "Python objects"),
    ),
    (
        "records with objects",
        lambda w: w.pd.reg_mr(np.zeros(4, [("n", "i8"), ("o", "O")])),
        TypeError,
        ("ndarray", "Python objects"),
    ),
    (
        "device memory",
        lambda w: w.pd.reg_mr(DeviceMemory()),
        TypeError,
        ("DeviceMemory", "device memory"),
    ),
    (
        "device memory that has a buffer",
        lambda w: w.pd.reg_mr(np.frombuffer(w.fresh, "u1").view(DeviceArray)),
        TypeError,
        ("DeviceArray", "device memory"),
    ),
    (
        "view_of device memory",
        lambda w: w.mr.view_of(DeviceMemory()),
        TypeError,
        ("DeviceMemory", "device memory"),
    ),
    (
        "a detached view",
        lambda w: w.pd.reg_mr(MemoryRegionView.from_bytes(wire(w.view))),
        rv.DetachedViewError,
        ("detached",),
    ),
)
def test_what_has_no_host_memory_is_not_registered(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


def address_rows(name, call):
    return (
        (f"{name} -1", lambda w: call(w, -1), ValueError, ("-1",)),
        (f"{name} 2**64", lambda w: call(w, 2**64), ValueError, (str(2**64),)),
        (f"{name} 1.5", lambda w: call(w, 1.5), TypeError, (name, "1.5")),
        (f"{name} True", lambda w: call(w, True), TypeError, (name, "True")),
        (f"{name} int64(-1)", lambda w: call(w, np.int64(-1)), ValueError, ("-1",)),
        (f"{name} text", lambda w: call(w, "16"), TypeError, (name, "'16'")),
    )


@table(
    *address_rows("addr", lambda w, n: w.pd.reg_mr_address(n, 64)),
    *address_rows("length", lambda w, n: w.pd.reg_mr_address(w.address, n)),
    *address_rows("iova", lambda w, n: w.pd.reg_mr_address(w.address, 64, iova=n)),
    (
        "addr None",
        lambda w: w.pd.reg_mr_address(None, 64),
        TypeError,
        ("addr", "None"),
    ),
    (
        "length None",
        lambda w: w.pd.reg_mr_address(w.address, None),
        TypeError,
        ("length", "None"),
    ),
    (
        "length that wraps",
        lambda w: w.pd.reg_mr_address(w.address, 2**64 - 1),
        ValueError,
        (str(2**64 - 1), "2**64"),
    ),
    (
        "addr that wraps",
        lambda w: w.pd.reg_mr_address(2**64 - 4096, 8192),
        ValueError,
        (hex(2**64 - 4096), "8192"),
    ),
    (
        "addr and length of 2**63",
        lambda w: w.pd.reg_mr_address(2**63, 2**63),
        ValueError,
        (hex(2**63), str(2**63)),
    ),
    (
        "iova that wraps",
        lambda w: w.pd.reg_mr_address(w.address, 2 * PAGE, iova=2**64 - PAGE),
        ValueError,
        (hex(2**64 - PAGE), str(2 * PAGE)),
    ),
    (
        "iova with another offset in its page",
        lambda w: w.pd.reg_mr_address(w.address, 64, iova=1),
        ValueError,
        ("iova 0x1", f"page of {PAGE} bytes"),
    ),
    (
        "iova of a region that is not page-aligned",
        lambda w: w.pd.reg_mr_address(w.address + 8, 64, iova=0),
        ValueError,
        ("iova 0x8", "page"),
    ),
    (
        "zero-based, and an iova",
        lambda w: w.pd.reg_mr_address(w.address, 64, Access.ZERO_BASED, iova=w.address),
        ValueError,
        ("ZERO_BASED", "0x"),
    ),
    (
        "zero-based, and not page-aligned",
        lambda w: w.pd.reg_mr_address(w.address + 8, 64, Access.ZERO_BASED),
        ValueError,
        ("iova 0x8", "page"),
    ),
)
def test_an_address_is_a_number_of_64_bits_that_does_not_wrap(case, world, refuse):
    refuse(case, world)


@table(
    ("context: enter", lambda c: c.ctx.__enter__(), ValueError, ("Context", "closed")),
    ("context: alloc_pd", lambda c: c.ctx.alloc_pd(), ValueError, ("closed",)),
    ("context: create_cq", lambda c: c.ctx.create_cq(8), ValueError, ("closed",)),
    ("context: port", lambda c: c.ctx.port(1), ValueError, ("closed",)),
    ("context: gids", lambda c: c.ctx.gids(1), ValueError, ("closed",)),
    ("context: attributes", lambda c: c.ctx.attributes, ValueError, ("closed",)),
    (
        "pd: enter",
        lambda c: c.pd.__enter__(),
        ValueError,
        ("ProtectionDomain", "closed"),
    ),
    ("pd: reg_mr", lambda c: c.pd.reg_mr(c.open.fresh), ValueError, ("closed",)),
    (
        "pd: reg_mr_address",
        lambda c: c.pd.reg_mr_address(c.open.address, 64),
        ValueError,
        ("closed",),
    ),
    ("pd: create_qp", lambda c: c.pd.create_qp(c.open.cq), ValueError, ("closed",)),
    (
        "cq: enter",
        lambda c: c.cq.__enter__(),
        ValueError,
        ("CompletionQueue", "closed"),
    ),
    ("cq: poll", lambda c: c.cq.poll(), ValueError, ("closed",)),
    ("cq: wait", lambda c: c.cq.wait(0), ValueError, ("closed",)),
    ("cq: create_qp", lambda c: c.open.pd.create_qp(c.cq), ValueError, ("closed",)),
    ("mr: enter", lambda c: c.mr.__enter__(), rv.StaleViewError, ("closed",)),
    ("mr: view", lambda c: c.mr.view(), rv.StaleViewError, ("closed",)),
    ("mr: slice", lambda c: c.mr[:8], rv.StaleViewError, ("closed",)),
    (
        "stale view: memoryview",
        lambda c: memoryview(c.stale),
        rv.StaleViewError,
        ("stale", "id=0x"),
    ),
    ("stale view: array", lambda c: c.stale.array(), rv.StaleViewError, ("stale",)),
    ("stale view: remote", lambda c: c.stale.remote(), rv.StaleViewError, ("stale",)),
    (
        "stale view: array of a slice",
        lambda c: c.stale[8:16].array(),
        rv.StaleViewError,
        ("stale", "size=8"),
    ),
    (
        "stale view: write",
        lambda c: c.open.qp.write(c.stale, c.open.remote),
        rv.StaleViewError,
        ("stale",),
    ),
    (
        "stale view: post_read",
        lambda c: c.open.qp.post_read(c.stale, c.open.remote),
        rv.StaleViewError,
        ("stale",),
    ),
    (
        "stale view: registered",
        lambda c: c.open.pd.reg_mr(c.stale),
        rv.StaleViewError,
        ("stale",),
    ),
    (
        "qp: enter",
        lambda c: c.qp.__enter__(),
        ValueError,
        ("QueuePair", "closed"),
    ),
    (
        "qp: connect",
        lambda c: c.qp.connect(c.open.peer_info),
        ValueError,
        ("closed",),
    ),
    ("qp: state", lambda c: c.qp.state, ValueError, ("closed",)),
    *(
        (
            f"qp: {verb}",
            lambda c, verb=verb: getattr(c.qp, verb)(c.open.view, c.open.remote),
            ValueError,
            ("QueuePair", "closed"),
        )
        for verb in ("post_write", "post_read", "write", "read")
    ),
)
def test_a_closed_handle_is_not_used(case, closed, refuse):
    refuse(case, closed)
    assert_released(closed.open.fresh)


@table(
    *(
        row
        for name in ("view", "remote", "mr")
        for row in (
            (
                f"{name}[::2]",
                lambda w, name=name: getattr(w, name)[::2],
                ValueError,
                ("step", "2"),
            ),
            (
                f"{name}[::-1]",
                lambda w, name=name: getattr(w, name)[::-1],
                ValueError,
                ("step", "-1"),
            ),
            (
                f"{name}[0]",
                lambda w, name=name: getattr(w, name)[0],
                TypeError,
                ("int", "0"),
            ),
            (
                f"{name}['a']",
                lambda w, name=name: getattr(w, name)["a"],
                TypeError,
                ("str", "'a'"),
            ),
            (
                f"{name}[1.5:]",
                lambda w, name=name: getattr(w, name)[1.5:],
                TypeError,
                (),
            ),
        )
    )
)
def test_a_view_is_cut_by_a_slice_without_a_step(case, world, refuse):
    refuse(case, world)


def cut_rows(name, call):
    """Bad numbers as the offset and as the size of a cut from 64 bytes or more."""
    return (
        (f"{name} -1", lambda w: call(w, -1), IndexError, ("-1",)),
        (f"{name} 2**63", lambda w: call(w, 2**63), IndexError, (str(2**63),)),
        (f"{name} 2**64", lambda w: call(w, 2**64), IndexError, (str(2**64),)),
        (
            f"{name} 2**64-1",
            lambda w: call(w, 2**64 - 1),
            IndexError,
            (str(2**64 - 1),),
        ),
        (f"{name} int64(-1)", lambda w: call(w, np.int64(-1)), IndexError, ("-1",)),
        (f"{name} 1.5", lambda w: call(w, 1.5), TypeError, ("1.5",)),
        (f"{name} True", lambda w: call(w, True), TypeError, ("True",)),
        (f"{name} text", lambda w: call(w, "8"), TypeError, ("'8'",)),
    )


def none_row(name, call):
    return (f"{name} None", lambda w: call(w, None), TypeError, ("None",))


CUTS = {
    "view: offset": lambda w, n: w.view.subview(n, 8),
    "view: size": lambda w, n: w.view.subview(8, n),
    "remote: offset": lambda w, n: w.remote.subview(n, 8),
    "remote: size": lambda w, n: w.remote.subview(8, n),
    "mr: offset": lambda w, n: w.mr.view(n, 8),
    "mr: size": lambda w, n: w.mr.view(8, n),
    "mr: offset alone": lambda w, n: w.mr.view(n),
}


@table(
    *(row for name, call in CUTS.items() for row in cut_rows(name, call)),
    *(none_row(name, CUTS[name]) for name in CUTS if name != "mr: size"),
    *(
        (
            f"offset {offset} and size {size}",
            lambda w, offset=offset, size=size: w.view.subview(offset, size),
            IndexError,
            (str(offset), str(size), "64"),
        )
        for offset, size in (
            (2**64 - 8, 16),
            (2**64 - 8, 72),
            (0, 65),
            (64, 1),
            (65, 0),
            (63, 2),
        )
    ),
)
def test_a_cut_is_never_clamped_and_never_wraps(case, world, refuse):
    refuse(case, world)


@table(
    (
        "of other memory",
        lambda w: w.mr.view_of(w.fresh),
        ValueError,
        (str(SIZE), "not inside"),
    ),
    (
        "that begins before",
        lambda w: w.mr.view_of((ctypes.c_char * 16).from_address(w.address - 8)),
        ValueError,
        ("16 bytes", "not inside"),
    ),
    (
        "that ends after",
        lambda w: w.mr.view_of((ctypes.c_char * 16).from_address(w.address + SIZE - 8)),
        ValueError,
        ("16 bytes", "not inside"),
    ),
    (
        "that is no array",
        lambda w: w.mr.view_of(w.address),
        TypeError,
        ("int", "buffer"),
    ),
)
def test_an_array_that_is_not_inside_the_region_has_no_view(case, world, refuse):
    refuse(case, world)
    assert_released(world.fresh)


def view_with(**fields):
    return MemoryRegionView.from_dict(
        {"id": 1, "virtual_addr": 0, "rdma_addr": 0, "size": 8, "lkey": 3, "rkey": 4}
        | fields
    )


def remote_with(**fields):
    return RemoteView.from_dict(
        {"id": 1, "rdma_addr": 0, "size": 8, "rkey": 4} | fields
    )


@table(
    *(
        row
        for make, kind, fields in (
            (view_with, "view", "id virtual_addr rdma_addr size lkey rkey"),
            (remote_with, "remote", "id rdma_addr size rkey"),
        )
        for field in fields.split()
        for row in (
            *(
                (
                    f"{kind} {field} {number}",
                    lambda w, m=make, f=field, n=number: m(**{f: n}),
                    ValueError,
                    (field, str(number)),
                )
                for number in (-1, 2**64, *([2**32] if "key" in field else []))
            ),
            (
                f"{kind} {field} int64(-1)",
                lambda w, m=make, f=field: m(**{f: np.int64(-1)}),
                ValueError,
                (field, "-1"),
            ),
            *(
                (
                    f"{kind} {field} {thing!r}",
                    lambda w, m=make, f=field, t=thing: m(**{f: t}),
                    TypeError,
                    (field, repr(thing)),
                )
                for thing in (1.5, True, "8")
            ),
        )
    ),
    *(
        (
            f"{kind} {field} that wraps",
            lambda w, m=make, f=field: m(**{f: 2**64 - 4}),
            ValueError,
            (field, hex(2**64 - 4), "8"),
        )
        for make, kind, field in (
            (view_with, "view", "virtual_addr"),
            (view_with, "view", "rdma_addr"),
            (remote_with, "remote", "rdma_addr"),
        )
    ),
    (
        "view without a field",
        lambda w: MemoryRegionView(1, 2, 3, 4, 5),
        TypeError,
        ("six",),
    ),
    ("remote without a field", lambda w: RemoteView(1, 2, 3), TypeError, ("four",)),
    (
        "view with an unknown field",
        lambda w: view_with(key=1),
        TypeError,
        ("key",),
    ),
)
def test_a_view_is_not_built_of_numbers_that_do_not_fit(case, world, refuse):
    refuse(case, world)


@table(
    *(
        row
        for name, cls, size in (
            ("view", MemoryRegionView, 44),
            ("remote", RemoteView, 32),
        )
        for row in (
            (
                f"{name} too short",
                lambda w, n=name, c=cls: c.from_bytes(wire(getattr(w, n))[:-1]),
                ValueError,
                (str(size), str(size - 1)),
            ),
            (
                f"{name} too long",
                lambda w, n=name, c=cls: c.from_bytes(wire(getattr(w, n)) + b"\0"),
                ValueError,
                (str(size), str(size + 1)),
            ),
            (
                f"{name} empty",
                lambda w, c=cls: c.from_bytes(b""),
                ValueError,
                (str(size), "0"),
            ),
            (
                f"{name} with another magic",
                lambda w, n=name, c=cls: c.from_bytes(
                    b"RQP1" + wire(getattr(w, n))[4:]
                ),
                ValueError,
                ("RQP1",),
            ),
            (
                f"{name} as text",
                lambda w, c=cls, s=size: c.from_bytes("x" * s),
                TypeError,
                ("str",),
            ),
        )
    ),
    (
        "queue pair too short",
        lambda w: QueuePairInfo.from_bytes(w.peer_info.to_bytes()[:-1]),
        ValueError,
        ("34", "33"),
    ),
    (
        "queue pair too long",
        lambda w: QueuePairInfo.from_bytes(w.peer_info.to_bytes() + b"\0"),
        ValueError,
        ("34", "35"),
    ),
    (
        "queue pair with another magic",
        lambda w: QueuePairInfo.from_bytes(b"RMV1" + w.peer_info.to_bytes()[4:]),
        ValueError,
        ("RQP1", "RMV1"),
    ),
)
def test_bytes_that_are_no_wire_form_are_refused(case, world, refuse):
    refuse(case, world)


OPERATIONS = ("post_write", "post_read", "write", "read")


def side_rows(name, local, remote, error, said, operations=OPERATIONS):
    return (
        (
            f"{operation}: {name}",
            lambda w, o=operation: getattr(w.qp, o)(local(w), remote(w)),
            error,
            said,
        )
        for operation in operations
    )


@table(
    *side_rows(
        "a detached view as local side",
        lambda w: MemoryRegionView.from_bytes(wire(w.view)),
        lambda w: w.remote,
        rv.DetachedViewError,
        ("detached", "size=64"),
    ),
    *side_rows(
        "a remote view as local side",
        lambda w: w.remote,
        lambda w: w.remote,
        TypeError,
        ("local", "RemoteView"),
    ),
    *side_rows(
        "a view as remote side",
        lambda w: w.view,
        lambda w: w.view,
        TypeError,
        ("remote", "MemoryRegionView"),
    ),
    *side_rows(
        "an array as local side",
        lambda w: w.view.array(),
        lambda w: w.remote,
        TypeError,
        ("local", "ndarray"),
    ),
    *side_rows(
        "bytes as remote side",
        lambda w: w.view,
        lambda w: wire(w.remote),
        TypeError,
        ("remote", "bytes"),
    ),
    *side_rows(
        "no local side", lambda w: None, lambda w: w.remote, TypeError, ("NoneType",)
    ),
    *side_rows(
        "no remote side", lambda w: w.view, lambda w: None, TypeError, ("NoneType",)
    ),
    *side_rows(
        "the local side is smaller",
        lambda w: w.view[:63],
        lambda w: w.remote,
        ValueError,
        ("63 bytes", "64"),
    ),
    *side_rows(
        "the local side is larger",
        lambda w: w.view,
        lambda w: w.remote[:0],
        ValueError,
        ("64 bytes", "0"),
    ),
    *side_rows(
        "both sides are empty",
        lambda w: w.view[:0],
        lambda w: w.remote[:0],
        ValueError,
        ("zero bytes",),
    ),
    *side_rows(
        "a view of another protection domain",
        lambda w: w.other_mr[:64],
        lambda w: w.remote,
        ValueError,
        ("another protection domain",),
    ),
    *side_rows(
        "a read into a region without the right",
        lambda w: w.readonly[:64],
        lambda w: w.remote,
        ValueError,
        ("LOCAL_WRITE", "access=none"),
        operations=("post_read", "read"),
    ),
    *side_rows(
        "a remote view without a right",
        lambda w: w.view,
        lambda w: RemoteView(w.remote.id, w.remote.rdma_addr, 64, 0),
        ValueError,
        ("rkey=0x0", "no right"),
    ),
    *(
        (
            f"{operation}: not connected",
            lambda w, o=operation: getattr(w.unconnected, o)(w.view, w.remote),
            ValueError,
            ("not connected", "connect()"),
        )
        for operation in OPERATIONS
    ),
    (
        "a view without a right as what a peer needs",
        lambda w: w.local_only[:64].remote(),
        ValueError,
        ("rkey=0x0", "REMOTE_READ"),
    ),
)
def test_sides_that_do_not_fit_are_not_posted(case, world, refuse):
    refuse(case, world)
    assert world.cq.poll() == []
    assert world.qp.in_flight == 0


@table(
    *(
        row
        for name, call in (
            ("write", lambda w, t: w.qp.write(w.view, w.remote, t)),
            ("read", lambda w, t: w.qp.read(w.view, w.remote, t)),
            ("wait", lambda w, t: w.cq.wait(t)),
        )
        for row in (
            *(
                (
                    f"{name}: timeout {timeout}",
                    lambda w, c=call, t=timeout: c(w, t),
                    ValueError,
                    (str(timeout)[:20],),
                )
                for timeout in (-1, -1e-9, float("nan"), float("inf"), 2e9)
            ),
            (
                f"{name}: timeout 10**400",
                lambda w, c=call: c(w, 10**400),
                ValueError,
                ("1000000",),
            ),
            *(
                (
                    f"{name}: timeout {timeout}",
                    lambda w, c=call, t=timeout: c(w, t),
                    TypeError,
                    (str(timeout),),
                )
                for timeout in (None, True)
            ),
            (f"{name}: timeout text", lambda w, c=call: c(w, "1"), TypeError, ("str",)),
        )
    )
)
def test_every_wait_has_an_end(case, world, refuse):
    refuse(case, world)
    assert world.qp.in_flight == 0


@table(
    *(
        row
        for name, call in (
            ("poll", lambda w, n: w.cq.poll(n)),
            ("wait", lambda w, n: w.cq.wait(0, n)),
            ("create_cq", lambda w, n: w.ctx.create_cq(n)),
            ("max_send_wr", lambda w, n: w.pd.create_qp(w.cq, max_send_wr=n)),
            ("max_send_sge", lambda w, n: w.pd.create_qp(w.cq, max_send_sge=n)),
            ("port", lambda w, n: w.pd.create_qp(w.cq, port=n)),
            ("ctx.port", lambda w, n: w.ctx.port(n)),
            ("ctx.gids", lambda w, n: w.ctx.gids(n)),
        )
        for row in (
            *(
                (
                    f"{name}: {number}",
                    lambda w, c=call, n=number: c(w, n),
                    ValueError,
                    (str(number),),
                )
                for number in (0, -1, 2**32, 2**64)
            ),
            *(
                (
                    f"{name}: {thing!r}",
                    lambda w, c=call, t=thing: c(w, t),
                    TypeError,
                    (repr(thing),),
                )
                for thing in (1.5, True, None, "1")
            ),
        )
    ),
    *(
        (
            f"{name}: -1",
            lambda w, n=name: w.pd.create_qp(w.cq, **{n: -1}),
            ValueError,
            (name, "-1"),
        )
        for name in ("max_recv_wr", "max_recv_sge", "max_inline_data")
    ),
    (
        "no completion queue",
        lambda w: w.pd.create_qp(None),
        TypeError,
        ("CompletionQueue", "NoneType"),
    ),
    (
        "something else as completion queue",
        lambda w: w.pd.create_qp(w.ctx),
        TypeError,
        ("CompletionQueue", "Context"),
    ),
)
def test_numbers_of_queues_are_in_their_range(case, world, refuse):
    refuse(case, world)


@table(
    *(
        (
            f"{name}: {value!r}",
            lambda w, n=name, v=value: QueuePairInfo(**w.peer_info._asdict() | {n: v}),
            error,
            (name, repr(value)[:8]),
        )
        for name, value, error in (
            ("qp_num", -1, ValueError),
            ("qp_num", 1 << 24, ValueError),
            ("qp_num", True, TypeError),
            ("qp_num", 1.5, TypeError),
            ("psn", 1 << 24, ValueError),
            ("psn", None, TypeError),
            ("lid", 1 << 16, ValueError),
            ("mtu", 0, ValueError),
            ("mtu", 1500, ValueError),
            ("max_rd_atomic", 256, ValueError),
            ("max_dest_rd_atomic", -1, ValueError),
        )
    ),
    (
        "gid: too short",
        lambda w: QueuePairInfo(**w.peer_info._asdict() | {"gid": bytes(15)}),
        ValueError,
        ("gid", "16", "15"),
    ),
    (
        "gid: text",
        lambda w: QueuePairInfo(**w.peer_info._asdict() | {"gid": "::1"}),
        TypeError,
        ("gid", "str"),
    ),
    *(
        (
            f"connect: {name}",
            lambda w, m=make: w.unconnected.connect(m(w)),
            error,
            said,
        )
        for name, make, error, said in (
            ("None", lambda w: None, TypeError, ("NoneType",)),
            ("bytes", lambda w: w.peer_info.to_bytes(), TypeError, ("from_bytes",)),
            ("a tuple", lambda w: tuple(w.peer_info), TypeError, ("tuple",)),
            (
                "a gid that was replaced by a short one",
                lambda w: w.peer_info._replace(gid=b""),
                ValueError,
                ("gid", "16"),
            ),
            (
                "a number that was replaced by a wide one",
                lambda w: w.peer_info._replace(qp_num=1 << 40),
                ValueError,
                ("qp_num",),
            ),
            (
                "fields that no check has seen",
                lambda w: tuple.__new__(QueuePairInfo, (1, 2, 3)),
                TypeError,
                (),
            ),
        )
    ),
    (
        "connect twice",
        lambda w: w.qp.connect(w.peer_info),
        ValueError,
        ("connected already",),
    ),
)
def test_a_peer_is_described_by_what_can_be(case, world, refuse):
    refuse(case, world)


@table(
    *(
        (
            f"pickle {name}",
            lambda w, n=name: pickle.dumps(getattr(w, n)),
            TypeError,
            said,
        )
        for name, said in (
            ("ctx", ("Context", "pickled")),
            ("pd", ("ProtectionDomain", "pickled")),
            ("mr", ("MemoryRegion", "pickled")),
            ("cq", ("CompletionQueue", "pickled")),
            ("qp", ("QueuePair", "pickled")),
        )
    ),
    *(
        (f"make a {cls.__name__}", lambda w, c=cls: c(), TypeError, ("made by",))
        for cls in (
            rv.Context,
            rv.ProtectionDomain,
            rv.MemoryRegion,
            rv.CompletionQueue,
            rv.QueuePair,
        )
    ),
    ("make a WorkCompletion", lambda w: rv.WorkCompletion(), TypeError, ("poll",)),
    ("open a number", lambda w: rv.open(0), TypeError, ("int", "0")),
    ("open bytes", lambda w: rv.open(b"soft0"), TypeError, ("bytes", "soft0")),
)
def test_handles_are_made_by_their_parents_alone(case, world, refuse):
    refuse(case, world)


UNBORN = [
    rv.Context,
    rv.ProtectionDomain,
    rv.MemoryRegion,
    rv.CompletionQueue,
    rv.QueuePair,
    rv.WorkCompletion,
]


@pytest.mark.parametrize("cls", UNBORN, ids=lambda cls: cls.__name__)
def test_an_object_that_nobody_made_is_used_without_a_crash(cls):
    unborn = cls.__new__(cls)
    for name in dir(cls):
        if name.startswith("__") and name not in ("__enter__", "__len__", "__repr__"):
            continue
        try:
            member = getattr(unborn, name)
            if callable(member):
                member()
        except (ValueError, TypeError, AttributeError, OSError):
            pass
    assert unborn is not None


@pytest.mark.soft_only(reason="sets a limit")
@pytest.mark.parametrize(
    "register",
    [
        lambda pd, fresh: pd.reg_mr(fresh),
        lambda pd, fresh: pd.reg_mr_address(2**40, len(fresh)),
    ],
    ids=["buffer", "address"],
)
def test_a_size_over_max_mr_size_is_refused_before_the_verb(
    register, pd, counters, device_name
):
    fresh = bytearray(PAGE + 1)
    rv.softverbs.configure(max_mr_size=PAGE)
    counters.restart()
    with pytest.raises(
        ValueError, match=rf"{PAGE + 1} bytes .*max_mr_size {PAGE} of {device_name}"
    ):
        register(pd, fresh)
    assert counters() == {}
    assert_released(fresh)
    with pd.reg_mr(bytearray(PAGE)) as mr:
        assert mr.length == PAGE


@pytest.mark.soft_only(reason="sets a limit")
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_transfer_over_max_msg_sz_is_refused_before_the_verb(
    operation, pd, cq, counters
):
    rv.softverbs.configure(max_msg_sz=4096)
    memory = bytearray(8192)
    with (
        pd.create_qp(cq) as qp,
        pd.create_qp(cq) as peer,
        pd.reg_mr(memory, PEER) as mr,
    ):
        qp.connect(peer.info)
        peer.connect(qp.info)
        counters.restart()
        with pytest.raises(ValueError, match="4097 bytes .*max_msg_sz 4096 of port 1"):
            getattr(qp, operation)(mr[:4097], mr[:4097].remote())
        assert counters() == {}
        qp.write(mr[:4096], mr[4096:].remote())


@pytest.mark.parametrize("index", [-1, 999, 2**64], ids=str)
def test_a_gid_index_that_is_not_in_the_table_is_refused(index, pd, cq):
    with pytest.raises(ValueError, match=re.escape(f"index {index}: GID ")):
        pd.create_qp(cq, gid_index=index)


@pytest.mark.parametrize("index", [1.0, True, "1"], ids=repr)
def test_a_gid_index_is_an_int(index, pd, cq):
    with pytest.raises(TypeError, match=f"gid_index .*{index!r}"):
        pd.create_qp(cq, gid_index=index)


def test_a_completion_queue_of_another_context_is_refused(pd, device_name):
    with rv.open(device_name) as other, other.create_cq(8) as cq:
        with pytest.raises(ValueError, match="another context"):
            pd.create_qp(cq)


@pytest.mark.parametrize("access", [0, PEER], ids=["read", "write"])
def test_a_raw_address_that_is_not_mapped_is_an_error_and_no_signal(pd, access):
    with mapping(PAGE) as address:
        pass
    with pytest.raises(rv.VerbsError) as refusal:
        pd.reg_mr_address(address, PAGE, access)
    assert refusal.value.errno == errno.EFAULT
    for value in (hex(address), f"{PAGE} bytes", f"nothing is mapped at {address:#x}"):
        assert value in str(refusal.value)


def mapping_line(address):
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = line.split()[0].split("-")
        if int(first, 16) <= address < int(last, 16):
            return " ".join(line.split())
    return None


def test_the_mapping_line_of_a_range_with_a_hole_is_told(pd):
    with mapping(3 * PAGE) as address:
        hole = address + PAGE
        unmap(hole, PAGE)
        with pytest.raises(rv.VerbsError) as refusal:
            pd.reg_mr_address(address, 3 * PAGE)
        assert refusal.value.errno == errno.EFAULT
        for value in (
            hex(address),
            f"{3 * PAGE} bytes",
            mapping_line(address),
            f"nothing is mapped at {hole:#x}",
        ):
            assert value in str(refusal.value)


class Closing:
    """An argument whose own code closes what it is an argument of."""

    def __init__(self, handle):
        self.handle = handle

    def __index__(self):
        self.handle.close()
        return 1


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx, pd, cq: pd.reg_mr_address(Closing(pd), 64),
        lambda ctx, pd, cq: pd.reg_mr_address(4096, Closing(pd)),
        lambda ctx, pd, cq: pd.reg_mr(bytearray(64), iova=Closing(pd)),
        lambda ctx, pd, cq: pd.create_qp(cq, max_send_wr=Closing(pd)),
        lambda ctx, pd, cq: pd.create_qp(cq, max_send_wr=Closing(cq)),
        lambda ctx, pd, cq: pd.create_qp(cq, gid_index=Closing(cq)),
        lambda ctx, pd, cq: cq.poll(Closing(cq)),
        lambda ctx, pd, cq: cq.wait(0, Closing(cq)),
    ],
    ids=[
        "addr",
        "length",
        "iova",
        "max_send_wr closes the pd",
        "max_send_wr closes the cq",
        "gid_index",
        "poll",
        "wait",
    ],
)
def test_an_argument_that_closes_the_handle_does_not_reach_the_device(call, ctx):
    pd = ctx.alloc_pd()
    cq = ctx.create_cq(8)
    # iova 1 does not fit a bytearray's address, which is no matter here.
    with pytest.raises(ValueError):
        call(ctx, pd, cq)
    cq.close()
    pd.close()


@pytest.mark.parametrize(
    "call",
    [
        lambda ctx: ctx.create_cq(Closing(ctx)),
        lambda ctx: ctx.port(Closing(ctx)),
        lambda ctx: ctx.gids(Closing(ctx)),
    ],
    ids=["create_cq", "port", "gids"],
)
def test_an_argument_that_closes_the_context_does_not_reach_the_device(
    call, device_name
):
    ctx = rv.open(device_name)
    with pytest.raises(ValueError, match="closed"):
        call(ctx)
    assert ctx.closed
