# Written by tools/make-stubs from the docstrings: change those, not this.

from enum import IntEnum
from struct import Struct
from typing import Any, NamedTuple, final

import numpy.typing as npt
from typing_extensions import Buffer

from ._arrays import RemoteViewArray, ViewArray
from ._verbs import GID, Context, Handle, ProtectionDomain
from ._view import MemoryRegionView, RemoteView

@final
class CompletionQueue(Handle):
    def poll(self, n: int = ...) -> list[WorkCompletion]: ...
    def wait(self, timeout: float = 10.0, n: int = ...) -> list[WorkCompletion]: ...
    def close(self) -> None: ...
    @property
    def context(self) -> Context: ...
    @property
    def depth(self) -> int: ...

@final
class QueuePair(Handle):
    def connect(self, peer: QueuePairInfo) -> None: ...
    def post_write(self, local: MemoryRegionView, remote: RemoteView) -> int: ...
    def post_read(self, local: MemoryRegionView, remote: RemoteView) -> int: ...
    def write(
        self, local: MemoryRegionView, remote: RemoteView, timeout: float = 10.0
    ) -> None: ...
    def read(
        self, local: MemoryRegionView, remote: RemoteView, timeout: float = 10.0
    ) -> None: ...
    def post_writes(
        self,
        locals: ViewArray | list[MemoryRegionView],
        remotes: RemoteViewArray | list[RemoteView],
    ) -> int: ...
    def post_reads(
        self,
        locals: ViewArray | list[MemoryRegionView],
        remotes: RemoteViewArray | list[RemoteView],
    ) -> int: ...
    def writes(
        self,
        locals: ViewArray | list[MemoryRegionView],
        remotes: RemoteViewArray | list[RemoteView],
        timeout: float = 10.0,
    ) -> None: ...
    def reads(
        self,
        locals: ViewArray | list[MemoryRegionView],
        remotes: RemoteViewArray | list[RemoteView],
        timeout: float = 10.0,
    ) -> None: ...
    def close(self) -> None: ...
    @property
    def state(self) -> QueuePairState: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def in_flight(self) -> int: ...
    @property
    def device_seconds(self) -> float: ...
    @property
    def pd(self) -> ProtectionDomain: ...
    @property
    def cq(self) -> CompletionQueue: ...
    @property
    def port(self) -> int: ...
    @property
    def gid(self) -> GID | None: ...
    @property
    def info(self) -> QueuePairInfo: ...
    @property
    def connected(self) -> bool: ...
    @property
    def max_msg_sz(self) -> int: ...
    @property
    def first_error(self) -> WorkCompletion | None: ...
    @property
    def bytes_completed(self) -> int: ...

@final
class Batch: ...

@final
class WorkCompletion:
    @property
    def status(self) -> Status: ...
    @property
    def ok(self) -> bool: ...
    @property
    def hint(self) -> str: ...
    @property
    def wr_id(self) -> int: ...
    @property
    def opcode(self) -> str: ...
    @property
    def vendor_err(self) -> int: ...
    @property
    def byte_len(self) -> int: ...
    @property
    def qp_num(self) -> int: ...
    @property
    def local(self) -> MemoryRegionView | None: ...
    @property
    def remote(self) -> RemoteView | None: ...
    @property
    def count(self) -> int: ...
    @property
    def completed(self) -> int: ...
    @property
    def first_error(self) -> WorkCompletion | None: ...

queue_makers: dict[str, Any]

class Status(IntEnum):
    SUCCESS = 0
    LOC_LEN_ERR = 1
    LOC_QP_OP_ERR = 2
    LOC_EEC_OP_ERR = 3
    LOC_PROT_ERR = 4
    WR_FLUSH_ERR = 5
    MW_BIND_ERR = 6
    BAD_RESP_ERR = 7
    LOC_ACCESS_ERR = 8
    REM_INV_REQ_ERR = 9
    REM_ACCESS_ERR = 10
    REM_OP_ERR = 11
    RETRY_EXC_ERR = 12
    RNR_RETRY_EXC_ERR = 13
    LOC_RDD_VIOL_ERR = 14
    REM_INV_RD_REQ_ERR = 15
    REM_ABORT_ERR = 16
    INV_EECN_ERR = 17
    INV_EEC_STATE_ERR = 18
    FATAL_ERR = 19
    RESP_TIMEOUT_ERR = 20
    GENERAL_ERR = 21
    TM_ERR = 22
    TM_RNDV_INCOMPLETE = 23

class QueuePairState(IntEnum):
    RESET = 0
    INIT = 1
    RTR = 2
    RTS = 3
    SQD = 4
    SQE = 5
    ERR = 6
    UNKNOWN = 7

INFO_WIRE: Struct
INFO_MAGIC: bytes

class QueuePairInfo(NamedTuple):
    qp_num: int
    psn: int
    lid: int
    mtu: int
    max_rd_atomic: int
    max_dest_rd_atomic: int
    gid: bytes
    def to_bytes(self) -> bytes: ...
    @classmethod
    def from_bytes(cls, data: Buffer | npt.NDArray[Any]) -> QueuePairInfo: ...

def restore_completion(
    wr_id: Any,
    status: Any,
    opcode: Any,
    vendor_err: Any,
    byte_len: Any,
    qp_num: Any,
    local: Any,
    remote: Any,
    first_error: Any,
    gid: Any,
    count: Any,
    completed: Any,
) -> Any: ...
def create_cq(context: Context, depth: Any) -> Any: ...
def create_qp(
    pd: ProtectionDomain,
    cq: Any,
    max_send_wr: Any,
    max_recv_wr: Any,
    max_send_sge: Any,
    max_recv_sge: Any,
    max_inline_data: Any,
    port: Any,
    gid_index: Any,
) -> Any: ...
