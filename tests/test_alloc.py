"""Memory that is allocated and registered as one."""

import gc
import mmap
import os

import numpy as np
import pytest
from helpers import assert_silent, run_python

import rdmaview as rv
from rdmaview import _host

PAGE = mmap.PAGESIZE
RIGHTS = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_WRITE | rv.Access.REMOTE_READ


def mapped_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * PAGE


def test_it_begins_at_a_page_and_reads_as_zeros(pd):
    with pd.alloc_mr(3 * PAGE + 5) as mr:
        assert len(mr) == 3 * PAGE + 5
        assert mr.addr % PAGE == 0
        assert mr.access == rv.Access.LOCAL_WRITE
        memory = mr[:].array()
        assert not memory.any()
        memory[:] = 7
        assert (mr.view().array() == 7).all()
        del memory


def test_it_moves_bytes(pd, pair):
    with pd.alloc_mr(2 * PAGE, RIGHTS) as mr:
        mr[:PAGE].array()[:] = 9
        pair.a.write(mr[:PAGE], mr[PAGE:].remote())
        assert (mr[PAGE:].array() == 9).all()


def test_it_is_freed_with_the_last_array_of_it(pd):
    size = 1 << 26
    mr = pd.alloc_mr(size)
    array = mr[10:20].array()
    mr.close()
    del mr
    gc.collect()
    before = mapped_bytes()
    array[:] = 1
    del array
    gc.collect()
    assert before - mapped_bytes() >= size


def test_it_is_freed_if_it_cannot_be_registered(pd):
    before = mapped_bytes()
    with pytest.raises(ValueError, match="REMOTE_WRITE"):
        pd.alloc_mr(1 << 26, rv.Access.REMOTE_WRITE)
    assert mapped_bytes() - before < 1 << 25


def test_a_file_that_others_map_is_shared(pd):
    fd = os.memfd_create("rdmaview")
    os.ftruncate(fd, 2 * PAGE)
    with pd.alloc_mr(2 * PAGE, fd=fd) as mr:
        other = mmap.mmap(fd, 2 * PAGE)
        os.close(fd)
        mr[100:105].array()[:] = np.frombuffer(b"hello", "u1")
        assert other[100:105] == b"hello"
        other[:2] = b"by"
        assert mr[:2].array().tobytes() == b"by"


def test_another_process_sees_the_memory_of_a_file(pd):
    fd = os.memfd_create("rdmaview")
    os.ftruncate(fd, PAGE)
    with pd.alloc_mr(PAGE, fd=fd) as mr:
        done = run_python(
            """
            import mmap, sys
            with open(sys.argv[1], "r+b") as file:
                mmap.mmap(file.fileno(), 0)[:5] = b"hello"
            """,
            f"/proc/{os.getpid()}/fd/{fd}",
        )
        assert_silent(done)
        assert mr[:5].array().tobytes() == b"hello"
    os.close(fd)


def test_a_file_that_is_too_short_is_refused(pd):
    fd = os.memfd_create("rdmaview")
    os.ftruncate(fd, 100)
    with pytest.raises(ValueError, match="has 100 bytes, not 101"):
        pd.alloc_mr(101, fd=fd)
    os.close(fd)


def test_huge_pages_are_huge_or_refused_with_their_number(pd):
    free = _host.meminfo("HugePages_Free") or 0
    if free:
        with pd.alloc_mr(PAGE, huge_pages=True) as mr:
            assert mr.addr % _host.huge_page_size() == 0
            assert _host.meminfo("HugePages_Rsvd") or (
                _host.meminfo("HugePages_Free") < free
            )
    with pytest.raises(
        OSError, match=r"huge pages of \d+ bytes are free.*nr_hugepages"
    ):
        pd.alloc_mr((free + 1) * _host.huge_page_size(), huge_pages=True)


def test_its_pages_are_of_the_node_that_is_named(pd):
    nodes = _host.numa_nodes()
    if nodes:
        with pd.alloc_mr(4 * PAGE, numa_node=nodes[0]) as mr:
            mr[:].array()[:] = 1
            with open("/proc/self/numa_maps") as maps:
                (line,) = [line for line in maps if int(line.split()[0], 16) == mr.addr]
            assert f"bind:{nodes[0]}" in line
            assert f" N{nodes[0]}=" in line
    for node in (max(nodes, default=0) + 1, -1, 10**6):
        with pytest.raises(ValueError, match=f"no NUMA node {node}"):
            pd.alloc_mr(PAGE, numa_node=node)


@pytest.mark.parametrize("size", [0, -1, 2**63, 2**64, 2**64 - 1])
def test_sizes_that_cannot_be_are_refused(pd, size):
    with pytest.raises(
        ValueError, match=r"can't be allocated|max_mr_size|size must be"
    ):
        pd.alloc_mr(size)


@pytest.mark.parametrize("size", [None, 1.5, "4096", True])
def test_a_size_is_an_integer(pd, size):
    with pytest.raises(TypeError):
        pd.alloc_mr(size)


def test_a_closed_domain_allocates_nothing(pd):
    pd.close()
    with pytest.raises(ValueError, match="closed"):
        pd.alloc_mr(PAGE)
