from libc.stdint cimport uint32_t, uint64_t

from ._errors cimport Process

cdef extern from "rdmaview.h" nogil:
    ctypedef struct rdmaview_view:
        uint64_t id
        uint64_t virtual_addr
        uint64_t rdma_addr
        uint64_t size
        uint32_t lkey
        uint32_t rkey

    ctypedef struct rdmaview_remote:
        uint64_t id
        uint64_t rdma_addr
        uint64_t size
        uint32_t rkey
        uint32_t reserved

    bint rdmaview_within(uint64_t whole, uint64_t offset, uint64_t size)
    bint rdmaview_slice(
        const rdmaview_view *view, uint64_t offset, uint64_t size, rdmaview_view *slice
    )
    bint rdmaview_remote_slice(
        const rdmaview_remote *view,
        uint64_t offset,
        uint64_t size,
        rdmaview_remote *slice,
    )
    rdmaview_remote rdmaview_to_remote(const rdmaview_view *view)
    bint rdmaview_contains(const rdmaview_view *outer, const rdmaview_view *inner)
    bint rdmaview_remote_contains(
        const rdmaview_remote *outer, const rdmaview_remote *inner
    )
    bint rdmaview_overlaps(const rdmaview_view *a, const rdmaview_view *b)
    bint rdmaview_remote_overlaps(const rdmaview_remote *a, const rdmaview_remote *b)
    bint rdmaview_equal(const rdmaview_view *a, const rdmaview_view *b)
    bint rdmaview_remote_equal(const rdmaview_remote *a, const rdmaview_remote *b)
    uint64_t rdmaview_hash(const rdmaview_view *view)
    uint64_t rdmaview_remote_hash(const rdmaview_remote *view)
    uint64_t rdmaview_mix(uint64_t x)

    # Of arrays: the strides are bytes, the steps items.
    const rdmaview_view *rdmaview_at(const void *views, Py_ssize_t stride, size_t i)
    const rdmaview_remote *rdmaview_remote_at(
        const void *views, Py_ssize_t stride, size_t i
    )
    size_t rdmaview_slice_many(
        const rdmaview_view *whole,
        const uint64_t *offsets,
        Py_ssize_t offset_step,
        const uint64_t *sizes,
        Py_ssize_t size_step,
        size_t count,
        rdmaview_view *views,
    )
    size_t rdmaview_remote_slice_many(
        const rdmaview_remote *whole,
        const uint64_t *offsets,
        Py_ssize_t offset_step,
        const uint64_t *sizes,
        Py_ssize_t size_step,
        size_t count,
        rdmaview_remote *views,
    )
    void rdmaview_to_remote_many(
        const void *views, Py_ssize_t stride, size_t count, rdmaview_remote *remotes
    )
    void rdmaview_hash_many(
        const void *views, Py_ssize_t stride, size_t count, uint64_t *hashes
    )
    void rdmaview_remote_hash_many(
        const void *views, Py_ssize_t stride, size_t count, uint64_t *hashes
    )
    bint rdmaview_adjacent(const rdmaview_view *view, const rdmaview_view *next)
    bint rdmaview_remote_adjacent(
        const rdmaview_remote *view, const rdmaview_remote *next
    )
    size_t rdmaview_coalesce(
        const void *views, Py_ssize_t stride, size_t count, rdmaview_view *joined
    )
    size_t rdmaview_remote_coalesce(
        const void *views, Py_ssize_t stride, size_t count, rdmaview_remote *joined
    )

    # In network order; the wire forms of Python put a magic before these.
    void rdmaview_store(unsigned char *at, uint64_t x)
    uint64_t rdmaview_load(const unsigned char *at)
    void rdmaview_pack(const rdmaview_view *view, unsigned char *wire)
    bint rdmaview_unpack(const unsigned char *wire, rdmaview_view *view)
    void rdmaview_remote_pack(const rdmaview_remote *view, unsigned char *wire)
    bint rdmaview_remote_unpack(const unsigned char *wire, rdmaview_remote *view)


cdef enum State:
    OPEN
    CLOSING
    CLOSED


# What a view needs of the memory region that it is cut from.
cdef class Registration:
    # May what owns the memory refer back to a view? view_type.h reads this, as the first.
    cdef bint is_cyclic
    # Beside it: a look-up among many registrations finds none of these in the cache.
    cdef State state
    # Of a device other than the processor, which can't read it by an address.
    cdef bint is_device
    cdef rdmaview_view whole
    # The exporter of arrays: keeps the bytes, but not the registration, alive.
    cdef object memory
    cdef bint readonly
    cdef Process process


cdef class MemoryRegionView:
    cdef rdmaview_view value
    # Keeps the registration alive; None in a detached view.
    cdef Registration registration


cdef class RemoteView:
    cdef rdmaview_remote value


cdef MemoryRegionView new_view(const rdmaview_view *value, Registration registration)
cdef RemoteView new_remote_view(const rdmaview_remote *value)
cdef uint64_t next_registration_id() except 0
cdef int check_attached(MemoryRegionView view, str use) except -1
cdef int parse_u64(object number, str name, uint64_t *parsed) except -1
cdef str number_text(object number)
cdef int parse_slice(object key, uint64_t size, uint64_t *offset, uint64_t *length) except -1
cdef int parse_range(
    object offset, object size, uint64_t whole, uint64_t *offset_out, uint64_t *size_out
) except -1
