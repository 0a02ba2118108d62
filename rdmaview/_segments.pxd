from libc.stdint cimport uint64_t

from ._errors cimport Process
from ._view cimport Registration, rdmaview_view

cdef extern from "segment_index.h" nogil:
    ctypedef struct piece_list:
        uint64_t *starts
        uint64_t *signposts
        rdmaview_view *wholes
        size_t count

    const size_t SIGNPOST_STEP

    void set_signposts(piece_list *pieces, size_t first)
    size_t find_piece(const piece_list *pieces, uint64_t address)
    bint cut_piece(
        const piece_list *pieces,
        size_t piece,
        uint64_t address,
        uint64_t size,
        rdmaview_view *view,
    )
    size_t cut_pieces(
        const piece_list *pieces,
        const uint64_t *addresses,
        Py_ssize_t address_step,
        const uint64_t *sizes,
        Py_ssize_t size_step,
        size_t count,
        rdmaview_view *views,
        unsigned char *used,
    )
    uint64_t cut_first(
        const piece_list *pieces,
        uint64_t address,
        uint64_t size,
        rdmaview_view *view,
        size_t *piece,
    )


# Pieces of registered memory in the order of their addresses, none inside another.
cdef class PieceList:
    cdef piece_list list
    cdef size_t capacity
    # Of the pieces, in their order: what each is cut from.
    cdef list registrations
    # Searches that run without the GIL: what forbids to change it.
    cdef Py_ssize_t readers

    cdef int reserve(self, size_t count) except -1


cdef class SegmentIndex:
    cdef PieceList pieces
    cdef Process process
