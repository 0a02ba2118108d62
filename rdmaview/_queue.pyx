"""Completion queues and queue pairs: how bytes move."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from cpython.ref cimport Py_DECREF, Py_INCREF
from libc.errno cimport EADDRNOTAVAIL, EIO, ENOMEM
from libc.math cimport INFINITY, isfinite
from libc.stdint cimport UINT32_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcpy, memset
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport usleep

from ._arrays cimport (
    RemoteViewArray,
    ViewArray,
    as_remote_view_array,
    as_view_array,
    check_array_attached,
    find_registration,
)
from ._errors cimport (
    clear_errno,
    failure,
    is_this_process,
    last_errno,
    raise_verbs_error,
)
from ._verbs cimport (
    Context,
    Handle,
    MemoryRegion,
    ProtectionDomain,
    begin_close,
    check_open,
    may_finalise,
    read_port,
    report_lost,
)
from ._view cimport (
    CLOSED,
    OPEN,
    MemoryRegionView,
    RemoteView,
    check_attached,
    new_remote_view,
    new_view,
    number_text,
    parse_u64,
    rdmaview_at,
    rdmaview_remote,
    rdmaview_remote_at,
    rdmaview_view,
)
from .libibverbs cimport (
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_ATOMIC_NONE,
    IBV_LINK_LAYER_ETHERNET,
    IBV_QP_ACCESS_FLAGS,
    IBV_QP_AV,
    IBV_QP_DEST_QPN,
    IBV_QP_MAX_DEST_RD_ATOMIC,
    IBV_QP_MAX_QP_RD_ATOMIC,
    IBV_QP_MIN_RNR_TIMER,
    IBV_QP_PATH_MTU,
    IBV_QP_PKEY_INDEX,
    IBV_QP_PORT,
    IBV_QP_RETRY_CNT,
    IBV_QP_RNR_RETRY,
    IBV_QP_RQ_PSN,
    IBV_QP_SQ_PSN,
    IBV_QP_STATE,
    IBV_QP_TIMEOUT,
    IBV_QPS_ERR,
    IBV_QPS_INIT,
    IBV_QPS_RESET,
    IBV_QPS_RTR,
    IBV_QPS_RTS,
    IBV_QPS_SQD,
    IBV_QPS_SQE,
    IBV_QPS_UNKNOWN,
    IBV_QPT_RC,
    IBV_SEND_SIGNALED,
    IBV_WC_BAD_RESP_ERR,
    IBV_WC_FATAL_ERR,
    IBV_WC_GENERAL_ERR,
    IBV_WC_INV_EEC_STATE_ERR,
    IBV_WC_INV_EECN_ERR,
    IBV_WC_LOC_ACCESS_ERR,
    IBV_WC_LOC_EEC_OP_ERR,
    IBV_WC_LOC_LEN_ERR,
    IBV_WC_LOC_PROT_ERR,
    IBV_WC_LOC_QP_OP_ERR,
    IBV_WC_LOC_RDD_VIOL_ERR,
    IBV_WC_MW_BIND_ERR,
    IBV_WC_REM_ABORT_ERR,
    IBV_WC_REM_ACCESS_ERR,
    IBV_WC_REM_INV_RD_REQ_ERR,
    IBV_WC_REM_INV_REQ_ERR,
    IBV_WC_REM_OP_ERR,
    IBV_WC_RESP_TIMEOUT_ERR,
    IBV_WC_RETRY_EXC_ERR,
    IBV_WC_RNR_RETRY_EXC_ERR,
    IBV_WC_SUCCESS,
    IBV_WC_TM_ERR,
    IBV_WC_TM_RNDV_INCOMPLETE,
    IBV_WC_WR_FLUSH_ERR,
    IBV_WR_RDMA_READ,
    IBV_WR_RDMA_WRITE,
    ibv_mtu,
    ibv_poll_cq,
    ibv_port_attr,
    ibv_post_send,
    ibv_qp_attr,
    ibv_qp_init_attr,
    ibv_send_wr,
    ibv_sge,
    ibv_wc,
    ibv_wr_opcode,
)

import enum
import errno
import os
import struct
from collections import deque, namedtuple

from . import _host
from ._errors import VerbsError, WorkCompletionError
from ._verbs import queue_makers

cdef enum:
    # A wr_id is 16 bits of a queue pair's slot and 48 of a count that never repeats.
    SLOT_SHIFT = 48
    SLOT_LIMIT = 1 << 16
    BATCH = 16

cdef int64_t MICROSECOND = 1000
# How long a wait spins with the GIL: to give it away and get it back costs as much.
cdef int64_t SPIN_WITH_GIL = 10 * MICROSECOND
# How long it spins before it starts to sleep between two looks.
cdef int64_t SPIN = 200 * MICROSECOND
# How long it may stay away from Python's signals.
cdef int64_t SIGNAL_INTERVAL = 20000 * MICROSECOND


class Status(enum.IntEnum):
    """How a work request ended, as in ibv_poll_cq(3)."""

    SUCCESS = IBV_WC_SUCCESS
    LOC_LEN_ERR = IBV_WC_LOC_LEN_ERR
    LOC_QP_OP_ERR = IBV_WC_LOC_QP_OP_ERR
    LOC_EEC_OP_ERR = IBV_WC_LOC_EEC_OP_ERR
    LOC_PROT_ERR = IBV_WC_LOC_PROT_ERR
    WR_FLUSH_ERR = IBV_WC_WR_FLUSH_ERR
    MW_BIND_ERR = IBV_WC_MW_BIND_ERR
    BAD_RESP_ERR = IBV_WC_BAD_RESP_ERR
    LOC_ACCESS_ERR = IBV_WC_LOC_ACCESS_ERR
    REM_INV_REQ_ERR = IBV_WC_REM_INV_REQ_ERR
    REM_ACCESS_ERR = IBV_WC_REM_ACCESS_ERR
    REM_OP_ERR = IBV_WC_REM_OP_ERR
    RETRY_EXC_ERR = IBV_WC_RETRY_EXC_ERR
    RNR_RETRY_EXC_ERR = IBV_WC_RNR_RETRY_EXC_ERR
    LOC_RDD_VIOL_ERR = IBV_WC_LOC_RDD_VIOL_ERR
    REM_INV_RD_REQ_ERR = IBV_WC_REM_INV_RD_REQ_ERR
    REM_ABORT_ERR = IBV_WC_REM_ABORT_ERR
    INV_EECN_ERR = IBV_WC_INV_EECN_ERR
    INV_EEC_STATE_ERR = IBV_WC_INV_EEC_STATE_ERR
    FATAL_ERR = IBV_WC_FATAL_ERR
    RESP_TIMEOUT_ERR = IBV_WC_RESP_TIMEOUT_ERR
    GENERAL_ERR = IBV_WC_GENERAL_ERR
    TM_ERR = IBV_WC_TM_ERR
    TM_RNDV_INCOMPLETE = IBV_WC_TM_RNDV_INCOMPLETE

    @classmethod
    def _missing_(cls, value):
        # A provider newer than the header: its completions must not be lost for that.
        member = int.__new__(cls, value)
        member._name_ = f"UNKNOWN_{value}"
        member._value_ = value
        return member


class QueuePairState(enum.IntEnum):
    """The states of a queue pair, as in ibv_modify_qp(3)."""

    RESET = IBV_QPS_RESET
    INIT = IBV_QPS_INIT
    RTR = IBV_QPS_RTR
    RTS = IBV_QPS_RTS
    SQD = IBV_QPS_SQD
    SQE = IBV_QPS_SQE
    ERR = IBV_QPS_ERR
    UNKNOWN = IBV_QPS_UNKNOWN


cdef object SUCCEEDED = Status.SUCCESS
cdef dict OPCODES = {IBV_WR_RDMA_WRITE: "RDMA_WRITE", IBV_WR_RDMA_READ: "RDMA_READ"}

INFO_WIRE = struct.Struct("!4sIIHHBB16s")
INFO_MAGIC = b"RQP1"


class QueuePairInfo(
    namedtuple("QueuePairInfo", "qp_num psn lid mtu max_rd_atomic max_dest_rd_atomic gid")
):
    """What a peer needs to connect to a queue pair: an immutable value.

    Parameters
    ----------
    qp_num, psn : int
        Number and first packet sequence number, 24 bits.
    lid : int
        InfiniBand's local id of the port; 0 on Ethernet.
    mtu : int
        Bytes: 256, 512, 1024, 2048 or 4096.
    max_rd_atomic, max_dest_rd_atomic : int
        RDMA reads in flight that it can start, and answer; 8 bits.
    gid : bytes
        16 bytes.
    """

    __slots__ = ()

    def __new__(cls, qp_num, psn, lid, mtu, max_rd_atomic, max_dest_rd_atomic, gid):
        """Check each field's range."""
        for name, number, limit in (
            ("qp_num", qp_num, 1 << 24),
            ("psn", psn, 1 << 24),
            ("lid", lid, 1 << 16),
            ("max_rd_atomic", max_rd_atomic, 1 << 8),
            ("max_dest_rd_atomic", max_dest_rd_atomic, 1 << 8),
        ):
            if not isinstance(number, int) or isinstance(number, bool):
                raise TypeError(f"{name} must be an int: {number!r}")
            if not 0 <= number < limit:
                raise ValueError(
                    f"{name} must be from 0 to {limit - 1}, not {number_text(number)}"
                )
        if mtu not in (256, 512, 1024, 2048, 4096):
            raise ValueError(
                f"mtu must be 256, 512, 1024, 2048 or 4096, not {number_text(mtu)}"
            )
        if not isinstance(gid, bytes):
            raise TypeError(f"gid must be bytes, not {type(gid).__name__}")
        if len(gid) != 16:
            raise ValueError(f"gid must be 16 bytes, not {len(gid)}")
        return super().__new__(
            cls, qp_num, psn, lid, mtu, max_rd_atomic, max_dest_rd_atomic, gid
        )

    def to_bytes(self):
        """The wire form: ``!4sIIHHBB16s`` of b"RQP1" and the fields, 34 bytes.

        Returns
        -------
        bytes
        """
        return INFO_WIRE.pack(INFO_MAGIC, *self)

    @classmethod
    def from_bytes(cls, data):
        """Rebuild it from its wire form.

        Parameters
        ----------
        data : bytes-like
            Exactly 34 bytes.

        Returns
        -------
        QueuePairInfo

        Raises
        ------
        ValueError
            Another length or magic, or a field out of its range.
        """
        data = bytes(memoryview(data))
        if len(data) != INFO_WIRE.size:
            raise ValueError(
                f"a queue pair's wire form is {INFO_WIRE.size} bytes, not {len(data)}"
            )
        magic, *fields = INFO_WIRE.unpack(data)
        if magic != INFO_MAGIC:
            raise ValueError(
                f"a queue pair's wire form starts with {INFO_MAGIC!r}, not {magic!r}"
            )
        return cls(*fields)


@cython.final
@cython.no_gc_clear
cdef class CompletionQueue(Handle):
    """Where work requests report their end.

    Attributes
    ----------
    context : Context
    depth : int
        Completions that it can hold.
    """

    def __cinit__(self):
        self.state = CLOSED
        self.seen = deque()

    def __dealloc__(self):
        cdef int error
        free(self.slots)
        if not may_finalise(self):
            return
        with nogil:
            error = failure(self.context.library.verbs.destroy_cq(self.handle))
        self.context.children -= 1
        report_lost(error, "ibv_destroy_cq", self.context.name)

    def __repr__(self):
        state = "closed" if self.closed else f"{self.in_flight} of {self.depth} in flight"
        return f"<CompletionQueue {state}>"

    def poll(self, n=BATCH):
        """Take the completions that are there; never wait.

        Parameters
        ----------
        n : int, default 16
            At most so many.

        Returns
        -------
        list of WorkCompletion
            Oldest first; a bad status is data here. Those of `QueuePair.write` and
            `read` are not among them, but those of one that timed out are.

        Raises
        ------
        VerbsError
            ibv_poll_cq failed.
        ValueError
            The queue is closed, or `n` is below 1.
        """
        cdef uint64_t limit
        if parse_u64(n, "n", &limit) or not 1 <= limit <= <uint64_t>UINT32_MAX:
            raise ValueError(f"n must be at least 1, not {number_text(n)}")
        check_open(self, "CompletionQueue")
        while <uint64_t>len(self.seen) < limit:
            if look(self) == 0:
                break
        return take_seen(self, limit)

    def wait(self, timeout=10.0, n=BATCH):
        """Take completions; wait for the first.

        Parameters
        ----------
        timeout : float, default 10
            Seconds.
        n : int, default 16
            At most so many.

        Returns
        -------
        list of WorkCompletion
            At least one, oldest first.

        Raises
        ------
        TimeoutError
            None came in time.
        VerbsError
            ibv_poll_cq failed.
        ValueError
            The queue is closed, or an argument is out of range.
        """
        cdef int64_t deadline = parse_timeout(timeout)
        completions = self.poll(n)
        while not completions:
            if now() >= deadline:
                raise TimeoutError(
                    f"no completion in {timeout} s; {self.in_flight} work requests are "
                    "in flight"
                )
            watch(self, deadline, NULL)
            completions = self.poll(n)
        return completions

    def close(self):
        """Destroy the queue; a second call does nothing.

        Raises
        ------
        VerbsError
            EBUSY: queue pairs use it, or a thread waits at it.
        """
        cdef int error
        if not begin_close(
            &self.state,
            self.process,
            &self.children,
            "ibv_destroy_cq",
            "the completion queue",
        ):
            return
        with nogil:
            error = failure(self.context.library.verbs.destroy_cq(self.handle))
        self.state = OPEN if error else CLOSED
        if error:
            raise_verbs_error(error, "ibv_destroy_cq", self.context.name)
        self.context.children -= 1


@cython.final
@cython.no_gc_clear
cdef class QueuePair(Handle):
    """One end of a reliable connection.

    Attributes
    ----------
    pd : ProtectionDomain
    cq : CompletionQueue
    info : QueuePairInfo
        What the peer's `connect` needs.
    port : int
    gid : GID or None
        The entry of the port's table that it sends from; None on InfiniBand.
    connected : bool
    max_msg_sz : int
        Bytes that one work request may move.
    first_error : WorkCompletion or None
        The first bad status that is no flush: what broke the connection.
    bytes_completed : int
        Bytes moved by requests whose good end was seen. Another thread may watch it
        grow while `writes` or `reads` runs.
    """

    def __cinit__(self):
        self.state = CLOSED

    def __dealloc__(self):
        cdef int error
        if may_finalise(self):
            # Before the GIL goes: no other thread may come upon a dying object.
            leave_slot(self)
            with nogil:
                error = failure(self.pd.context.library.verbs.destroy_qp(self.handle))
            report_lost(error, "ibv_destroy_qp", self.pd.context.name)
            if error:
                # The device may still use the pinned memory: leave it pinned.
                return
            drain(self.cq)
        if self.state == OPEN:
            leave(self)
        free(self.requests)
        free(self.chain)
        free(self.chain_sges)

    def __repr__(self):
        if self.closed:
            return "<QueuePair closed>"
        return (
            f"<QueuePair {self.handle.qp_num:#x} on {self.pd.context.name}, "
            f"{self.newest - self.oldest} of {self.capacity} in flight"
            f"{', broken' if self.first_error is not None else ''}>"
        )

    def connect(self, peer):
        """Connect to a peer's queue pair, which must connect to this one as well.

        Parameters
        ----------
        peer : QueuePairInfo
            Of the other end.

        Raises
        ------
        TypeError
            `peer` is something else.
        ValueError
            The queue pair is connected already, or closed.
        VerbsError
            ibv_modify_qp failed; the queue pair can be connected again.
        """
        cdef ibv_qp_attr attr
        cdef bytes gid
        cdef int mtu = 1
        if not isinstance(peer, QueuePairInfo):
            raise TypeError(
                f"peer is a QueuePairInfo, not {type(peer).__name__}: rebuild one with "
                "QueuePairInfo.from_bytes"
            )
        # tuple's own ways to build one pass the checks by, and so could a subclass.
        peer = QueuePairInfo(*peer)
        check_open(self, "QueuePair")
        if self.connected:
            raise ValueError(f"{self!r} is connected already")
        while 128 << (mtu + 1) <= min(peer.mtu, self.info.mtu):
            mtu += 1
        memset(&attr, 0, sizeof(attr))
        attr.qp_state = IBV_QPS_RTR
        attr.path_mtu = <ibv_mtu>mtu
        attr.dest_qp_num = peer.qp_num
        attr.rq_psn = peer.psn
        attr.max_dest_rd_atomic = min(self.info.max_dest_rd_atomic, peer.max_rd_atomic)
        attr.min_rnr_timer = 12
        attr.ah_attr.port_num = self.port
        attr.ah_attr.dlid = peer.lid
        if self.ethernet:
            gid = peer.gid
            attr.ah_attr.is_global = 1
            memcpy(attr.ah_attr.grh.dgid.raw, <char *>gid, 16)
            attr.ah_attr.grh.sgid_index = self.gid.index
            attr.ah_attr.grh.hop_limit = 64
        # Claimed first: a second thread must not connect while this one waits.
        self.connected = True
        self.children += 1
        try:
            modify(
                self,
                &attr,
                IBV_QP_STATE
                | IBV_QP_AV
                | IBV_QP_PATH_MTU
                | IBV_QP_DEST_QPN
                | IBV_QP_RQ_PSN
                | IBV_QP_MAX_DEST_RD_ATOMIC
                | IBV_QP_MIN_RNR_TIMER,
                f"to RTR, peer {peer.qp_num:#x} at {_host.gid_text(peer.gid)}, "
                f"from {gid_label(self.gid)}",
            )
            attr.qp_state = IBV_QPS_RTS
            attr.sq_psn = self.info.psn
            # 4.096 us * 2**16 = 0.27 s a try (InfiniBand specification, 9.7.6.1.3). A
            # retry count of 7 would be the largest, but rxe takes it for "for ever".
            attr.timeout = 16
            attr.retry_cnt = 6
            attr.rnr_retry = 7
            attr.max_rd_atomic = min(self.info.max_rd_atomic, peer.max_dest_rd_atomic)
            modify(
                self,
                &attr,
                IBV_QP_STATE
                | IBV_QP_SQ_PSN
                | IBV_QP_TIMEOUT
                | IBV_QP_RETRY_CNT
                | IBV_QP_RNR_RETRY
                | IBV_QP_MAX_QP_RD_ATOMIC,
                "to RTS",
            )
        except BaseException:
            self.connected = False
            try:
                reset(self)
            except VerbsError:
                # What failed first says more; a second try to connect tells the rest.
                pass
            raise
        finally:
            self.children -= 1

    def post_write(self, local, remote):
        """Start to write `local` to `remote`; its end comes from the queue's `poll`.

        Parameters
        ----------
        local : MemoryRegionView
            Attached, of this queue pair's protection domain. It stays registered
            and its memory held until the completion is seen.
        remote : RemoteView
            Of the same size.

        Returns
        -------
        int
            The wr_id that the completion will have.

        Raises
        ------
        TypeError, ValueError, DetachedViewError, StaleViewError
            The views don't fit; nothing was posted.
        VerbsError
            The send queue or the completion queue is full (ENOMEM), or
            ibv_post_send failed; nothing was posted.
        """
        return post(self, IBV_WR_RDMA_WRITE, local, remote, NULL)

    def post_read(self, local, remote):
        """Start to read `remote` into `local`; its end comes from the queue's `poll`.

        Parameters
        ----------
        local : MemoryRegionView
            As in `post_write`, with the right LOCAL_WRITE.
        remote : RemoteView
            Of the same size.

        Returns
        -------
        int
            The wr_id that the completion will have.

        Raises
        ------
        TypeError, ValueError, DetachedViewError, StaleViewError, VerbsError
            As in `post_write`.
        """
        return post(self, IBV_WR_RDMA_READ, local, remote, NULL)

    def write(self, local, remote, timeout=10.0):
        """Write `local` to `remote`, and wait until it is done.

        Parameters
        ----------
        local : MemoryRegionView
        remote : RemoteView
            As in `post_write`.
        timeout : float, default 10
            Seconds.

        Raises
        ------
        WorkCompletionError
            The status is bad; this breaks the queue pair.
        TimeoutError
            It was not done in time. It stays in flight, and its memory pinned: its
            completion will come from the queue's `poll`.
        TypeError, ValueError, DetachedViewError, StaleViewError, VerbsError
            As in `post_write`.
        """
        post_and_wait(self, IBV_WR_RDMA_WRITE, local, remote, timeout)

    def read(self, local, remote, timeout=10.0):
        """Read `remote` into `local`, and wait until it is done.

        Parameters
        ----------
        local : MemoryRegionView
        remote : RemoteView
            As in `post_read`.
        timeout : float, default 10
            Seconds.

        Raises
        ------
        WorkCompletionError, TimeoutError
            As in `write`.
        TypeError, ValueError, DetachedViewError, StaleViewError, VerbsError
            As in `post_write`.
        """
        post_and_wait(self, IBV_WR_RDMA_READ, local, remote, timeout)

    def post_writes(self, locals, remotes):
        """Start to write each of `locals` to the one of `remotes` at its place.

        They are posted by one ibv_post_send, and report one end together: a
        completion with the wr_id returned here, a `count`, and how many were
        `completed`. A queue pair completes its requests in order, so those are the
        first ones.

        Parameters
        ----------
        locals : ViewArray or list of MemoryRegionView
            Attached, of this queue pair's protection domain. Their registrations are
            pinned, and the memory held, until the completion is seen.
        remotes : RemoteViewArray or list of RemoteView
            As many, each of the same size as its local side.

        Returns
        -------
        int
            The wr_id of the last request, and of the completion.

        Raises
        ------
        TypeError, ValueError, DetachedViewError, StaleViewError
            The views don't fit, there are none, or more than `max_send_wr` or the
            completion queue's depth; nothing was posted.
        VerbsError
            The send queue or the completion queue has no room for all of them now
            (ENOMEM); nothing was posted. Or ibv_post_send failed: the text says how
            many it took.
        """
        return post_batch(self, IBV_WR_RDMA_WRITE, locals, remotes)

    def post_reads(self, locals, remotes):
        """Start to read each of `remotes` into the one of `locals` at its place.

        Parameters
        ----------
        locals : ViewArray or list of MemoryRegionView
            As in `post_writes`, with the right LOCAL_WRITE.
        remotes : RemoteViewArray or list of RemoteView
            As many, each of the same size as its local side.

        Returns
        -------
        int
            The wr_id of the last request, and of the completion.

        Raises
        ------
        TypeError, ValueError, DetachedViewError, StaleViewError, VerbsError
            As in `post_writes`.
        """
        return post_batch(self, IBV_WR_RDMA_READ, locals, remotes)

    def writes(self, locals, remotes, timeout=10.0):
        """Write each of `locals` to the one of `remotes`, and wait until all is done.

        There may be any number: they are posted as the queues have room.

        Parameters
        ----------
        locals : ViewArray or list of MemoryRegionView
        remotes : RemoteViewArray or list of RemoteView
            As in `post_writes`; none is nothing to do.
        timeout : float, default 10
            Seconds, for all of them.

        Raises
        ------
        WorkCompletionError
            One ended with a bad status; this breaks the queue pair. Its `completed`
            is how many were done: the first ones.
        TimeoutError
            They were not done in time; its `completed` is how many were. Those in
            flight stay so, and their memory pinned: one completion for them will come
            from the queue's `poll`. The others are not posted any more.
        TypeError, ValueError, DetachedViewError, StaleViewError
            The views don't fit; nothing was posted.
        VerbsError
            ibv_post_send failed, or the queue pair was closed by another thread
            (ECANCELED).
        """
        batch_and_wait(self, IBV_WR_RDMA_WRITE, locals, remotes, timeout)

    def reads(self, locals, remotes, timeout=10.0):
        """Read each of `remotes` into the one of `locals`, and wait until all is done.

        Parameters
        ----------
        locals : ViewArray or list of MemoryRegionView
        remotes : RemoteViewArray or list of RemoteView
            As in `post_reads`; none is nothing to do.
        timeout : float, default 10
            Seconds, for all of them.

        Raises
        ------
        WorkCompletionError, TimeoutError
            As in `writes`.
        TypeError, ValueError, DetachedViewError, StaleViewError, VerbsError
            As in `writes`.
        """
        batch_and_wait(self, IBV_WR_RDMA_READ, locals, remotes, timeout)

    def close(self):
        """Destroy the queue pair; a second call does nothing.

        Work in flight is given up: once this returns, the device uses none of its
        memory any more, and a thread that waits for it gets VerbsError ECANCELED.

        Raises
        ------
        VerbsError
            EBUSY: a thread is connecting it. Or ibv_destroy_qp failed.
        """
        cdef int error
        if not begin_close(
            &self.state, self.process, &self.children, "ibv_destroy_qp", "the queue pair"
        ):
            return
        with nogil:
            error = failure(self.pd.context.library.verbs.destroy_qp(self.handle))
        if error:
            self.state = OPEN
            raise_verbs_error(error, "ibv_destroy_qp", self.pd.context.name)
        self.state = CLOSED
        try:
            drain(self.cq)
        finally:
            leave(self)

    @property
    def state(self):
        """QueuePairState: asked from the device."""
        cdef ibv_qp_attr attr
        cdef ibv_qp_init_attr init
        cdef int error
        check_open(self, "QueuePair")
        self.children += 1
        with nogil:
            error = failure(
                self.pd.context.library.verbs.query_qp(
                    self.handle, &attr, IBV_QP_STATE, &init
                )
            )
        self.children -= 1
        if error:
            raise_verbs_error(error, "ibv_query_qp", self.pd.context.name)
        return QueuePairState(attr.qp_state)

    @property
    def qp_num(self):
        """int: the queue pair's number on its device."""
        return self.info.qp_num

    @property
    def in_flight(self):
        """int: work requests whose completion was not seen."""
        return self.newest - self.oldest

    @property
    def device_seconds(self):
        """float: seconds that `writes` and `reads` spent in ibv_post_send and waiting."""
        return self.device_time / 1e9


# What it refers to does not refer back, and a collection must not run for it: see
# WorkCompletion.
@cython.final
@cython.no_gc
cdef class Batch:
    """Requests that were posted together, and end with one completion."""


# What it refers to refers to nothing else. And so making one runs no collection: no
# Python code may come between a poll and the delivery of what was polled.
@cython.final
@cython.no_gc
cdef class WorkCompletion:
    """How a work request ended, or a batch of them.

    Attributes
    ----------
    wr_id : int
        What the post returned.
    status : Status
    opcode : str
        "RDMA_WRITE" or "RDMA_READ".
    vendor_err : int
        The device's own code for a bad status.
    byte_len : int
        Bytes moved by what was completed.
    qp_num : int
    local : MemoryRegionView or None
        The local range, detached; of a batch, the first one that failed.
    remote : RemoteView or None
        The remote range, likewise.
    count : int
        Work requests that it tells the end of: 1, or those of a batch.
    completed : int
        How many of them were done. They are the first ones, in the order of posting.
    first_error : WorkCompletion or None
        For a flushed request: what broke the queue pair.
    hint : str
        What to look at.
    """

    def __init__(self):
        raise TypeError("work completions come from CompletionQueue.poll")

    def __repr__(self):
        return f"<WorkCompletion {self}>"

    def __str__(self):
        text = f"{self.opcode} {self.wr_id:#x}: {self.status.name} ({int(self.status)})"
        if self.status != SUCCEEDED:
            text += f", vendor error {self.vendor_err:#x}"
        if self.count > 1:
            text += f", {self.completed} of {self.count} requests done"
        text += f", queue pair {self.qp_num:#x}"
        if self.local is not None:
            text += f", local {self.local!r}, remote {self.remote!r}"
        if self.hint:
            text += f". {self.hint}"
        if self.first_error is not None:
            text += f". First error of the queue pair: {self.first_error}"
        return text

    def __reduce__(self):
        return restore_completion, (
            self.wr_id,
            self.code,
            self.opcode,
            self.vendor_err,
            self.byte_len,
            self.qp_num,
            self.local,
            self.remote,
            self.first_error,
            self.gid,
            self.count,
            self.completed,
        )

    @property
    def status(self):
        """Status: how it ended."""
        return SUCCEEDED if self.code == IBV_WC_SUCCESS else Status(self.code)

    @property
    def ok(self):
        """bool: is the status SUCCESS?"""
        return self.code == IBV_WC_SUCCESS

    @property
    def hint(self):
        """str: what to look at; empty for a good status."""
        if self.code == IBV_WC_SUCCESS:
            return ""
        return _host.status_hint(self.status.name, self.opcode, gid_label(self.gid))


def restore_completion(
    wr_id,
    status,
    opcode,
    vendor_err,
    byte_len,
    qp_num,
    local,
    remote,
    first_error,
    gid,
    count,
    completed,
):
    """Rebuild a work completion: what pickle calls."""
    cdef WorkCompletion completion = WorkCompletion.__new__(WorkCompletion)
    completion.wr_id = wr_id
    completion.code = status
    completion.opcode = opcode
    completion.vendor_err = vendor_err
    completion.byte_len = byte_len
    completion.qp_num = qp_num
    completion.local = local
    completion.remote = remote
    completion.first_error = first_error
    completion.gid = gid
    completion.count = count
    completion.completed = completed
    return completion


def create_cq(Context context not None, depth):
    """Create a completion queue: what `Context.create_cq` calls."""
    cdef CompletionQueue cq = CompletionQueue.__new__(CompletionQueue)
    cdef uint64_t entries
    cdef int error
    if parse_u64(depth, "depth", &entries) or not (
        1 <= entries <= <uint64_t>context.limits.max_cqe
    ):
        raise ValueError(
            f"depth must be from 1 to {context.limits.max_cqe} (max_cqe of "
            f"{context.name}), not {number_text(depth)}"
        )
    check_open(context, "Context")
    context.children += 1
    with nogil:
        clear_errno()
        cq.handle = context.library.verbs.create_cq(
            context.handle, <int>entries, NULL, NULL, 0
        )
        error = last_errno() if cq.handle == NULL else 0
    if error:
        context.children -= 1
        raise_verbs_error(
            error, "ibv_create_cq", f"{context.name}, max_cq {context.limits.max_cq}"
        )
    cq.context = context
    cq.process = context.process
    cq.depth = cq.handle.cqe
    cq.state = OPEN
    return cq


def create_qp(
    ProtectionDomain pd not None,
    cq,
    max_send_wr,
    max_recv_wr,
    max_send_sge,
    max_recv_sge,
    max_inline_data,
    port,
    gid_index,
):
    """Create a queue pair: what `ProtectionDomain.create_qp` calls."""
    cdef QueuePair qp = QueuePair.__new__(QueuePair)
    cdef CompletionQueue completion_queue
    cdef Context context = pd.context
    cdef ibv_qp_init_attr init
    cdef ibv_port_attr port_attr
    cdef uint64_t port_number
    cdef int error
    check_open(pd, "ProtectionDomain")
    if type(cq) is not CompletionQueue:
        raise TypeError(f"cq is a CompletionQueue, not {type(cq).__name__}: {cq!r}")
    completion_queue = cq
    check_open(completion_queue, "CompletionQueue")
    if completion_queue.context is not context:
        raise ValueError("the completion queue is of another context")
    memset(&init, 0, sizeof(init))
    init.qp_type = IBV_QPT_RC
    init.send_cq = completion_queue.handle
    init.recv_cq = completion_queue.handle
    init.cap.max_send_wr = count("max_send_wr", max_send_wr, 1, context.limits.max_qp_wr)
    init.cap.max_recv_wr = count("max_recv_wr", max_recv_wr, 0, context.limits.max_qp_wr)
    init.cap.max_send_sge = count("max_send_sge", max_send_sge, 1, context.limits.max_sge)
    init.cap.max_recv_sge = count("max_recv_sge", max_recv_sge, 0, context.limits.max_sge)
    init.cap.max_inline_data = count(
        "max_inline_data", max_inline_data, 0, <uint64_t>UINT32_MAX
    )
    if parse_u64(port, "port", &port_number) or not (
        1 <= port_number <= context.limits.phys_port_cnt
    ):
        raise ValueError(
            f"{context.name} has ports 1 to {context.limits.phys_port_cnt}, "
            f"not {number_text(port)}"
        )
    qp.port = <uint8_t>port_number
    read_port(context, qp.port, &port_attr)
    qp.max_msg_sz = port_attr.max_msg_sz
    qp.ethernet = port_attr.link_layer == IBV_LINK_LAYER_ETHERNET
    qp.gid = choose_gid(context, qp.port, gid_index, qp.ethernet)

    # Another thread may have closed them while the port was asked.
    check_open(pd, "ProtectionDomain")
    check_open(completion_queue, "CompletionQueue")
    pd.children += 1
    completion_queue.children += 1
    with nogil:
        clear_errno()
        qp.handle = context.library.verbs.create_qp(pd.handle, &init)
        error = last_errno() if qp.handle == NULL else 0
    if error:
        pd.children -= 1
        completion_queue.children -= 1
        raise_verbs_error(
            error,
            "ibv_create_qp",
            f"{context.name}, max_send_wr {max_send_wr}, max_recv_wr {max_recv_wr}, "
            f"max_send_sge {max_send_sge}, max_recv_sge {max_recv_sge}, "
            f"max_inline_data {max_inline_data}; max_qp {context.limits.max_qp}",
        )
    # From here on the queue pair owns its handle, and its finaliser gives it back.
    qp.pd = pd
    qp.cq = completion_queue
    qp.process = pd.process
    qp.slot = -1
    qp.number = qp.handle.qp_num
    qp.state = OPEN
    qp.capacity = init.cap.max_send_wr
    qp.requests = <Request *>calloc(qp.capacity, sizeof(Request))
    if qp.requests == NULL:
        raise MemoryError()
    qp.slot = free_slot(completion_queue)
    completion_queue.slots[qp.slot] = <void *>qp
    qp.info = QueuePairInfo(
        qp.handle.qp_num,
        int.from_bytes(os.urandom(3), "big"),
        port_attr.lid,
        128 << port_attr.active_mtu,
        min(context.limits.max_qp_init_rd_atom, 255),
        min(context.limits.max_qp_rd_atom, 255),
        qp.gid.raw if qp.gid is not None else bytes(16),
    )
    initialise(qp)
    return qp


queue_makers.update(create_cq=create_cq, create_qp=create_qp)


cdef int initialise(QueuePair qp) except -1:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_INIT
    attr.port_num = qp.port
    # The memory regions' rights decide; atomics only where the device has them.
    attr.qp_access_flags = (
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ
    )
    if qp.pd.context.limits.atomic_cap != IBV_ATOMIC_NONE:
        attr.qp_access_flags |= IBV_ACCESS_REMOTE_ATOMIC
    return modify(
        qp,
        &attr,
        IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
        "to INIT",
    )


cdef int reset(QueuePair qp) except -1:
    cdef ibv_qp_attr attr
    memset(&attr, 0, sizeof(attr))
    attr.qp_state = IBV_QPS_RESET
    modify(qp, &attr, IBV_QP_STATE, "to RESET")
    return initialise(qp)


cdef int modify(QueuePair qp, ibv_qp_attr *attr, int mask, str what) except -1:
    cdef int error
    with nogil:
        error = failure(
            qp.pd.context.library.verbs.modify_qp(qp.handle, attr, mask)
        )
    if error:
        raise_verbs_error(error, "ibv_modify_qp", f"{qp!r} {what}")
    return 0


cdef object choose_gid(Context context, uint8_t port, object index, bint ethernet):
    cdef uint64_t wanted
    if not ethernet and index is None:
        return None
    table = context.gids(port)
    if index is not None:
        parse_u64(index, "gid_index", &wanted)
        for entry in table:
            if entry.index == index:
                return entry
        raise ValueError(
            f"port {port} of {context.name} has no GID at index {number_text(index)}: "
            + gid_table_text(table)
        )
    entry = _host.routable_gid(table)
    if entry is None:
        raise_verbs_error(
            EADDRNOTAVAIL,
            "choosing a GID",
            f"port {port} of {context.name} has no routable RoCE v2 entry: "
            + gid_table_text(table),
            "Give the interface an IP address, or choose one with gid_index=",
        )
    return entry


cdef str gid_table_text(list table):
    return "; ".join([gid_label(entry) for entry in table]) or "the table is empty"


cdef str gid_label(object entry):
    if entry is None:
        return "no GID"
    return f"GID {entry.index} ({entry.type}, {entry.address})"


cdef uint32_t count(str name, object number, uint64_t low, uint64_t high) except? 0:
    cdef uint64_t parsed
    if parse_u64(number, name, &parsed) or not low <= parsed <= high:
        raise ValueError(f"{name} must be from {low} to {high}, not {number_text(number)}")
    return <uint32_t>parsed


cdef Py_ssize_t free_slot(CompletionQueue cq) except -1:
    cdef Py_ssize_t i
    cdef Py_ssize_t grown
    cdef void **slots
    for i in range(cq.slot_count):
        if cq.slots[i] == NULL:
            return i
    if cq.slot_count >= SLOT_LIMIT:
        raise ValueError(f"{SLOT_LIMIT} queue pairs use this completion queue")
    grown = min(max(4, 2 * cq.slot_count), <Py_ssize_t>SLOT_LIMIT)
    slots = <void **>realloc(cq.slots, grown * sizeof(void *))
    if slots == NULL:
        raise MemoryError()
    i = cq.slot_count
    memset(slots + i, 0, (grown - i) * sizeof(void *))
    cq.slots = slots
    cq.slot_count = grown
    return i


cdef int leave_slot(QueuePair qp) noexcept:
    if qp.slot >= 0:
        qp.cq.slots[qp.slot] = NULL
        qp.slot = -1
    return 0


cdef int leave(QueuePair qp) except -1:
    """Give up what is in flight, and leave the parents."""
    cdef Request request
    cdef void *owner
    leave_slot(qp)
    while qp.oldest != qp.newest:
        request = take_oldest(qp)
        owner = request.view
        if request.batch != NULL:
            (<Batch>request.batch).ended += 1
            owner = batch_if_ended(<Batch>request.batch)
        if request.waiter != NULL:
            store_waiting(&request.waiter.state, ABANDONED)
        let_go(owner)
    qp.cq.children -= 1
    qp.pd.children -= 1
    return 0


cdef object post(
    QueuePair qp, ibv_wr_opcode opcode, object local, object remote, Waiter *waiter
):
    cdef MemoryRegionView view
    cdef RemoteView target
    cdef CompletionQueue cq = qp.cq
    cdef MemoryRegion mr
    cdef Request *request
    cdef ibv_send_wr wr
    cdef ibv_send_wr *bad_wr = NULL
    cdef ibv_sge sge
    cdef int error
    check_open(qp, "QueuePair")
    if type(local) is not MemoryRegionView:
        raise TypeError(
            f"the local side is a MemoryRegionView, not {type(local).__name__}: {local!r}"
        )
    if type(remote) is not RemoteView:
        raise TypeError(
            f"the remote side is a RemoteView, not {type(remote).__name__}: {remote!r}"
        )
    view = local
    target = remote
    check_attached(view, "the local side of a work request")
    mr = <MemoryRegion>view.registration
    check_sides(qp, opcode, mr, view, target)
    if not qp.connected:
        raise ValueError(f"{qp!r} is not connected: call connect() first")
    check_room(qp)

    memset(&wr, 0, sizeof(wr))
    request = describe(
        qp, qp.newest, opcode, &view.value, &target.value, mr, &wr, &sge
    )
    request.view = <void *>view
    request.waiter = waiter
    wr.send_flags = IBV_SEND_SIGNALED
    request.is_signalled = True
    # One post is shorter than giving the GIL away, so it keeps it; this is also what
    # makes the ring's order that of the device.
    clear_errno()
    error = failure(ibv_post_send(qp.handle, &wr, &bad_wr))
    if error:
        raise_verbs_error(
            error,
            "ibv_post_send",
            f"{OPCODES[opcode]} on {qp!r}, local {view!r}, remote {target!r}",
            first_error_text(qp),
        )
    Py_INCREF(view)
    mr.pins += 1
    qp.newest += 1
    cq.in_flight += 1
    return wr.wr_id


cdef Request *describe(
    QueuePair qp,
    uint64_t place,
    ibv_wr_opcode opcode,
    const rdmaview_view *local,
    const rdmaview_remote *remote,
    MemoryRegion mr,
    ibv_send_wr *wr,
    ibv_sge *sge,
) noexcept:
    """Write a work request for the device, and its entry in the ring for us."""
    cdef Request *request = &qp.requests[place % qp.capacity]
    qp.cq.posted += 1
    sge.addr = local.rdma_addr
    sge.length = <uint32_t>local.size
    sge.lkey = local.lkey
    wr.wr_id = <uint64_t>qp.slot << SLOT_SHIFT | qp.cq.posted
    wr.next = NULL
    wr.sg_list = sge
    wr.num_sge = 1
    wr.opcode = opcode
    wr.send_flags = 0
    wr.wr.rdma.remote_addr = remote.rdma_addr
    wr.wr.rdma.rkey = remote.rkey

    request.wr_id = wr.wr_id
    request.opcode = opcode
    request.local = local[0]
    request.remote = remote[0]
    request.mr = <void *>mr
    request.view = NULL
    request.batch = NULL
    request.waiter = NULL
    request.is_signalled = False
    return request


cdef int check_sides(
    QueuePair qp,
    ibv_wr_opcode opcode,
    MemoryRegion mr,
    MemoryRegionView view,
    RemoteView target,
    str where="",
) except -1:
    if fits(qp, opcode, mr, &view.value, &target.value):
        return 0
    if mr.pd is not qp.pd:
        raise ValueError(
            f"{where}the local side {view!r} is of another protection domain than the "
            "queue pair"
        )
    if view.value.size != target.value.size:
        raise ValueError(
            f"{where}the local side has {view.value.size} bytes, the remote side "
            f"{target.value.size}"
        )
    if view.value.size == 0:
        raise ValueError(f"{where}zero bytes can't be moved: both sides are empty")
    if view.value.size > qp.max_msg_sz:
        raise ValueError(
            f"{where}{view.value.size} bytes are over max_msg_sz {qp.max_msg_sz} of port "
            f"{qp.port} of {qp.pd.context.name}: move them in pieces"
        )
    if opcode == IBV_WR_RDMA_READ and not mr.rights & IBV_ACCESS_LOCAL_WRITE:
        raise ValueError(
            f"{where}a read lands in its local side, which needs Access.LOCAL_WRITE: {mr!r}"
        )
    raise ValueError(f"{where}{target!r} gives no right: its rkey is 0")


cdef inline bint fits(
    QueuePair qp,
    ibv_wr_opcode opcode,
    MemoryRegion mr,
    const rdmaview_view *local,
    const rdmaview_remote *remote,
) noexcept:
    return (
        mr.pd is qp.pd
        and local.size == remote.size
        and 0 < local.size <= qp.max_msg_sz
        and (opcode != IBV_WR_RDMA_READ or mr.rights & IBV_ACCESS_LOCAL_WRITE)
        and remote.rkey != 0
    )


cdef inline uint64_t room(QueuePair qp) noexcept:
    """How many requests the queues can hold more, in the worst case."""
    return min(
        qp.capacity - (qp.newest - qp.oldest),
        <uint64_t>(qp.cq.depth - qp.cq.in_flight),
    )


cdef int check_room(QueuePair qp, uint64_t wanted=1) except -1:
    """Never post what the queues can't hold: a full one would lose completions."""
    cdef str short = ""
    if room(qp) >= wanted:
        return 0
    if wanted > 1:
        short = f", {wanted} more don't fit"
    if qp.newest - qp.oldest + wanted > qp.capacity:
        raise_verbs_error(
            ENOMEM,
            "ibv_post_send",
            f"the send queue is full: {qp.newest - qp.oldest} of {qp.capacity} work "
            f"requests are in flight{short}",
            "Poll the completion queue, or create the queue pair with a larger "
            "max_send_wr",
        )
    raise_verbs_error(
        ENOMEM,
        "ibv_post_send",
        f"the completion queue may be full: {qp.cq.in_flight} work requests of at most "
        f"{qp.cq.depth} report to it{short}",
        "Poll it, or create it with a larger depth",
    )


cdef str first_error_text(QueuePair qp):
    if qp.first_error is None:
        return ""
    return f"First error of the queue pair: {qp.first_error}"


cdef int post_and_wait(
    QueuePair qp, ibv_wr_opcode opcode, object local, object remote, object timeout
) except -1:
    cdef Waiter waiter
    cdef CompletionQueue cq = qp.cq
    cdef int64_t deadline = parse_timeout(timeout)
    cdef int64_t spin_until
    cdef uint64_t wr_id
    cdef object completion = None
    waiter.state = PENDING
    waiter.bad = NULL
    wr_id = post(qp, opcode, local, remote, &waiter)
    try:
        spin_until = now() + SPIN_WITH_GIL
        while look(cq) >= 0 and waiter.state == PENDING and now() < spin_until:
            pass
        while waiter.state == PENDING and now() < deadline:
            watch(cq, deadline, &waiter)
        # What came while the clock was read still counts.
        if waiter.state == PENDING:
            look(cq)
    finally:
        if waiter.state == PENDING:
            forget_waiter(qp, wr_id)
        if waiter.bad != NULL:
            completion = <object>waiter.bad
            Py_DECREF(completion)
    if waiter.state == PENDING:
        raise TimeoutError(
            f"{OPCODES[opcode]} of {local.size} bytes was not done in {timeout} s. Work "
            f"request {wr_id:#x} is still in flight and keeps its memory pinned; its "
            "completion will come from the completion queue"
        )
    if waiter.state == ABANDONED:
        raise_verbs_error(
            errno.ECANCELED,
            "ibv_post_send",
            f"the queue pair was closed while {OPCODES[opcode]} {wr_id:#x} was in flight",
        )
    if completion is not None:
        raise WorkCompletionError(completion)
    return 0


cdef int forget_waiter(QueuePair qp, uint64_t wr_id) except -1:
    """The waiting thread goes: its request's completion is for `poll` then."""
    cdef uint64_t i = qp.oldest
    cdef Request *request
    while i != qp.newest:
        request = &qp.requests[i % qp.capacity]
        if request.wr_id == wr_id:
            request.waiter = NULL
        i += 1
    return 0


cdef Batch new_batch(
    QueuePair qp, ibv_wr_opcode opcode, object locals, object remotes
):
    """Check the two sides, all of them, and pin what is local."""
    cdef ViewArray local_views = as_view_array(locals, "the local sides")
    cdef RemoteViewArray targets = as_remote_view_array(remotes, "the remote sides")
    cdef Batch batch = Batch.__new__(Batch)
    cdef MemoryRegion mr
    cdef MemoryRegion checked = None
    cdef Py_ssize_t i
    if local_views.count != targets.count:
        raise ValueError(
            f"there are {local_views.count} local sides and {targets.count} remote ones"
        )
    batch.opcode = opcode
    batch.locals = local_views
    batch.remotes = targets
    batch.count = local_views.count
    # From here on no Python code runs until they are pinned, unless to raise an error.
    check_open(qp, "QueuePair")
    if not qp.connected:
        raise ValueError(f"{qp!r} is not connected: call connect() first")
    if batch.count and local_views.registrations is None:
        check_array_attached(local_views, "the local sides of work requests")
    for i in range(batch.count):
        mr = local_mr(batch, i)
        if mr is not checked:
            if mr.state != OPEN or not is_this_process(mr.process):
                check_attached(local_views.item(i), "the local side of a work request")
            checked = mr
        if not fits(qp, opcode, mr, local_at(batch, i), remote_at(batch, i)):
            check_sides(
                qp,
                opcode,
                mr,
                local_views.item(i),
                targets.item(i),
                f"request {i}: ",
            )
    pin_from(batch, 0, 1)
    return batch


cdef inline const rdmaview_view *local_at(Batch batch, Py_ssize_t i) noexcept:
    return rdmaview_at(batch.locals.start, batch.locals.stride, i)


cdef inline const rdmaview_remote *remote_at(Batch batch, Py_ssize_t i) noexcept:
    return rdmaview_remote_at(batch.remotes.start, batch.remotes.stride, i)


cdef MemoryRegion local_mr(Batch batch, Py_ssize_t i):
    """The registration of a local side; neighbours mostly have the same one."""
    cdef tuple registrations = batch.locals.registrations
    cdef uint64_t id = local_at(batch, i).id
    cdef MemoryRegion mr = <MemoryRegion>registrations[batch.mr_place]
    if mr.whole.id != id:
        batch.mr_place = find_registration(registrations, id)
        mr = <MemoryRegion>registrations[batch.mr_place]
    return mr


cdef int pin_from(Batch batch, Py_ssize_t start, Py_ssize_t pins) except -1:
    cdef MemoryRegion mr
    cdef Py_ssize_t i
    for i in range(start, batch.count):
        mr = local_mr(batch, i)
        mr.pins += pins
    return 0


cdef int end_posting(Batch batch) except -1:
    """No more of it will be posted: unpin what was not."""
    batch.is_open = False
    return pin_from(batch, batch.posted, -1)


cdef int post_chain(QueuePair qp, Batch batch, Py_ssize_t count, Waiter *waiter) except -1:
    """Post the next `count` requests of a batch, for which there is room, by one call."""
    cdef Py_ssize_t i
    cdef Py_ssize_t taken = count
    cdef ibv_send_wr *bad_wr = NULL
    cdef Request *request = NULL
    cdef int64_t start
    cdef int error
    if qp.chain == NULL:
        qp.chain = <ibv_send_wr *>calloc(qp.capacity, sizeof(ibv_send_wr))
    if qp.chain_sges == NULL:
        qp.chain_sges = <ibv_sge *>malloc(qp.capacity * sizeof(ibv_sge))
    if qp.chain == NULL or qp.chain_sges == NULL:
        raise MemoryError(f"no memory for a chain of {qp.capacity} work requests")
    for i in range(count):
        request = describe(
            qp,
            qp.newest + <uint64_t>i,
            batch.opcode,
            local_at(batch, batch.posted + i),
            remote_at(batch, batch.posted + i),
            local_mr(batch, batch.posted + i),
            &qp.chain[i],
            &qp.chain_sges[i],
        )
        request.batch = <void *>batch
        request.waiter = waiter
        qp.chain[i].next = &qp.chain[i + 1]
    qp.chain[count - 1].next = NULL
    qp.chain[count - 1].send_flags = IBV_SEND_SIGNALED
    request.is_signalled = True
    start = now()
    clear_errno()
    error = failure(ibv_post_send(qp.handle, qp.chain, &bad_wr))
    qp.device_time += now() - start
    # A device that names none of the chain may have taken all of it.
    if error and qp.chain <= bad_wr < qp.chain + count:
        taken = bad_wr - qp.chain
    if taken:
        # The ring's own reference, as long as some are in flight.
        if batch.ended == batch.posted:
            Py_INCREF(batch)
        batch.posted += taken
        batch.wr_id = qp.chain[taken - 1].wr_id
        qp.newest += <uint64_t>taken
        qp.cq.in_flight += taken
    if error:
        raise_verbs_error(
            error,
            "ibv_post_send",
            f"{OPCODES[batch.opcode]} on {qp!r}: of a chain of {count} requests "
            f"{taken} were taken, {batch.posted} of the {batch.count} in all; the next "
            f"is local {batch.locals.item(min(batch.posted, batch.count - 1))!r}, "
            f"remote {batch.remotes.item(min(batch.posted, batch.count - 1))!r}",
            first_error_text(qp),
        )
    return 0


cdef object post_batch(
    QueuePair qp, ibv_wr_opcode opcode, object locals, object remotes
):
    cdef Batch batch
    cdef uint64_t most
    check_open(qp, "QueuePair")
    batch = new_batch(qp, opcode, locals, remotes)
    try:
        if batch.count == 0:
            raise ValueError("there is nothing to post: both sides have no views")
        most = min(qp.capacity, <uint64_t>qp.cq.depth)
        if <uint64_t>batch.count > most:
            raise ValueError(
                f"{batch.count} requests are more than {most}, the lesser of the queue "
                f"pair's max_send_wr {qp.capacity} and the completion queue's depth "
                f"{qp.cq.depth}: post them in parts, or use writes and reads, which do"
            )
        check_room(qp, batch.count)
        post_chain(qp, batch, batch.count, NULL)
    finally:
        end_posting(batch)
    return batch.wr_id


cdef int batch_and_wait(
    QueuePair qp, ibv_wr_opcode opcode, object locals, object remotes, object timeout
) except -1:
    cdef Batch batch
    cdef Waiter waiter
    cdef CompletionQueue cq = qp.cq
    cdef int64_t deadline = parse_timeout(timeout)
    cdef int64_t start
    cdef bint is_late = False
    check_open(qp, "QueuePair")
    batch = new_batch(qp, opcode, locals, remotes)
    batch.is_open = True
    waiter.state = PENDING
    waiter.bad = NULL
    try:
        while waiter.state != ABANDONED and not is_late:
            while post_some(qp, batch, &waiter):
                pass
            if batch.ended == batch.posted and (
                batch.posted == batch.count or batch.failure is not None
            ):
                break
            if qp.state != OPEN and batch.ended == batch.posted:
                waiter.state = ABANDONED
                break
            start = now()
            is_late = start >= deadline
            waiter.state = PENDING
            if is_late:
                # What came while the clock was read still counts.
                look(cq)
            else:
                watch(cq, deadline, &waiter)
            qp.device_time += now() - start
    finally:
        end_posting(batch)
        forget_batch_waiter(qp, batch)
    if batch.failure is not None:
        raise WorkCompletionError(failed_batch(qp, batch))
    if batch.completed == batch.count:
        return 0
    text = f"{batch.completed} of {batch.count} {OPCODES[opcode]} requests were done"
    if waiter.state == ABANDONED:
        raise_verbs_error(
            errno.ECANCELED, "ibv_post_send", f"the queue pair was closed when {text}"
        )
    error = TimeoutError(
        f"{text} in {timeout} s; {batch.posted - batch.ended} are still in flight and "
        "keep their memory pinned"
        + (
            f": their completion {batch.wr_id:#x} will come from the completion queue"
            if batch.posted > batch.ended
            else ""
        )
    )
    error.completed = batch.completed
    raise error


cdef bint post_some(QueuePair qp, Batch batch, Waiter *waiter) except -1:
    """Post what there is room for, a good part of the queue at a time."""
    cdef uint64_t left = batch.count - batch.posted
    cdef uint64_t part = min(left, max(<uint64_t>1, qp.capacity // 4))
    cdef uint64_t free_places = room(qp)
    if not left or batch.failure is not None or qp.state != OPEN:
        return False
    # Alone it waits for a part to end; where others fill the queue, it takes what is.
    if free_places < part and (batch.ended != batch.posted or not free_places):
        return False
    post_chain(qp, batch, min(part, free_places), waiter)
    return True


cdef WorkCompletion failed_batch(QueuePair qp, Batch batch):
    """How a batch that was waited for ended, of all that was asked for."""
    cdef WorkCompletion completion = WorkCompletion.__new__(WorkCompletion)
    summarise(completion, qp, batch)
    completion.count = batch.count
    return completion


cdef int forget_batch_waiter(QueuePair qp, Batch batch) except -1:
    """The waiting thread goes: what is in flight ends in a completion for `poll`."""
    cdef uint64_t i = qp.oldest
    while i != qp.newest:
        if qp.requests[i % qp.capacity].batch == <void *>batch:
            qp.requests[i % qp.capacity].waiter = NULL
        i += 1
    return 0


cdef int look(CompletionQueue cq) except -1:
    """Take what the device has, with the GIL; return the number of completions."""
    cdef ibv_wc wcs[BATCH]
    cdef int found
    check_open(cq, "CompletionQueue")
    if claim(&cq.claimed):
        return 0
    found = ibv_poll_cq(cq.handle, BATCH, wcs)
    return dispatch(cq, wcs, found)


cdef int drain(CompletionQueue cq) except -1:
    """Take all that the device has; a queue that is broken says so at the next poll."""
    cdef ibv_wc wcs[BATCH]
    cdef int found
    while not claim(&cq.claimed):
        found = ibv_poll_cq(cq.handle, BATCH, wcs)
        if found <= 0:
            unclaim(&cq.claimed)
            break
        dispatch(cq, wcs, found)
    return 0


cdef int watch(CompletionQueue cq, int64_t deadline, Waiter *waiter) except -1:
    """Wait a while without the GIL for completions, then let signals in."""
    cdef ibv_wc wcs[BATCH]
    cdef int found
    cdef int64_t until = min(deadline, now() + SIGNAL_INTERVAL)
    cdef uint64_t seen = cq.seen_count
    check_open(cq, "CompletionQueue")
    cq.children += 1
    with nogil:
        found = poll_until(cq, wcs, until, waiter, seen)
    cq.children -= 1
    if found != 0:
        dispatch(cq, wcs, found)
    PyErr_CheckSignals()
    return 0


cdef int poll_until(
    CompletionQueue cq, ibv_wc *wcs, int64_t until, Waiter *waiter, uint64_t seen
) noexcept nogil:
    """Return what ibv_poll_cq did, and with the queue claimed unless that was 0."""
    cdef int64_t start = now()
    cdef int64_t clock
    cdef int found
    while True:
        if not claim(&cq.claimed):
            found = ibv_poll_cq(cq.handle, BATCH, wcs)
            if found != 0:
                return found
            unclaim(&cq.claimed)
        # Another thread may take this one's completion, and then says so here.
        if waiter != NULL and load_waiting(&waiter.state) != PENDING:
            return 0
        if waiter == NULL and load_count(&cq.seen_count) != seen:
            return 0
        clock = now()
        if clock >= until:
            return 0
        if clock - start > SPIN:
            usleep(50)


cdef int dispatch(CompletionQueue cq, ibv_wc *wcs, int found) except -1:
    """Tell the owners of what was polled, then let go of the queue and the memory."""
    cdef void *ended[BATCH]
    cdef int count = 0
    cdef int i
    try:
        if found < 0:
            raise_verbs_error(
                EIO,
                "ibv_poll_cq",
                f"{cq!r} answered {found}",
                "The completion queue is broken, perhaps overrun: make a new one",
            )
        for i in range(found):
            count += dispatch_one(cq, &wcs[i], &ended[count])
    finally:
        unclaim(&cq.claimed)
        # This may run finalisers, which may use the queue, so it comes last.
        for i in range(count):
            let_go(ended[i])
    return found


cdef int dispatch_one(
    CompletionQueue cq, const ibv_wc *wc, void **ended
) except -1:
    """Return 1 if `ended` is what to let go of, 0 if there is nothing."""
    cdef QueuePair qp
    cdef Py_ssize_t slot = <Py_ssize_t>(wc.wr_id >> SLOT_SHIFT)
    cdef uint64_t place
    if slot >= cq.slot_count or cq.slots[slot] == NULL:
        return 0
    qp = <QueuePair>cq.slots[slot]
    # Requests end in the order in which they were posted, and those that are not
    # signalled with the next one that is, or fails.
    place = qp.oldest
    while place != qp.newest and qp.requests[place % qp.capacity].wr_id != wc.wr_id:
        if qp.requests[place % qp.capacity].is_signalled:
            return 0
        place += 1
    if place == qp.newest:
        return 0
    ended[0] = NULL
    while qp.oldest != place:
        add_ended(ended, end_oldest(qp, NULL))
    add_ended(ended, end_oldest(qp, wc))
    return ended[0] != NULL


cdef int add_ended(void **ended, void *owner) except -1:
    """Several end at once only if a batch was posted in part: they form a chain."""
    cdef Batch batch
    if ended[0] == NULL:
        ended[0] = owner
    elif owner != NULL:
        batch = <Batch>ended[0]
        while type(batch.followed_by) is Batch:
            batch = <Batch>batch.followed_by
        batch.followed_by = <object>owner
        Py_DECREF(<object>owner)
    return 0


cdef void *end_oldest(QueuePair qp, const ibv_wc *wc) except? NULL:
    """End the oldest request, well if `wc` is NULL; return the owner it gives up."""
    cdef Request *request = &qp.requests[qp.oldest % qp.capacity]
    cdef Waiter *waiter = request.waiter
    cdef WorkCompletion completion = None
    cdef Request taken
    if request.batch != NULL:
        return end_in_batch(qp, <Batch>request.batch, request, wc)
    # What can fail comes first: from the moment that the request is taken, it is told.
    if waiter == NULL or wc.status != IBV_WC_SUCCESS:
        completion = new_completion(wc, qp, request)
    if waiter == NULL:
        put_aside(qp.cq, completion)
    taken = take_oldest(qp)
    if wc.status == IBV_WC_SUCCESS:
        qp.bytes_completed += taken.local.size
    if waiter != NULL:
        if completion is not None:
            Py_INCREF(completion)
            waiter.bad = <void *>completion
        store_waiting(&waiter.state, COMPLETED)
    return taken.view


cdef void *end_in_batch(
    QueuePair qp, Batch batch, Request *request, const ibv_wc *wc
) except? NULL:
    cdef bint is_good = wc == NULL or wc.status == IBV_WC_SUCCESS
    cdef WorkCompletion bad = batch.failure
    cdef WorkCompletion summary = None
    cdef Request taken
    # As above, what can fail comes first.
    if not is_good and bad is None:
        bad = new_completion(wc, qp, request)
    if batch.ended + 1 == batch.posted and not batch.is_open:
        summary = WorkCompletion.__new__(WorkCompletion)
        put_aside(qp.cq, summary)
    taken = take_oldest(qp)
    batch.ended += 1
    batch.failure = bad
    if is_good:
        batch.completed += 1
        batch.byte_len += taken.local.size
        qp.bytes_completed += taken.local.size
    if summary is not None:
        summarise(summary, qp, batch)
    if taken.waiter != NULL:
        store_waiting(&taken.waiter.state, COMPLETED)
    return batch_if_ended(batch)


cdef void *batch_if_ended(Batch batch) noexcept:
    """The batch, if the ring's reference to it is to be given up."""
    return <void *>batch if batch.ended == batch.posted else NULL


cdef int put_aside(CompletionQueue cq, WorkCompletion completion) except -1:
    cq.seen.append(completion)
    store_count(&cq.seen_count, cq.seen_count + 1)
    return 0


cdef int summarise(WorkCompletion summary, QueuePair qp, Batch batch) noexcept:
    """Fill in how a batch ended."""
    cdef WorkCompletion bad = batch.failure
    summary.wr_id = batch.wr_id
    summary.opcode = OPCODES[batch.opcode]
    summary.gid = qp.gid
    summary.qp_num = qp.number
    summary.byte_len = batch.byte_len
    summary.count = batch.posted
    summary.completed = batch.completed
    if bad is not None:
        summary.code = bad.code
        summary.vendor_err = bad.vendor_err
        summary.local = bad.local
        summary.remote = bad.remote
        summary.first_error = bad.first_error
    return 0


cdef WorkCompletion new_completion(const ibv_wc *wc, QueuePair qp, Request *request):
    cdef WorkCompletion completion = WorkCompletion.__new__(WorkCompletion)
    completion.wr_id = wc.wr_id
    completion.code = wc.status
    completion.gid = qp.gid
    completion.vendor_err = wc.vendor_err
    completion.qp_num = wc.qp_num
    completion.count = 1
    completion.opcode = OPCODES[request.opcode]
    completion.local = new_view(&request.local, None)
    completion.remote = new_remote_view(&request.remote)
    if wc.status == IBV_WC_SUCCESS:
        completion.byte_len = request.local.size
        completion.completed = 1
    else:
        completion.first_error = qp.first_error
        if qp.first_error is None and wc.status != IBV_WC_WR_FLUSH_ERR:
            qp.first_error = completion
    return completion


cdef Request take_oldest(QueuePair qp) noexcept:
    cdef Request request = qp.requests[qp.oldest % qp.capacity]
    qp.oldest += 1
    qp.cq.in_flight -= 1
    # Before its waiter is told, who may close the region at once.
    (<MemoryRegion>request.mr).pins -= 1
    return request


cdef int let_go(void *owner) except -1:
    """Let go of the memory; this may run finalisers."""
    if owner != NULL:
        Py_DECREF(<object>owner)
    return 0


cdef list take_seen(CompletionQueue cq, uint64_t limit):
    completions = []
    while cq.seen and <uint64_t>len(completions) < limit:
        completions.append(cq.seen.popleft())
    return completions


cdef int64_t parse_timeout(object timeout) except -1:
    cdef double seconds
    if isinstance(timeout, bool) or timeout is None:
        raise TypeError(f"timeout is a number of seconds, not {timeout!r}")
    try:
        seconds = timeout
    except OverflowError:
        seconds = INFINITY
    if not isfinite(seconds) or not 0 <= seconds <= 1e9:
        raise ValueError(
            f"timeout must be from 0 to 1e9 seconds, not {number_text(timeout)}: every "
            "wait ends"
        )
    return now() + <int64_t>(seconds * 1e9)


cdef inline int64_t now() noexcept nogil:
    """Nanoseconds of the monotonic clock."""
    cdef timespec clock
    clock_gettime(CLOCK_MONOTONIC, &clock)
    return <int64_t>clock.tv_sec * 1000000000 + clock.tv_nsec


cdef extern from *:
    """
    #define claim(taken) __atomic_exchange_n(taken, 1, __ATOMIC_ACQUIRE)
    #define unclaim(taken) __atomic_store_n(taken, 0, __ATOMIC_RELEASE)
    /* Set by one thread with the GIL, read by the waiting one without it. */
    #define load_waiting(state) __atomic_load_n(state, __ATOMIC_ACQUIRE)
    #define store_waiting(state, x) __atomic_store_n(state, x, __ATOMIC_RELEASE)
    #define load_count(count) __atomic_load_n(count, __ATOMIC_ACQUIRE)
    #define store_count(count, x) __atomic_store_n(count, x, __ATOMIC_RELEASE)
    """
    bint claim(bint *taken) noexcept nogil
    void unclaim(bint *taken) noexcept nogil
    Waiting load_waiting(Waiting *state) noexcept nogil
    void store_waiting(Waiting *state, Waiting x) noexcept nogil
    uint64_t load_count(uint64_t *count) noexcept nogil
    void store_count(uint64_t *count, uint64_t x) noexcept nogil
