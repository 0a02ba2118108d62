"""Where the bytes of an array lie: views of it, of many, and of its pieces."""

import ctypes
import gc
import mmap
import sys
import weakref
from array import array as items_of
from multiprocessing import shared_memory

import numpy as np
import pytest
from helpers import Tensor
from hypothesis import given
from hypothesis import strategies as st

import rdmaview as rv

SIZE = 1 << 16


@pytest.fixture
def memory():
    return np.arange(SIZE // 4, dtype="u4")


@pytest.fixture
def mr(pd, memory):
    with pd.reg_mr(memory) as mr:
        yield mr


@pytest.fixture
def arrow():
    # Its import takes long in an emulated machine.
    import pyarrow

    return pyarrow


def bytes_of(views):
    return b"".join(view.array().tobytes() for view in views)


class Interface:
    def __init__(self, items):
        self.__array_interface__ = items.__array_interface__
        self.items = items


class DLPack:
    def __init__(self, items, kind=1):
        self.items = items
        self.kind = kind

    def __dlpack__(self, **options):
        return self.items.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.kind, 0


KINDS = {
    "ndarray": lambda items: items,
    "subclass": lambda items: items.view(np.matrix),
    "memoryview": memoryview,
    "tensor": Tensor,
    "__array_interface__": Interface,
    "__dlpack__": DLPack,
}
each_kind = pytest.mark.parametrize("kind", KINDS)


class TestAnArrayOfTheRegion:
    @each_kind
    def test_has_the_view_of_its_own_bytes_not_of_its_base(self, mr, memory, kind):
        assert mr.view_of(KINDS[kind](memory[250:500])) == mr[1000:2000]

    @each_kind
    def test_is_the_sender_of_its_own_bytes(self, pd, pair, mr, memory, kind):
        got = np.zeros(250, dtype="u4")
        rights = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
        with pd.reg_mr(got, rights) as there:
            pair.a.write(mr.view_of(KINDS[kind](memory[250:500])), there[:].remote())
        assert (got == memory[250:500]).all()

    def test_of_one_byte_at_the_end_has_a_view(self, mr, memory):
        last = memory.view("u1")[-1:]
        assert mr.view_of(last) == mr[SIZE - 1 :]
        assert list(mr.runs_of(last)) == [mr[SIZE - 1 :]]

    def test_may_have_one_number_and_no_dimension(self, mr, memory):
        assert mr.view_of(memory[7:8].reshape(())) == mr[28:32]
        assert list(mr.runs_of(memory[7:8].reshape(()))) == [mr[28:32]]

    @pytest.mark.parametrize(
        "dtype", ["<M8[s]", "V8", "f8", [("a", "u4"), ("b", "u4")]]
    )
    def test_may_have_any_dtype_without_references(self, mr, memory, dtype):
        items = memory.view(dtype)[4:6]
        assert mr.view_of(items) == mr[32:48]
        assert list(mr.runs_of(items)) == [mr[32:48]]

    def test_in_fortran_order_has_one_view(self, mr, memory):
        items = memory[:12].reshape(3, 4).T
        assert items.flags.f_contiguous
        assert mr.view_of(items) == mr[:48]

    def test_in_pieces_is_refused_with_a_word_on_runs_of(self, mr, memory):
        with pytest.raises(BufferError, match=r"not contiguous: .*\(128,\).*runs_of"):
            mr.view_of(memory[:256:2])

    def test_without_bytes_has_an_empty_view(self, mr, memory):
        assert len(mr.view_of(memory[3:3])) == 0


class TestManyArrays:
    def test_have_a_view_each_in_their_order(self, mr, memory):
        parts = [memory[at : at + 1 + at % 9] for at in range(0, 5000, 7)]
        parts.reverse()
        views = mr.views_of(parts)
        assert list(views) == [mr.view_of(part) for part in parts]

    def test_may_be_of_many_kinds(self, mr, memory):
        views = mr.views_of(make(memory[:9]) for make in KINDS.values())
        assert list(views) == [mr[:36]] * len(KINDS)

    def test_may_be_none(self, mr):
        assert len(mr.views_of([])) == 0

    def test_are_refused_by_the_one_that_is_outside(self, mr, memory):
        stray = np.zeros(8, "u1")
        address = stray.__array_interface__["data"][0]
        with pytest.raises(ValueError, match=f"array 2, of 8 bytes at {address:#x}"):
            mr.views_of([memory[:1], memory[1:2], stray, memory[2:3]])

    def test_are_refused_by_the_one_that_is_no_array(self, mr, memory):
        with pytest.raises(TypeError, match="a str has no buffer"):
            mr.views_of([memory[:1], "text"])

    def test_of_a_closed_region_are_refused(self, mr, memory):
        mr.close()
        for call in (mr.views_of, lambda arrays: mr.runs_of(arrays[0])):
            with pytest.raises(rv.StaleViewError):
                call([memory[:1]])

    def test_may_close_the_region_while_they_are_asked(self, mr, memory):
        class Closer:
            @property
            def __array_interface__(self):
                mr.close()
                return memory.__array_interface__

        views = mr.views_of([memory[:1], Closer()])
        with pytest.raises(rv.StaleViewError):
            views[0].array()


slices = st.builds(
    slice,
    st.none() | st.integers(-6, 6),
    st.none() | st.integers(-6, 6),
    st.sampled_from([None, 1, 2, 3, -1, -2]),
)


@st.composite
def pieces(draw, memory):
    """An array of bytes of the memory, with any strides."""
    shape = draw(st.lists(st.integers(1, 6), min_size=0, max_size=4))
    count = int(np.prod(shape, dtype=int))
    start = draw(st.integers(0, memory.size - count))
    items = memory[start : start + count].reshape(shape)
    items = items.transpose(draw(st.permutations(range(items.ndim))))
    items = items[(*[draw(slices) for _ in range(items.ndim)], ...)]
    if draw(st.booleans()):
        items = np.broadcast_to(items, (draw(st.integers(1, 3)), *items.shape))
    return items


class TestRuns:
    @given(data=st.data())
    def test_in_a_row_are_the_bytes_of_the_array(self, device_name, data):
        with rv.open(device_name) as ctx, ctx.alloc_pd() as pd:
            memory = np.arange(4096, dtype="u2")
            with pd.reg_mr(memory) as mr:
                items = data.draw(pieces(memory))
                views = mr.runs_of(items)
                assert bytes_of(views) == items.tobytes()
                starts = np.asarray(views)["virtual_addr"]
                ends = starts + np.asarray(views)["size"]
                assert (ends[:-1] != starts[1:]).all()
                same = mr.runs_of(Tensor(items))
                assert same == views

    def test_of_rows_cut_out_of_a_matrix_are_the_rows(self, mr, memory):
        matrix = memory.reshape(128, 128)
        assert list(mr.runs_of(matrix[3:6, 10:20])) == [
            mr.view((row * 128 + 10) * 4, 40) for row in (3, 4, 5)
        ]

    def test_that_touch_are_one(self, mr, memory):
        matrix = memory.reshape(128, 128)
        assert list(mr.runs_of(matrix[3:6])) == [mr[3 * 512 : 6 * 512]]
        assert len(mr.runs_of(matrix.T)) == matrix.size

    def test_of_a_reversed_array_are_its_items(self, mr, memory):
        assert list(mr.runs_of(memory[3::-1])) == [
            mr[at : at + 4] for at in (12, 8, 4, 0)
        ]

    def test_of_a_broadcast_array_come_again(self, mr, memory):
        wide = np.broadcast_to(memory[5:6], (3,))
        assert list(mr.runs_of(wide)) == [mr[20:24]] * 3

    def test_of_an_empty_array_are_none(self, mr, memory):
        for items in (memory[:0], memory[:12].reshape(3, 4)[:, 4:], memory[5:2:2]):
            assert len(mr.runs_of(items)) == 0

    def test_of_bytes_of_any_exporter_are_its_bytes(self, pd):
        for buffer in (
            bytearray(100),
            items_of("d", [1.0] * 10),
            mmap.mmap(-1, 4096),
            (ctypes.c_int * 9)(),
        ):
            with pd.reg_mr(buffer) as mr:
                assert list(mr.runs_of(buffer)) == [mr[:]]
                assert list(mr.runs_of(memoryview(buffer)[::2])) != [mr[:]]

    def test_are_refused_if_any_is_outside(self, pd):
        memory = np.zeros((64, 64), "u1")
        with pd.reg_mr(memory[8:56]) as mr:
            assert len(mr.runs_of(memory[8:56, ::2])) == 48 * 32
            for part in (memory[7:9, ::2], memory[55:57, ::-1], memory[::-1, 3]):
                with pytest.raises(ValueError, match="not inside the region of 3072"):
                    mr.runs_of(part)

    def test_move_the_bytes_of_the_array(self, pd, pair, mr, memory):
        runs = mr.runs_of(memory.reshape(128, 128)[3:6, 10:20])
        got = np.zeros((3, 10), dtype="u4")
        rights = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE
        with pd.reg_mr(got, rights) as there:
            pair.a.writes(runs, there[:].split(40).remote())
        assert (got == memory.reshape(128, 128)[3:6, 10:20]).all()

    def test_are_not_those_of_references(self, mr):
        with pytest.raises(TypeError, match="references to Python objects"):
            mr.runs_of(np.array([None, 1]))

    @pytest.mark.parametrize("count", [2**58, 2**60, 2**61, 2**62])
    def test_of_an_array_that_repeats_beyond_any_memory_are_refused(
        self, mr, memory, count
    ):
        with pytest.raises(MemoryError, match=f"no memory for {count} views"):
            mr.runs_of(np.broadcast_to(memory.view("u1")[:1], (count,)))


class TestATensor:
    def test_is_registered_by_its_own_bytes(self, pd):
        items = np.arange(1000, dtype="u2")
        tensor = Tensor(items[100:200])
        with pd.reg_mr(tensor) as mr:
            assert len(mr) == 200
            assert mr.addr == tensor.data_ptr()
            assert mr[:].array().tobytes() == items[100:200].tobytes()

    def test_is_kept_alive_by_a_view(self, pd):
        tensor = Tensor(np.arange(1000, dtype="u2"))
        dead = weakref.ref(tensor)
        mr = pd.reg_mr(tensor)
        view = mr[10:20]
        del tensor, mr
        gc.collect()
        assert dead() is not None
        assert view.array().tobytes() == np.arange(5, 10, dtype="u2").tobytes()
        del view
        gc.collect()
        assert dead() is None

    def test_that_is_not_contiguous_is_refused(self, pd):
        tensor = Tensor(np.zeros((8, 8), "f4")[:, ::2])
        with pytest.raises(BufferError, match=r"shape \(8, 4\), strides \(32, 8\)"):
            pd.reg_mr(tensor)

    @pytest.mark.parametrize(
        "make",
        [
            lambda items: Tensor(items, "cuda:1"),
            lambda items: Tensor(items, "xpu:0"),
            lambda items: DLPack(items, kind=2),
        ],
        ids=["cuda", "xpu", "dlpack"],
    )
    def test_of_a_device_is_refused_where_host_memory_is_meant(self, pd, mr, make):
        tensor = make(np.zeros(64, "u1"))
        for call in (pd.reg_mr, mr.view_of, mr.runs_of, lambda x: mr.views_of([x])):
            with pytest.raises(TypeError, match=r"device memory.*reg_dmabuf_mr"):
                call(tensor)


class TestABufferOfOtherKinds:
    @pytest.mark.parametrize("make", [Interface, DLPack])
    def test_is_registered_and_held(self, pd, make):
        items = np.arange(64, dtype="u1")
        with pd.reg_mr(make(items)) as mr:
            assert mr.view_of(items) == mr[:]
            kept = sys.getrefcount(items)
        del mr
        gc.collect()
        assert sys.getrefcount(items) < kept

    def test_that_is_read_only_gets_no_right_to_write(self, pd):
        items = np.arange(64, dtype="u1")
        items.flags.writeable = False
        with pd.reg_mr(Interface(items)) as mr:
            assert mr.access == 0
        with pytest.raises(BufferError, match="Interface is read-only"):
            pd.reg_mr(Interface(items), rv.Access.LOCAL_WRITE)

    def test_may_be_shared_memory(self, pd):
        shared = shared_memory.SharedMemory(create=True, size=4096)
        try:
            with pd.reg_mr(shared.buf) as mr:
                items = np.frombuffer(shared.buf, "f8")[8:16]
                assert mr.view_of(items) == mr[64:128]
                del items
            del mr
        finally:
            shared.close()
            shared.unlink()

    def test_may_be_arrows(self, pd, arrow):
        column = arrow.array(range(1000), arrow.int64())
        _, values = column.buffers()
        with pd.reg_mr(values) as mr:
            assert len(mr) == values.size
            part = column[10:20].to_numpy()
            assert mr.view_of(part) == mr[80:160]
            assert mr[80:160].array("i8").tolist() == list(range(10, 20))

    def test_of_arrows_over_bytes_is_read_only(self, pd, arrow):
        with pd.reg_mr(arrow.py_buffer(b"text" * 100)) as mr:
            assert mr.access == 0
            assert bytes(mr[4:8]) == b"text"
        with pytest.raises(BufferError, match="read-only"):
            pd.reg_mr(arrow.py_buffer(b"text"), rv.Access.LOCAL_WRITE)

    def test_of_arrows_may_be_written_if_it_may_change(self, pd, arrow):
        values = arrow.allocate_buffer(4096)
        with pd.reg_mr(values) as mr:
            assert mr.access == rv.Access.LOCAL_WRITE
            mr.view().array()[:] = 7
            del mr
        assert values.to_pybytes() == b"\7" * 4096

    def test_of_arrows_lives_as_long_as_a_view(self, pd, arrow):
        before = arrow.total_allocated_bytes()
        mr = pd.reg_mr(arrow.allocate_buffer(1 << 20))
        view = mr[:8]
        del mr
        gc.collect()
        assert arrow.total_allocated_bytes() >= before + (1 << 20)
        view.array()[:] = 1
        del view
        gc.collect()
        assert arrow.total_allocated_bytes() == before

    @pytest.mark.parametrize("thing", ["text", 7, None, object(), Tensor, np.ndarray])
    def test_is_not_anything(self, pd, mr, thing):
        for call in (pd.reg_mr, mr.view_of, mr.runs_of, lambda x: mr.views_of([x])):
            with pytest.raises(TypeError, match="has no buffer to register"):
                call(thing)
