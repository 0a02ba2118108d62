"""Registration: which buffers, with which rights, at which addresses."""

import array
import ctypes
import errno
import gc
import mmap
import sys
from multiprocessing import shared_memory

import numpy as np
import pytest
from helpers import (
    MAP_NORESERVE,
    PAGE,
    address_of,
    mapping,
    run_python,
)

import rdmaview as rv
from rdmaview import Access

PEER = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ


class Point(ctypes.Structure):
    _fields_ = [("x", ctypes.c_double), ("tag", ctypes.c_char)]


WRITABLE = {
    "bytearray": lambda: bytearray(100),
    "array.array": lambda: array.array("d", range(10)),
    "ctypes array": lambda: (ctypes.c_uint16 * 10)(),
    "ctypes structure": Point,
    "ctypes array of structures": lambda: (Point * 3)(),
    "mmap": lambda: mmap.mmap(-1, 2 * PAGE),
    "memoryview": lambda: memoryview(bytearray(100)),
    "memoryview of a slice": lambda: memoryview(bytearray(100))[3:50],
    "memoryview, cast": lambda: memoryview(bytearray(96)).cast("d"),
    "memoryview in 2 dimensions": lambda: memoryview(bytearray(96)).cast("B", (8, 12)),
    "ndarray": lambda: np.zeros(10),
    "ndarray of one item": lambda: np.zeros(()),
    "ndarray of records": lambda: np.zeros(7, [("a", "u1"), ("b", "f8")]),
    "ndarray of text": lambda: np.zeros(5, "U3"),
    "ndarray of times": lambda: np.zeros(5, "M8[s]"),
    "ndarray of another byte order": lambda: np.zeros(5, ">u4"),
    "ndarray in C order": lambda: np.zeros((3, 4)),
    "ndarray in Fortran order": lambda: np.zeros((3, 4), order="F"),
    "transposed ndarray": lambda: np.zeros((3, 4)).T,
    "one row": lambda: np.zeros((4, 6))[1:2],
    "rows": lambda: np.zeros((4, 6))[1:3],
    "one item of a strided slice": lambda: np.zeros(10)[::10],
    "masked array": lambda: np.ma.zeros(4),
    "recarray": lambda: np.zeros(3, [("a", "u1")]).view(np.recarray),
}
READONLY = {
    "bytes": lambda: b"x" * 100,
    "memoryview of bytes": lambda: memoryview(b"x" * 100),
    "read-only memoryview": lambda: memoryview(bytearray(100)).toreadonly(),
    "ndarray of bytes": lambda: np.frombuffer(b"x" * 100, "u1"),
    "read-only ndarray": lambda: np.broadcast_to(np.zeros(100), (100,)),
    "NumPy scalar": lambda: np.float64(3.5),
}


def raw(buffer):
    """Give a memoryview, also of items that a memoryview has no letter for."""
    return memoryview(buffer.view("u1") if is_array_of_times(buffer) else buffer)


def is_array_of_times(buffer):
    return isinstance(buffer, np.ndarray) and buffer.dtype.kind == "M"


@pytest.mark.parametrize("kind", WRITABLE)
def test_a_writable_buffer_is_registered_whole_and_writable_here_alone(kind, pd):
    buffer = WRITABLE[kind]()
    with pd.reg_mr(buffer) as mr:
        assert mr.length == raw(buffer).nbytes == len(mr) == mr[:].size
        assert mr.access == Access.LOCAL_WRITE
        assert mr.rkey == 0
        assert mr.view_of(buffer) == mr[:]
        assert not memoryview(mr[:]).readonly
        mr[:].array()[:] = 0x2A
        assert raw(buffer).tobytes("A") == b"\x2a" * mr.length


@pytest.mark.parametrize("kind", READONLY)
def test_a_read_only_buffer_is_registered_without_a_right(kind, pd):
    buffer = READONLY[kind]()
    with pd.reg_mr(buffer) as mr:
        assert mr.length == raw(buffer).nbytes
        assert mr.access == 0
        assert memoryview(mr[:]).readonly
        assert not mr[:].array().flags.writeable
        assert memoryview(mr[:]).tobytes() == memoryview(buffer).tobytes()


def test_shared_memory_is_registered_and_closed_after(pd):
    memory = shared_memory.SharedMemory(create=True, size=PAGE)
    try:
        with pd.reg_mr(memory.buf, PEER) as mr:
            mr[:4].array()[:] = 7
            with pytest.raises(BufferError):
                memory.close()
        gc.collect()
        assert bytes(memory.buf[:5]) == b"\7\7\7\7\0"
    finally:
        gc.collect()
        memory.close()
        memory.unlink()


def test_a_view_of_a_region_can_be_registered_again(pd):
    with pd.reg_mr(bytearray(2 * PAGE)) as outer:
        with pd.reg_mr(outer[PAGE : PAGE + 64], PEER) as inner:
            assert (inner.addr, inner.length) == (outer.addr + PAGE, 64)
            assert inner.id != outer.id


def test_overlapping_ranges_are_regions_of_their_own(pd):
    buffer = np.zeros(2 * PAGE, "u1")
    with (
        pd.reg_mr(buffer) as whole,
        pd.reg_mr(buffer) as again,
        pd.reg_mr(buffer[:PAGE]) as nested,
        pd.reg_mr(buffer[PAGE // 2 : -PAGE // 2]) as partly,
    ):
        regions = whole, again, nested, partly
        assert len({mr.id for mr in regions}) == 4
        assert len({mr.lkey for mr in regions}) == 4
        assert whole[:] != again[:]


class ArrayWithAnAttribute(np.ndarray):
    pass


def test_a_subclass_of_an_array_is_registered(pd):
    with pd.reg_mr(np.zeros(8).view(ArrayWithAnAttribute)) as mr:
        assert mr.length == 64


def test_sizes_are_bytes_and_not_items(pd):
    items = np.zeros(10)
    assert len(memoryview(items)) == 10
    with pd.reg_mr(memoryview(items)) as mr:
        assert mr.length == 80
        assert mr.view_of(items[2:]) == mr[16:]


def test_views_of_arrays_start_where_the_arrays_do(pd):
    base = np.zeros(1000, "f4")
    with pd.reg_mr(base) as mr:
        part = mr.view_of(base[250:500])
        assert (part.virtual_addr, part.size) == (mr.addr + 1000, 1000)
        assert mr.view_of(base[250:500].view("f8")) == part
        assert mr.view_of(base[::1][3:]) == mr[12:]
        assert mr.view_of(base) == mr[:]
        assert mr.view_of(base[999:]) == mr[3996:]


def test_a_region_of_a_part_starts_where_the_part_does(pd):
    base = np.arange(1000, dtype="f4")
    with pd.reg_mr(base[250:500]) as mr:
        assert mr.addr == base.ctypes.data + 1000
        assert mr.length == 1000
        assert mr[:4].array("f4")[0] == 250


@pytest.mark.parametrize("access", [None, Access.LOCAL_WRITE])
def test_no_peer_has_a_right_unless_it_was_asked_for(access, pd):
    with pd.reg_mr(bytearray(64), access) as mr:
        assert mr.access == Access.LOCAL_WRITE
        assert mr.rkey == mr[:].rkey == 0
        with pytest.raises(ValueError, match="REMOTE_READ"):
            mr[:8].remote()


@pytest.mark.soft_only(reason="rxe's keys are equal")
def test_the_two_keys_of_a_region_are_not_mixed_up(pd):
    with pd.reg_mr(bytearray(64), PEER) as mr:
        assert mr.lkey != mr.rkey != 0
        assert (mr[:].lkey, mr[:].rkey) == (mr.lkey, mr.rkey)
        assert mr[:].remote().rkey == mr.rkey


RIGHTS = {
    "none": Access(0),
    "LOCAL_WRITE": Access.LOCAL_WRITE,
    "REMOTE_READ": Access.REMOTE_READ,
    "REMOTE_READ|LOCAL_WRITE": Access.REMOTE_READ | Access.LOCAL_WRITE,
    "REMOTE_WRITE|LOCAL_WRITE": Access.REMOTE_WRITE | Access.LOCAL_WRITE,
    "REMOTE_ATOMIC|LOCAL_WRITE": Access.REMOTE_ATOMIC | Access.LOCAL_WRITE,
    "RELAXED_ORDERING|LOCAL_WRITE": Access.RELAXED_ORDERING | Access.LOCAL_WRITE,
    "ZERO_BASED|LOCAL_WRITE": Access.ZERO_BASED | Access.LOCAL_WRITE,
}


@pytest.mark.parametrize("name", RIGHTS)
def test_rights_that_were_asked_for_are_had(name, pd):
    with mapping(PAGE) as address:
        with pd.reg_mr_address(address, PAGE, RIGHTS[name]) as mr:
            assert mr.access == RIGHTS[name]
            assert isinstance(mr.access, Access)
            assert (mr.rkey != 0) == ("REMOTE" in name)
            assert memoryview(mr[:]).readonly == ("LOCAL_WRITE" not in name)


def test_rights_are_the_numbers_of_the_header():
    assert [right.value for right in Access] == [
        *(1 << bit for bit in (0, 1, 2, 3, 4, 5, 6, 7)),
        1 << 20,
    ]


def test_relaxed_ordering_is_never_asked_for_unasked(pd):
    with pd.reg_mr(bytearray(64)) as mr, pd.reg_mr(b"x") as other:
        assert mr.access < 1 << 20
        assert other.access < 1 << 20


def test_the_rdma_address_is_the_virtual_one_unless_an_iova_is_given(pd):
    with pd.reg_mr(bytearray(64)) as mr:
        assert mr.iova == mr.addr == mr[:].rdma_addr == mr[:].virtual_addr


@pytest.mark.parametrize("iova", [0, PAGE, 1 << 40, (1 << 63) + 5 * PAGE], ids=hex)
def test_slices_move_both_addresses(iova, pd):
    with mapping(2 * PAGE) as address:
        with pd.reg_mr_address(address, 2 * PAGE, PEER, iova=iova) as mr:
            assert (mr.addr, mr.iova) == (address, iova)
            view = mr[PAGE + 3 : PAGE + 10][2:]
            assert view.virtual_addr == address + PAGE + 5
            assert view.rdma_addr == iova + PAGE + 5
            assert view.remote().rdma_addr == iova + PAGE + 5


def test_an_iova_may_end_at_the_last_address(pd):
    with mapping(2 * PAGE) as address:
        last = 2**64 - 2 * PAGE
        with pd.reg_mr_address(address, 2 * PAGE - 1, iova=last) as mr:
            assert mr[:].rdma_addr + mr[:].size == 2**64 - 1


def test_an_iova_shares_the_address_s_offset_in_its_page(pd):
    with mapping(2 * PAGE) as address:
        with pd.reg_mr_address(address + 100, 64, PEER, iova=100) as mr:
            assert mr[4:8].rdma_addr == 104
            assert mr[4:8].virtual_addr == address + 104


def test_zero_based_says_an_iova_of_zero(pd):
    with mapping(PAGE) as address:
        access = PEER | Access.ZERO_BASED
        with pd.reg_mr_address(address, PAGE, access) as mr:
            assert mr.iova == mr[:].rdma_addr == 0
            assert mr.access == access
        with pd.reg_mr_address(address, PAGE, access, iova=0) as mr:
            assert mr.iova == 0


VECTOR = """
    import sys
    import rdmaview as rv
    from helpers import MAP_NORESERVE, mapping

    device, size = sys.argv[1], int(sys.argv[2])
    with (
        mapping(size, 0x01000000, MAP_NORESERVE) as address,
        rv.open(device) as ctx,
        ctx.alloc_pd() as pd,
        pd.reg_mr_address(address, size, 1, iova=0) as mr,
    ):
        view = mr[0x01100000 - address :]
        print(hex(view.virtual_addr), hex(view.rdma_addr), view.size)
"""


def test_the_vector_of_the_origin_holds(device_name, is_soft):
    # 16 GiB, and no more than holds the vector's address where pages are pinned.
    size = 16 << 30 if is_soft else 2 << 20
    # A loader that is run as a program puts the heap, which is in the way, elsewhere.
    done = run_python(VECTOR, device_name, size, loader=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["0x1100000", "0x100000", str(size - 0x100000)]


@pytest.mark.soft_only(reason="a kernel device pins every page")
def test_sizes_over_32_bits_stay_whole(pd):
    size = 2**32 + 4096
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | MAP_NORESERVE) as memory:
        with pd.reg_mr(memory, PEER) as mr:
            assert mr.length == mr[:].size == len(mr) == size
            for end in 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 1:
                for view in mr[:end], mr.view(0, end), mr[4096:].subview(0, end - 9):
                    assert view.size in (end, end - 9)
                    assert rv.MemoryRegionView.from_bytes(view.to_bytes()) == view
                    remote = view.remote()
                    assert rv.RemoteView.from_bytes(remote.to_bytes()) == remote
                    assert remote.size == view.size
            far = mr[2**32 :]
            assert far.size == 4096
            far.array()[:] = 3
            assert memory[2**32] == memory[size - 1] == 3
            assert memory[2**32 - 1] == 0
            assert mr.view_of(far.array()[1:2]) == far[1:2]
        gc.collect()


@pytest.mark.soft_only(reason="a kernel device pins every page")
def test_bytes_beyond_32_bits_move(pair):
    size = 2**32 + 4096
    with mmap.mmap(-1, size, mmap.MAP_PRIVATE | MAP_NORESERVE) as memory:
        with pair.pd.reg_mr(memory, PEER) as mr:
            memory[:4] = b"near"
            pair.a.write(mr[:4], mr[2**32 + 7 : 2**32 + 11].remote())
            assert memory[2**32 + 7 : 2**32 + 11] == b"near"
            assert memory[7:11] == bytes(4)
            with pytest.raises(ValueError, match=f"{2**32} bytes .*max_msg_sz"):
                pair.a.post_write(mr[: 2**32], mr[4096:].remote())
        gc.collect()


class TestAFile:
    @pytest.fixture
    def path(self, tmp_path):
        path = tmp_path / "data"
        path.write_bytes(bytes(4 * PAGE))
        return path

    def test_is_written_through_a_shared_mapping_or_told_of_by_name(self, path, pair):
        array = np.memmap(path, "u1", "r+")
        try:
            mr = pair.pd.reg_mr(array, PEER)
        except rv.VerbsError as refusal:
            # Newer kernels pin no pages of most file systems for writing.
            assert refusal.errno in (errno.EFAULT, errno.EOPNOTSUPP, errno.EINVAL)
            assert str(path) in refusal.hint
            assert "/dev/shm" in refusal.hint
            return
        with mr:
            source = pair.pd.reg_mr(b"\7" * 16)
            pair.a.write(source[:], mr[PAGE : PAGE + 16].remote())
            source.close()
        array.flush()
        assert path.read_bytes()[PAGE - 1 : PAGE + 17] == b"\0" + b"\7" * 16 + b"\0"

    def test_is_read_by_a_peer_through_a_read_only_mapping(self, path, pair):
        path.write_bytes(b"content." * 512)
        array = np.memmap(path, "u1", "r")
        try:
            remote = pair.pd.reg_mr(array, Access.REMOTE_READ)
        except rv.VerbsError as refusal:
            # Older kernels ask for the right to write in each case.
            assert refusal.errno == errno.EFAULT
            assert str(path) in refusal.hint
            assert "privately" in refusal.hint
            remote = pair.pd.reg_mr(np.memmap(path, "u1", "c"), Access.REMOTE_READ)
        got = bytearray(16)
        with remote, pair.pd.reg_mr(got) as local:
            pair.a.read(local[:], remote[8:24].remote())
        assert got == b"content." * 2

    def test_stays_as_it_was_under_a_private_mapping(self, path, pair):
        array = np.memmap(path, "u1", "c")
        with pair.pd.reg_mr(array, PEER) as mr, pair.pd.reg_mr(b"\7" * 16) as source:
            pair.a.write(source[:], mr[:16].remote())
            assert (array[:16] == 7).all()
        assert path.read_bytes() == bytes(4 * PAGE)

    def test_of_dev_shm_is_written(self, pair):
        memory = shared_memory.SharedMemory(create=True, size=PAGE)
        path = f"/dev/shm/{memory.name}"
        try:
            array = np.memmap(path, "u1", "r+")
            with pair.pd.reg_mr(array, PEER) as mr, pair.pd.reg_mr(b"\7\7") as source:
                pair.a.write(source[:], mr[4:6].remote())
            assert bytes(memory.buf[3:7]) == b"\0\7\7\0"
        finally:
            memory.close()
            memory.unlink()


class TestAnAddress:
    def test_is_registered_with_what_was_said_of_it(self, pd):
        with mapping(2 * PAGE) as address:
            with pd.reg_mr_address(address + 10, 100) as mr:
                assert (mr.addr, mr.length, mr.iova) == (
                    address + 10,
                    100,
                    address + 10,
                )
                assert mr.access == Access.LOCAL_WRITE
                mr[:].array()[:] = 5
                assert ctypes.string_at(address + 9, 102) == (
                    b"\0" + b"\5" * 100 + b"\0"
                )

    def test_may_be_a_numpy_integer(self, pd):
        array = np.zeros(64, "u1")
        address = np.uint64(array.ctypes.data)
        with pd.reg_mr_address(address, np.int32(64)) as mr:
            assert mr.view_of(array) == mr[:]

    def test_that_is_mapped_read_only_gets_no_write_right(self, pd):
        with mapping(PAGE, protection=mmap.PROT_READ) as address:
            with pytest.raises(rv.VerbsError) as refusal:
                pd.reg_mr_address(address, PAGE)
            assert refusal.value.errno == errno.EFAULT
            assert hex(address)[2:] in str(refusal.value)
            assert "r--p" in str(refusal.value)

    def test_of_memory_without_write_right_gives_read_only_arrays(self, pd):
        with mapping(PAGE) as address:
            with pd.reg_mr_address(address, PAGE, Access.REMOTE_READ) as mr:
                assert not mr[:].array().flags.writeable

    def test_in_the_middle_of_an_odd_page_is_registered(self, pd):
        with mapping(2 * PAGE) as address:
            with pd.reg_mr_address(address + PAGE - 1, 2) as mr:
                assert mr[1:].virtual_addr == address + PAGE


class TestAHeldBuffer:
    def test_cannot_be_resized_until_close(self, pd):
        buffer = bytearray(64)
        with pd.reg_mr(buffer):
            for resize in (
                lambda: buffer.append(0),
                lambda: buffer.extend(b"12"),
                buffer.clear,
                lambda: buffer.__delitem__(0),
            ):
                with pytest.raises(BufferError):
                    resize()
        buffer.append(0)
        assert len(buffer) == 65

    def test_stays_where_it_is(self, pd):
        buffer = bytearray(64)
        with pd.reg_mr(buffer) as mr:
            assert mr.addr == address_of(buffer)

    def test_cannot_be_released_or_closed(self, pd):
        memory = mmap.mmap(-1, PAGE)
        with pd.reg_mr(memory):
            with pytest.raises(BufferError):
                memory.close()
        memory.close()
        view = memoryview(bytearray(8))
        with pd.reg_mr(view):
            with pytest.raises(BufferError):
                view.release()
        view.release()

    def test_is_exported_once_by_a_region_and_not_by_its_views(self, pd):
        buffer = bytearray(64)
        mr = pd.reg_mr(buffer)
        views = [mr[i : i + 8] for i in range(8)]
        mr.close()
        buffer.append(0)
        assert views[7].virtual_addr == views[0].virtual_addr + 7

    def test_has_one_reference_more(self, pd):
        buffer = np.zeros(8)
        before = sys.getrefcount(buffer)
        mr = pd.reg_mr(buffer)
        held = sys.getrefcount(buffer)
        mr.close()
        assert (held - before, sys.getrefcount(buffer) - before) == (1, 0)


def test_slices_of_a_region_cost_no_region(ctx, pd):
    with pd.reg_mr(bytearray(PAGE)) as mr:
        views = [mr[i % 64 : i % 64 + 8] for i in range(10_000)]
        assert ctx.mr_count == 1
        assert ctx.mr_bytes == PAGE
        assert len(set(views)) == 64


def test_a_context_counts_its_regions_and_their_bytes(ctx, pd):
    assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)
    with ctx.alloc_pd() as other, other.reg_mr(bytearray(10)):
        with pd.reg_mr(bytearray(100)):
            assert (ctx.mr_count, ctx.mr_bytes) == (2, 110)
        assert (ctx.mr_count, ctx.mr_bytes) == (1, 10)
    assert (ctx.mr_count, ctx.mr_bytes) == (0, 0)


def test_a_region_tells_what_it_is(pd):
    with pd.reg_mr(bytearray(64), PEER) as mr:
        for value in (
            hex(mr.id),
            hex(mr.addr),
            "length=64",
            "LOCAL_WRITE|REMOTE_WRITE|REMOTE_READ",
        ):
            assert value in repr(mr)
        assert "closed" not in repr(mr)
    assert "closed" in repr(mr)
    assert mr.pd is pd


def test_the_whole_of_a_region_is_a_view_by_several_names(pd):
    with pd.reg_mr(bytearray(64)) as mr:
        assert mr[:] == mr.view() == mr.view(0, 64) == mr.view(size=64)
        assert mr.view(60) == mr[60:] == mr.view(60, 4)
        assert mr.view(64).size == mr[64:].size == mr.view(64, 0).size == 0
        assert mr[-8:] == mr.view(56)
        assert mr[:].mr is mr


@pytest.mark.soft_only(reason="counts calls")
def test_a_region_costs_one_call_and_another_to_give_it_back(pd, counters):
    with pd.reg_mr(bytearray(64)) as mr:
        mr[:8][2:4].array()
    assert counters() == {"reg_mr": 1, "dereg_mr": 1}
