"""Memory of other devices, by dma-buf; a memfd is one to the built-in device."""

import errno
import mmap
import os

import numpy as np
import pytest
from helpers import Tensor, address_of, open_files

import rdmaview as rv

PAGE = mmap.PAGESIZE
RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ
# Where an allocation is on a device that is not there.
BASE = 0x7F0000000000

soft_only = pytest.mark.soft_only("takes a memfd for a dma-buf")


@pytest.fixture
def allocation():
    """A file descriptor, and its bytes."""
    fd = os.memfd_create("rdmaview")
    os.ftruncate(fd, 4 * PAGE)
    yield fd, np.frombuffer(mmap.mmap(fd, 4 * PAGE), "u1")
    os.close(fd)


@soft_only
def test_a_part_of_an_allocation_has_its_own_bytes(pd, pair, allocation):
    fd, memory = allocation
    host = np.arange(768, dtype="u1")
    with (
        pd.reg_dmabuf_mr(fd, 0x1200, 768, RIGHTS, iova=BASE + 0x1200) as mr,
        pd.reg_mr(host, RIGHTS) as here,
    ):
        assert (len(mr), mr.iova, mr.access) == (768, BASE + 0x1200, RIGHTS)
        pair.a.write(here[:], mr[:].remote())
        assert (memory[0x1200 : 0x1200 + 768] == host).all()
        assert not memory[:0x1200].any()
        assert not memory[0x1200 + 768 :].any()
        memory[0x1300] = 77
        pair.a.read(here[:1], mr[0x100:0x101].remote())
        assert host[0] == 77
        pair.a.write(mr[10:20], here[100:110].remote())
        assert (host[100:110] == memory[0x1200 + 10 : 0x1200 + 20]).all()


@soft_only
def test_it_is_reached_by_the_iova_that_was_chosen(pd, pair, allocation):
    fd, memory = allocation
    with pd.reg_dmabuf_mr(fd, PAGE + 8, 100, RIGHTS, iova=8) as mr:
        view = mr[10:20]
        assert view.rdma_addr == 18
        memory[PAGE + 18] = 5
        with pd.reg_mr(bytearray(10)) as here:
            pair.a.read(here[:], view.remote())
            assert here[:1].array()[0] == 5


@soft_only
def test_it_outlives_its_descriptor_and_leaks_none(pd, allocation):
    _, memory = allocation
    before = open_files()
    for _ in range(1000):
        fd = os.memfd_create("rdmaview")
        os.ftruncate(fd, PAGE)
        mr = pd.reg_dmabuf_mr(fd, 0, PAGE, RIGHTS, iova=BASE)
        os.close(fd)
        mr.close()
    assert open_files() == before
    del memory


@soft_only
def test_its_views_give_no_bytes(pd, allocation):
    fd, _ = allocation
    with pd.reg_dmabuf_mr(fd, 0, PAGE, RIGHTS, iova=BASE) as mr:
        for call in (
            lambda: mr[:].array(),
            lambda: memoryview(mr[:8]),
            mr.view().array,
        ):
            with pytest.raises(BufferError, match="device memory"):
                call()
        with pytest.raises(BufferError, match="device memory"):
            pd.reg_mr(mr[:])


@soft_only
@pytest.mark.parametrize(
    ("offset", "size", "iova"),
    [(0, 4 * PAGE + 1, BASE), (4 * PAGE, 1, BASE), (2**63, 1, BASE)],
)
def test_a_part_outside_the_allocation_is_refused(pd, allocation, offset, size, iova):
    fd, _ = allocation
    with pytest.raises(rv.VerbsError, match="inside it"):
        pd.reg_dmabuf_mr(fd, offset, size, RIGHTS, iova=iova)
    assert pd.context.mr_count == 0


@soft_only
def test_a_descriptor_of_something_else_is_refused(pd):
    read, write = os.pipe()
    with pytest.raises(rv.VerbsError, match="one of a dma-buf"):
        pd.reg_dmabuf_mr(read, 0, 8, RIGHTS, iova=BASE)
    os.close(read)
    os.close(write)
    with pytest.raises(rv.VerbsError, match="not open"):
        pd.reg_dmabuf_mr(read, 0, 8, RIGHTS, iova=BASE)


@pytest.mark.parametrize(
    ("values", "error", "text"),
    [
        ({"length": 0}, ValueError, "zero bytes"),
        ({"length": -1}, ValueError, "-1"),
        ({"offset": 2**64}, ValueError, "from 0 to"),
        ({"offset": 1.5}, TypeError, "offset"),
        ({"iova": BASE + 1}, ValueError, "same offset in a page"),
        ({"iova": -1}, ValueError, "iova"),
        ({"iova": None}, TypeError, "iova"),
        ({"iova": 2**64 - PAGE}, ValueError, "passes 2\\*\\*64"),
        ({"fd": None}, TypeError, "NoneType"),
        ({"access": rv.Access.REMOTE_WRITE}, ValueError, "LOCAL_WRITE"),
        ({"access": None}, TypeError, "access"),
    ],
)
def test_bad_values_are_refused(pd, allocation, values, error, text):
    fd, _ = allocation
    good = {"fd": fd, "offset": 0, "length": 2 * PAGE, "access": RIGHTS, "iova": BASE}
    arguments = good | values
    iova = arguments.pop("iova")
    with pytest.raises(error, match=text):
        pd.reg_dmabuf_mr(*arguments.values(), iova=iova)
    assert pd.context.mr_count == 0


def test_a_device_that_takes_none_says_so(pd, allocation, is_soft, device_name):
    fd, _ = allocation
    if is_soft:
        rv.softverbs.fail("reg_dmabuf_mr", errno.EOPNOTSUPP)
    with pytest.raises(rv.VerbsError, match=f"{device_name} .* takes no dma-bufs"):
        pd.reg_dmabuf_mr(fd, 0, PAGE, RIGHTS, iova=BASE)
    assert pd.context.mr_count == 0


class CudaArray:
    """What arrays of CUDA show of themselves; the bytes are the processor's here."""

    def __init__(self, items):
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": items.shape,
            "typestr": items.dtype.str,
            "data": (items.__array_interface__["data"][0], False),
            "strides": None if items.flags.c_contiguous else items.strides,
        }


DEVICE_ARRAYS = {
    "__cuda_array_interface__": CudaArray,
    "tensor": lambda items: Tensor(items, "cuda:0"),
}
each_kind = pytest.mark.parametrize("make", DEVICE_ARRAYS.values(), ids=DEVICE_ARRAYS)


class TestAnAddressOfDeviceMemory:
    """Stood for by host memory, which a device reads at its address as well."""

    @pytest.fixture
    def memory(self):
        return np.arange(2 * PAGE, dtype="u2").reshape(-1, 64)

    @pytest.fixture
    def mr(self, pd, memory):
        with pd.reg_mr_address(
            address_of(memory), memory.nbytes, RIGHTS, owner=memory, is_device=True
        ) as mr:
            yield mr

    @pytest.fixture
    def table(self, pd, memory):
        with rv.SegmentTable(pd, RIGHTS) as table:
            table.sync([(address_of(memory), memory.nbytes, "cuda:0")])
            yield table

    def test_gives_no_array(self, mr, table, memory):
        for view in (mr[:8], table.view_at(address_of(memory), 8)):
            with pytest.raises(BufferError, match="device memory"):
                view.array()

    def test_is_moved_by_the_device(self, pd, pair, mr, memory):
        with pd.reg_mr(bytearray(128), RIGHTS) as here:
            pair.a.read(here[:], mr[128:256].remote())
            assert (here[:].array("u2") == memory[1]).all()

    @each_kind
    def test_is_found_by_its_arrays(self, mr, table, memory, make):
        for found in (mr, table):
            part = memory[2:4]
            view = found.view_of(make(part))
            assert (view.virtual_addr, view.size) == (address_of(part), part.nbytes)
            assert list(found.views_of([make(part)])) == [view]
            assert list(found.runs_of(make(part))) == [view]
            first = found.runs_of(make(memory[:3, :8]))
            assert [v.size for v in first] == [16, 16, 16]
            assert first[2].virtual_addr == address_of(memory) + 2 * 128
            with pytest.raises(
                BufferError, match=r"shape \(3, 8\), strides \(128, 2\)"
            ):
                found.view_of(make(memory[:3, :8]))
        assert list(table.view_of(make(part), split=True)) == [view]

    @each_kind
    def test_is_found_among_host_memory(self, table, memory, make):
        host = np.zeros(256, "u1")
        table.register(host[:128])
        table.register(host[128:])
        parts = [host[8:16], make(memory[:2]), host[128:], make(memory[3:4])]
        views = table.views_of(parts)
        assert list(views) == [table.view_of(part) for part in parts]
        assert table.views_of(parts, split=True) == views
        with pytest.raises(rv.NotRegisteredError, match="array 4.*straddle"):
            table.views_of([*parts, host])
        assert len(table.views_of([*parts, host], split=True)) == 6
        with pytest.raises(rv.NotRegisteredError, match="host memory"):
            table.views_of([*parts, make(host[:8])])

    def test_is_not_taken_for_host_memory(self, mr, table, memory):
        for call in (
            mr.view_of,
            mr.runs_of,
            lambda array: mr.views_of([array]),
        ):
            with pytest.raises(TypeError, match="of host memory"):
                call(memory)
        for split in (False, True):
            for call in (table.view_of, table.runs_of):
                with pytest.raises(rv.NotRegisteredError, match="a device's memory"):
                    call(memory, split=split)
            with pytest.raises(rv.NotRegisteredError, match="a device's memory"):
                table.views_of([memory], split=split)

    @each_kind
    def test_nor_host_memory_for_it(self, pd, memory, make):
        with pd.reg_mr(memory) as mr, pytest.raises(TypeError, match="device memory"):
            mr.view_of(make(memory))
        with rv.SegmentTable(pd) as table:
            table.register(memory)
            with pytest.raises(rv.NotRegisteredError, match="host memory"):
                table.view_of(make(memory))
        with rv.RegistrationCache(pd) as cache:
            with pytest.raises(TypeError, match="device memory"):
                cache.view_of(make(memory))

    @pytest.mark.parametrize(
        ("shape", "strides"),
        [
            ((-1,), None),
            ((2**32, 2**32), None),
            ((2,), (2**63,)),
            ((3,), (2**62,)),
            ((8,), (2, 2)),
            ((1,) * 65, None),
        ],
    )
    def test_of_a_shape_that_no_array_has_is_refused(self, mr, memory, shape, strides):
        array = CudaArray(memory)
        array.__cuda_array_interface__ |= {"shape": shape, "strides": strides}
        for call in (mr.view_of, mr.runs_of):
            with pytest.raises(ValueError, match="shape"):
                call(array)

    def test_that_no_driver_serves_says_what_to_do(self, pd):
        with pytest.raises(
            rv.VerbsError, match=r"nvidia-peermem.*expandable.*BAR.*reg_dmabuf_mr"
        ):
            pd.reg_mr_address(BASE, PAGE, is_device=True)
        assert pd.context.mr_count == 0


ON_DEMAND = rv.Access.LOCAL_WRITE | rv.Access.ON_DEMAND


def test_paging_on_demand_is_asked_for_first(pd, is_soft):
    try:
        with pd.reg_mr(bytearray(PAGE), ON_DEMAND) as mr:
            assert not is_soft
            assert rv.Access.ON_DEMAND in mr.access
    except rv.VerbsError as refusal:
        assert "lacks IBV_ODP_SUPPORT" in str(refusal)
        assert "without ON_DEMAND" in str(refusal)
    assert pd.context.mr_count == 0


@pytest.mark.soft_only("its capabilities can be set")
def test_paging_on_demand_needs_the_capability_of_each_right():
    support, read = 1, 8
    rv.softverbs.configure(odp_general_caps=support, odp_rc_caps=read)
    with rv.open("soft0") as ctx, ctx.alloc_pd() as pd:
        rights = ON_DEMAND | rv.Access.REMOTE_READ
        with pd.reg_mr(bytearray(PAGE), rights) as mr:
            assert mr.access == rights
        with pytest.raises(rv.VerbsError, match="lacks IBV_ODP_SUPPORT_WRITE for RC"):
            pd.reg_mr(bytearray(PAGE), rights | rv.Access.REMOTE_WRITE)
        assert ctx.mr_count == 0
