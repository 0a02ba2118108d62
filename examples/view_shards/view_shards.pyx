# cython: language_level=3, boundscheck=False
"""A module of its own that uses views as C values: no Python call in any loop.

What it needs of rdmaview are the .pxd files and rdmaview.h, both of which are installed
with it. A view's fields are in ``view.value``; an array's packed views begin at
``views.start``, ``views.stride`` bytes apart. They stay as they are while a reference to
the array is held, so that a loop may go without the GIL.
"""

from libc.stdint cimport uint32_t, uint64_t

from rdmaview._arrays cimport ViewArray
from rdmaview._view cimport (
    MemoryRegionView,
    rdmaview_at,
    rdmaview_hash,
    rdmaview_slice,
    rdmaview_view,
)

import numpy as np

cdef extern from "shards.h" nogil:
    void deal_views(
        const void *views,
        Py_ssize_t stride,
        size_t count,
        uint32_t shards,
        uint32_t *shard_of,
        uint64_t *shard_bytes,
    )


def deal(ViewArray views not None, uint32_t shards):
    """Deal views out by their hashes, in C: each one's shard, and each shard's bytes."""
    if shards == 0:
        raise ValueError("there must be a shard")
    shard_of = np.zeros(len(views), np.uint32)
    shard_bytes = np.zeros(shards, np.uint64)
    cdef uint32_t[::1] of = shard_of
    cdef uint64_t[::1] bytes_of = shard_bytes
    if views.count:
        with nogil:
            deal_views(
                views.start, views.stride, views.count, shards, &of[0], &bytes_of[0]
            )
    return shard_of, shard_bytes


def largest(ViewArray views not None):
    """Find the place of the largest view, in Cython; -1 if there is none."""
    cdef Py_ssize_t found = -1
    cdef uint64_t most = 0
    cdef Py_ssize_t i
    cdef const rdmaview_view *view
    with nogil:
        for i in range(views.count):
            view = rdmaview_at(views.start, views.stride, i)
            if found < 0 or view.size > most:
                found, most = i, view.size
    return found


def hash_of_slices(MemoryRegionView view not None, uint64_t step):
    """Combine the hashes of a view's slices of `step` bytes; none becomes an object."""
    cdef uint64_t combined = 0
    cdef uint64_t offset = 0
    cdef rdmaview_view slice
    if step == 0:
        raise ValueError("step must be positive")
    with nogil:
        while rdmaview_slice(&view.value, offset, step, &slice):
            combined ^= rdmaview_hash(&slice)
            offset += step
    return combined
