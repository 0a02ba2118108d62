from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from ._verbs cimport Context, Handle, ProtectionDomain
from ._view cimport rdmaview_remote, rdmaview_view
from .libibverbs cimport ibv_cq, ibv_qp, ibv_wc, ibv_wr_opcode


cdef enum Waiting:
    PENDING
    COMPLETED
    # The queue pair was closed: no completion will come.
    ABANDONED


# On the C stack of a thread that waits for one work request.
cdef struct Waiter:
    Waiting state
    # A WorkCompletion, owned, if the status is bad; else NULL.
    void *bad


# A work request, from its post until its completion is seen.
cdef struct Request:
    uint64_t wr_id
    ibv_wr_opcode opcode
    rdmaview_view local
    rdmaview_remote remote
    # The local MemoryRegionView, owned: pins the registration and its memory.
    void *view
    Waiter *waiter


cdef class CompletionQueue(Handle):
    cdef ibv_cq *handle
    # Closed after this one.
    cdef readonly Context context
    cdef readonly int depth
    # Work requests whose completion was not seen: never more than `depth`.
    cdef Py_ssize_t in_flight
    cdef uint64_t posted
    # A thread has polled completions, and not told their owners yet. Who can't claim
    # the queue looks elsewhere: else two threads would tell them in the wrong order.
    cdef bint claimed
    # Completions that were seen while another thread looked for its own.
    cdef object seen
    # Queue pairs, borrowed: each takes itself out before it goes. NULL is free.
    cdef void **slots
    cdef Py_ssize_t slot_count


cdef class QueuePair(Handle):
    cdef ibv_qp *handle
    # Closed after this one.
    cdef readonly ProtectionDomain pd
    cdef readonly CompletionQueue cq
    # The ring of work requests in flight: [oldest, newest), modulo its capacity.
    cdef Request *requests
    cdef uint64_t capacity
    cdef uint64_t oldest
    cdef uint64_t newest
    cdef Py_ssize_t slot
    cdef readonly uint8_t port
    cdef readonly object gid
    cdef readonly object info
    cdef readonly bint connected
    cdef bint ethernet
    cdef readonly uint64_t max_msg_sz
    cdef readonly object first_error


cdef class WorkCompletion:
    cdef readonly uint64_t wr_id
    cdef int code
    cdef readonly str opcode
    cdef readonly uint32_t vendor_err
    cdef readonly uint32_t byte_len
    cdef readonly uint32_t qp_num
    cdef readonly object local
    cdef readonly object remote
    cdef readonly WorkCompletion first_error
    # Of the queue pair, for the hint.
    cdef object gid
