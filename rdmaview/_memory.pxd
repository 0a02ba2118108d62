from libc.stdint cimport int64_t, uint64_t


# Where bytes lie in one piece.
cdef struct Extent:
    uint64_t address
    uint64_t size
    bint readonly
    # Or in the memory of the processor.
    bint is_device


cdef enum:
    # NumPy 2 allows as many.
    DIMENSIONS = 64


# Where bytes lie in pieces of one size: `piece` bytes at each of shape[0] * ... places.
cdef struct Layout:
    uint64_t address
    uint64_t piece
    int dimensions
    int64_t shape[DIMENSIONS]
    int64_t strides[DIMENSIONS]
    # Of pieces; 0 if there are no bytes.
    uint64_t count
    # The lowest byte, and bytes from it to the end of the highest.
    uint64_t low
    uint64_t span
    bint is_device


cdef class HostMemory:
    cdef uint64_t address
    cdef uint64_t size
    cdef bint readonly
    cdef bint is_device
    cdef Py_buffer buffer
    cdef bint exported
    # Where nothing is exported: what keeps the bytes where they are.
    cdef object owner
    # May the exporter or the owner refer to views of these bytes?
    cdef bint is_cyclic


cdef HostMemory hold_memory(object x)
cdef HostMemory hold_address(uint64_t address, uint64_t size, bint readonly, object owner)
# `on_device`: whether to tell where on a device they lie, or to refuse it.
cdef int find_extent(object x, Extent *extent, bint on_device) except -1
cdef int find_layout(object x, Layout *layout, bint on_device) except -1
cdef void first_place(const Layout *layout, int64_t *place) noexcept nogil
cdef uint64_t next_place(const Layout *layout, int64_t *place) noexcept nogil
cdef object memory_owner(object x)
# Of an owner: all of its memory.
cdef int find_whole(object owner, Extent *extent) except -1
cdef HostMemory hold_owner(object owner, const Extent *extent)
cdef HostMemory allocate(uint64_t size, bint huge_pages, int numa_node, int fd)
