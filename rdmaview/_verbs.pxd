from libc.stdint cimport uint8_t, uint32_t, uint64_t

from ._errors cimport Process
from ._library cimport Library
from ._memory cimport HostMemory, Layout
from ._view cimport Registration, State, rdmaview_view
from .libibverbs cimport ibv_context, ibv_device_attr, ibv_mr, ibv_pd, ibv_port_attr


# What the owners of verbs objects have in common. Each holds its parent, and is
# @no_gc_clear, so that in a reference cycle children still go before parents.
cdef class Handle:
    cdef State state
    cdef Process process
    # Open children, and calls that run without the GIL: what forbids to close.
    cdef Py_ssize_t children


cdef class Context(Handle):
    cdef ibv_context *handle
    cdef Library library
    cdef readonly str name
    # Asked for once: limits are checked before each registration.
    cdef ibv_device_attr limits
    cdef readonly Py_ssize_t mr_count
    cdef readonly uint64_t mr_bytes
    # Did the user see to its end, by close() or a with-statement?
    cdef bint tended
    cdef object __weakref__


cdef class ProtectionDomain(Handle):
    cdef ibv_pd *handle
    # Closed after this one.
    cdef readonly Context context


# Who lends a registration out, and gets it back when no view holds it any more.
cdef class Lender:
    cdef int take_back(self) except -1


cdef class MemoryRegion(Registration):
    cdef ibv_mr *handle
    # Deallocated after the region is deregistered.
    cdef readonly ProtectionDomain pd
    cdef int rights
    # Work requests in flight that use this memory.
    cdef Py_ssize_t pins
    # None if the registration is its own, and ends with it.
    cdef Lender lender
    cdef object __weakref__


cdef int check_open(Handle handle, str what) except -1
cdef bint may_finalise(Handle handle) noexcept
cdef int begin_close(
    State *state, Process process, Py_ssize_t *children, str verb, str what
) except -1
cdef int read_port(Context context, uint8_t port, ibv_port_attr *attributes) except -1
cdef int fitting_rights(HostMemory memory, int rights, object buffer) except -1
cdef MemoryRegion register(
    ProtectionDomain pd, HostMemory memory, int rights, object iova
)
cdef MemoryRegion lend(MemoryRegion mr, HostMemory memory, Lender lender)
cdef int check_cuttable(MemoryRegion mr) except -1
cdef Py_ssize_t cut_runs(
    const rdmaview_view *whole, const Layout *layout, rdmaview_view *views
) noexcept
cdef int end_block(object handle, object kind) except -1
cdef str rights_text(int rights)
cdef int parse_access(object access) except -1
cdef int report_lost(int error, str verb, str what) except -1
