from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from ._arrays cimport RemoteViewArray, ViewArray
from ._verbs cimport Context, Handle, ProtectionDomain
from ._view cimport rdmaview_remote, rdmaview_view
from .libibverbs cimport ibv_cq, ibv_qp, ibv_send_wr, ibv_sge, ibv_wc, ibv_wr_opcode


cdef enum Waiting:
    PENDING
    COMPLETED
    # The queue pair was closed: no completion will come.
    ABANDONED


# On the C stack of a thread that waits for a work request, or for a batch.
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
    # The local side's MemoryRegion, which the view or the batch keeps.
    void *mr
    # The local MemoryRegionView, owned, or NULL in a batch.
    void *view
    # The batch it is part of, or NULL. The ring owns one reference to a batch.
    void *batch
    Waiter *waiter
    # Else it ends with the next one that is, or by its own failure.
    bint is_signalled


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
    # How many were ever put there, for those who wait without the GIL.
    cdef uint64_t seen_count
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
    # Its own on the device, for what ends while it is being destroyed.
    cdef uint32_t number
    cdef readonly uint8_t port
    cdef readonly object gid
    cdef readonly object info
    cdef readonly bint connected
    cdef bint ethernet
    cdef readonly uint64_t max_msg_sz
    cdef readonly object first_error
    cdef readonly uint64_t bytes_completed
    # Nanoseconds.
    cdef int64_t device_time
    # Where a batch is written down for the device, `capacity` long; made by the first.
    cdef ibv_send_wr *chain
    cdef ibv_sge *chain_sges


# From the check of its two sides until the last of its requests has ended. Each of
# its requests pins its region from that check until its own end.
cdef class Batch:
    cdef ibv_wr_opcode opcode
    cdef ViewArray locals
    cdef RemoteViewArray remotes
    cdef Py_ssize_t count
    cdef Py_ssize_t posted
    cdef Py_ssize_t ended
    cdef Py_ssize_t completed
    cdef uint64_t byte_len
    # Of the last that was posted.
    cdef uint64_t wr_id
    # Of the first that ended badly.
    cdef WorkCompletion failure
    # Will more be posted? Then who posts tells how it ended, not the queue.
    cdef bint is_open
    # Where the local side's registration was found the last time.
    cdef Py_ssize_t mr_place
    # What ended by the same completion: a Batch or a MemoryRegionView.
    cdef object followed_by


cdef class WorkCompletion:
    cdef readonly uint64_t wr_id
    cdef int code
    cdef readonly str opcode
    cdef readonly uint32_t vendor_err
    cdef readonly uint64_t byte_len
    cdef readonly uint32_t qp_num
    cdef readonly object local
    cdef readonly object remote
    cdef readonly Py_ssize_t count
    cdef readonly Py_ssize_t completed
    cdef readonly WorkCompletion first_error
    # Of the queue pair, for the hint.
    cdef object gid
