from libc.stdint cimport uint64_t

from ._errors cimport Process
from ._memory cimport Extent
from ._verbs cimport Lender, MemoryRegion, ProtectionDomain


# The registration of an owner's memory. Nothing here holds the owner, so that it may die.
cdef class Entry(Lender):
    cdef RegistrationCache cache
    cdef object owner_ref
    cdef object key
    cdef Extent extent
    # None while it is registered, and when it is deregistered.
    cdef MemoryRegion own
    # What views hold, with the owner; borrowed from them. NULL: it is idle.
    cdef void *lent
    # When it was last used, in uses of the cache.
    cdef uint64_t used
    # In the cache; else it ends when it is idle.
    cdef bint kept


cdef class RegistrationCache:
    cdef readonly ProtectionDomain pd
    cdef Process process
    cdef int rights
    cdef dict entries
    cdef uint64_t uses
    cdef uint64_t max_regions
    cdef uint64_t max_bytes
    cdef bint is_closed
    # Without those that no longer are in `entries`.
    cdef readonly uint64_t bytes_pinned
    cdef readonly uint64_t hits
    cdef readonly uint64_t misses
    cdef readonly uint64_t uncached
    cdef readonly uint64_t evictions
    cdef readonly double registration_seconds
