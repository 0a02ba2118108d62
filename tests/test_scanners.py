"""What finds segments for SegmentTable.sync."""

import gc
import itertools
import mmap
import os
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import address_of, mapping

import rdmaview as rv
from rdmaview.scanners import Arena, mapped_segments
from rdmaview.torch import cuda_segments

PAGE = mmap.PAGESIZE
STEP = 4 * PAGE


@pytest.fixture
def table(pd):
    with rv.SegmentTable(pd) as table:
        yield table


def memfd(size):
    fd = os.memfd_create("rdmaview-scanned")
    os.ftruncate(fd, size)
    memory = np.frombuffer(mmap.mmap(fd, size), "u1")
    return fd, memory


def is_scanned(mapped):
    return mapped.path.startswith("/memfd:rdmaview-scanned")


class TestMappings:
    def test_that_are_wanted_are_found(self, table):
        fd, memory = memfd(4 * PAGE)
        os.close(fd)
        (segment,) = mapped_segments(is_scanned)
        assert segment[:3] == (address_of(memory), 4 * PAGE, None)
        table.sync([segment])
        assert table.view_of(memory[5:8]).array().tobytes() == bytes(3)
        table.sync([])
        del memory
        gc.collect()
        assert mapped_segments(is_scanned) == []

    def test_are_given_whole(self):
        with mapping(4 * PAGE) as start:
            seen = []
            mapped_segments(seen.append)
            (around,) = [m for m in seen if m.start <= start < m.end]
            assert around.end >= start + 4 * PAGE
            assert around.permissions == "rw-p"
            assert (around.inode, around.path) == (0, "")
        assert all(a.end <= b.start for a, b in itertools.pairwise(seen))

    def test_of_one_file_that_the_kernel_split_are_one(self):
        fd, memory = memfd(4 * PAGE)
        os.close(fd)
        base = memory.base
        while not isinstance(base, mmap.mmap):
            base = base.obj if isinstance(base, memoryview) else base.base
        base.madvise(mmap.MADV_DONTFORK, PAGE, PAGE)
        lines = []
        (segment,) = mapped_segments(
            lambda m: is_scanned(m) and lines.append(m) is None
        )
        assert len(lines) == 3
        assert segment[:2] == (address_of(memory), 4 * PAGE)

    def test_of_another_file_at_the_address_are_other_memory(self, table):
        with mapping(PAGE) as start:
            pass
        found = []
        for name in ("rdmaview-scanned-1", "rdmaview-scanned-2"):
            fd = os.memfd_create(name)
            os.ftruncate(fd, PAGE)
            with mapping(PAGE, start, file=fd):
                report = table.sync(mapped_segments(is_scanned))
                found.append(table.view_at(start, PAGE))
                assert len(report.added) == 1
            os.close(fd)
        assert found[0].rkey == found[1].rkey == 0
        assert found[0].lkey != found[1].lkey
        assert table.stats["retired"] == 1


class TestAnArena:
    def test_is_one_segment_that_grows_in_place(self, table):
        arena = Arena(16 * STEP, STEP)
        assert arena.segments() == []
        first = arena.take(100)
        report = table.sync(arena.segments())
        assert (len(report.added), len(report.grown)) == (1, 0)
        old = table.view_of(first)
        second = arena.take(STEP)
        with pytest.raises(rv.NotRegisteredError):
            table.view_of(second)
        report = table.sync(arena.segments())
        assert (len(report.added), len(report.grown)) == (0, 1)
        assert table.view_of(second).size == STEP
        assert table.view_of(first).id != old.id
        assert address_of(table.view_of(first)) == address_of(first)
        assert len(table) == 1 and table.stats["bytes"] == 2 * STEP

    def test_aligns_what_it_hands_out(self):
        arena = Arena(STEP)
        for size, align in ((1, 64), (3, 64), (5, 1), (7, 4096), (0, 8), (1, 2)):
            array = arena.take(size, align)
            assert len(array) == size and not array.any()
            assert address_of(array) % align == 0 if size else True

    def test_refuses_what_does_not_fit(self):
        arena = Arena(100)
        arena.take(60, 1)
        with pytest.raises(MemoryError, match="41 bytes .* of 100: 60 are used"):
            arena.take(41, 1)
        assert len(arena.take(40, 1)) == 40
        assert arena.segments()[0][1] == 100

    @pytest.mark.parametrize(
        "call",
        [
            lambda: Arena(0),
            lambda: Arena(8, 0),
            lambda: Arena(8).take(-1),
            lambda: Arena(8).take(1, 3),
            lambda: Arena(8).take(1, 8192),
        ],
    )
    def test_refuses_bad_values(self, call):
        with pytest.raises(ValueError, match="must be"):
            call()

    def test_stays_mapped_while_it_is_registered(self, table):
        arena = Arena(STEP)
        array = arena.take(8)
        array[:] = 7
        table.sync(arena.segments())
        address = address_of(array)
        del array, arena
        gc.collect()
        assert table.view_at(address, 8).array().tolist() == [7] * 8

    def test_hands_out_each_byte_once_to_many_threads(self):
        arena = Arena(8000)
        taken = []

        def take():
            for _ in range(100):
                taken.append(arena.take(10, 1))

        threads = [threading.Thread(target=take) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len({address_of(array) for array in taken}) == 800
        with pytest.raises(MemoryError):
            arena.take(1, 1)


class FakeCuda:
    """What torch.cuda tells of its allocator."""

    def __init__(self):
        self.segments = []
        self.freed = [0, 0]
        self.used = True

    def is_initialized(self):
        return self.used

    def device_count(self):
        return len(self.freed)

    def memory_stats(self, device):
        return {"reserved_bytes.all.freed": self.freed[device]}

    def memory_snapshot(self):
        return self.segments

    def malloc(self, array, device=0):
        self.segments.append(
            {
                "device": device,
                "address": address_of(array),
                "total_size": array.nbytes,
                "allocated_size": 0,
                "stream": 0,
                "segment_type": "large",
                "is_expandable": False,
                "blocks": [],
            }
        )


@pytest.fixture
def cuda(monkeypatch):
    cuda = FakeCuda()
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    return cuda


class TestTorch:
    def test_its_segments_are_registered_as_device_memory(self, table, cuda):
        a, b = np.zeros(PAGE, "u1"), np.zeros(2 * PAGE, "u1")
        cuda.malloc(a)
        cuda.malloc(b, device=1)
        assert cuda_segments() == [
            (address_of(a), PAGE, "cuda:0", 0),
            (address_of(b), 2 * PAGE, "cuda:1", 0),
        ]
        assert cuda_segments(1) == cuda_segments()[1:]
        table.sync(cuda_segments())
        view = table.view_at(address_of(b), 8)
        with pytest.raises(BufferError, match="device memory"):
            view.array()

    def test_what_was_released_is_never_served_again(self, table, cuda):
        memory = np.zeros(PAGE, "u1")
        cuda.malloc(memory)
        cuda.malloc(np.zeros(PAGE, "u1"), device=1)
        table.sync(cuda_segments())
        old = table.view_at(address_of(memory), 8)
        report = table.sync(cuda_segments())
        assert not (report.added or report.grown or report.retired)
        # Given back, and allocated again: the same address and size.
        cuda.freed[0] += PAGE
        report = table.sync(cuda_segments())
        assert [segment.addr for segment in report.added] == [address_of(memory)]
        assert table.view_at(address_of(memory), 8).lkey != old.lkey

    def test_an_expandable_segment_grows(self, table, cuda):
        memory = np.zeros(4 * PAGE, "u1")
        cuda.malloc(memory[:PAGE])
        table.sync(cuda_segments())
        cuda.segments[0]["total_size"] = 4 * PAGE
        report = table.sync(cuda_segments())
        assert (len(report.added), len(report.grown)) == (0, 1)

    def test_without_cuda_in_use_there_are_none(self, cuda):
        cuda.used = False
        assert cuda_segments() == []

    def test_without_torch_it_says_so(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        with pytest.raises(ImportError, match="torch"):
            cuda_segments()


def test_a_device_that_is_no_text_is_refused(table):
    array = np.zeros(PAGE, "u1")
    with pytest.raises(TypeError, match="device is None or text"):
        table.sync([(address_of(array), PAGE, 0)])
    assert len(table) == 0 and table.stats["registrations"] == 0
