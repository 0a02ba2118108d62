# cython: language_level=3
"""A module of someone else's, which reads views as C does."""

from libc.stdint cimport uint64_t

from rdmaview._view cimport (
    MemoryRegionView,
    rdmaview_hash,
    rdmaview_slice,
    rdmaview_view,
)


def sum_of_fields(MemoryRegionView view not None, int times):
    """Add up the six fields, `times` times, without the GIL."""
    cdef uint64_t total = 0
    cdef int i
    with nogil:
        for i in range(times):
            total += add_fields(view)
    return total


def hash_of_slices(MemoryRegionView view not None, uint64_t step):
    """Combine the hashes of the slices of `step` bytes, without the GIL."""
    cdef uint64_t combined
    with nogil:
        combined = combine_hashes(&view.value, step)
    return combined


cdef uint64_t add_fields(MemoryRegionView view) noexcept nogil:
    return (
        view.value.id
        + view.value.virtual_addr
        + view.value.rdma_addr
        + view.value.size
        + view.value.lkey
        + view.value.rkey
    )


cdef uint64_t combine_hashes(const rdmaview_view *view, uint64_t step) noexcept nogil:
    cdef rdmaview_view slice
    cdef uint64_t combined = 0
    cdef uint64_t offset = 0
    while rdmaview_slice(view, offset, step, &slice):
        combined ^= rdmaview_hash(&slice)
        offset += step
    return combined
