# Written by tools/make-stubs from the docstrings: change those, not this.

from collections.abc import Iterable, Sequence
from enum import IntFlag
from types import TracebackType
from typing import Any, Literal, NamedTuple, SupportsIndex, final

import numpy.typing as npt
from typing_extensions import Buffer, Self, disjoint_base

from ._arrays import ViewArray
from ._memory import _SupportsDLPack
from ._queue import CompletionQueue, QueuePair
from ._view import MemoryRegionView, Registration

@disjoint_base
class Handle:
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    @property
    def closed(self) -> bool: ...

@final
class Context(Handle):
    def __enter__(self) -> Self: ...
    def alloc_pd(self) -> ProtectionDomain: ...
    def create_cq(self, depth: int = 256) -> CompletionQueue: ...
    def port(self, n: int = 1) -> PortAttributes: ...
    def gids(self, n: int = 1) -> list[GID]: ...
    def has_active_port(self) -> bool: ...
    def close(self) -> None: ...
    @property
    def kind(self) -> str: ...
    @property
    def attributes(self) -> DeviceAttributes: ...
    @property
    def name(self) -> str: ...
    @property
    def mr_count(self) -> int: ...
    @property
    def mr_bytes(self) -> int: ...

@final
class ProtectionDomain(Handle):
    def reg_mr(
        self,
        buffer: Buffer | npt.NDArray[Any] | _SupportsDLPack,
        access: Access | None = None,
        *,
        iova: SupportsIndex | None = None,
    ) -> MemoryRegion: ...
    def reg_mr_address(
        self,
        addr: SupportsIndex,
        length: SupportsIndex,
        access: Access = ...,
        *,
        iova: SupportsIndex | None = None,
        owner: object | None = None,
        is_device: bool = False,
    ) -> MemoryRegion: ...
    def reg_dmabuf_mr(
        self,
        fd: SupportsIndex,
        offset: SupportsIndex,
        length: SupportsIndex,
        access: Access,
        *,
        iova: SupportsIndex,
    ) -> MemoryRegion: ...
    def alloc_mr(
        self,
        size: SupportsIndex,
        access: Access | None = None,
        huge_pages: bool = False,
        numa_node: SupportsIndex | None = None,
        *,
        fd: SupportsIndex | None = None,
    ) -> MemoryRegion: ...
    def create_qp(
        self,
        cq: CompletionQueue,
        *,
        max_send_wr: int = 128,
        max_recv_wr: int = 1,
        max_send_sge: int = 1,
        max_recv_sge: int = 1,
        max_inline_data: int = 0,
        port: int = 1,
        gid_index: int | None = None,
    ) -> QueuePair: ...
    def close(self) -> None: ...
    @property
    def context(self) -> Context: ...

@disjoint_base
class Lender: ...

@final
class MemoryRegion(Registration):
    def __len__(self) -> int: ...
    def __getitem__(self, key: slice, /) -> MemoryRegionView: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...
    def view(
        self, offset: SupportsIndex = 0, size: SupportsIndex | None = None
    ) -> MemoryRegionView: ...
    def views(
        self,
        offsets: SupportsIndex | Sequence[int] | npt.NDArray[Any],
        sizes: SupportsIndex | Sequence[int] | npt.NDArray[Any],
    ) -> ViewArray: ...
    def view_of(
        self, array: Buffer | npt.NDArray[Any] | _SupportsDLPack
    ) -> MemoryRegionView: ...
    def views_of(
        self, arrays: Iterable[Buffer | npt.NDArray[Any] | _SupportsDLPack]
    ) -> ViewArray: ...
    def runs_of(
        self, array: Buffer | npt.NDArray[Any] | _SupportsDLPack
    ) -> ViewArray: ...
    def close(self) -> None: ...
    @property
    def addr(self) -> int: ...
    @property
    def length(self) -> int: ...
    @property
    def iova(self) -> int: ...
    @property
    def lkey(self) -> int: ...
    @property
    def rkey(self) -> int: ...
    @property
    def id(self) -> int: ...
    @property
    def access(self) -> Access: ...
    @property
    def closed(self) -> bool: ...
    @property
    def pd(self) -> ProtectionDomain: ...

@final
class LostRegion: ...

class Access(IntFlag):
    LOCAL_WRITE = 1
    REMOTE_WRITE = 2
    REMOTE_READ = 4
    REMOTE_ATOMIC = 8
    MW_BIND = 16
    ZERO_BASED = 32
    ON_DEMAND = 64
    HUGETLB = 128
    RELAXED_ORDERING = 1048576

DEVICE_FIELDS: str

class DeviceAttributes(NamedTuple):
    fw_ver: str
    node_guid: int
    sys_image_guid: int
    max_mr_size: int
    page_size_cap: int
    vendor_id: int
    vendor_part_id: int
    hw_ver: int
    max_qp: int
    max_qp_wr: int
    device_cap_flags: int
    max_sge: int
    max_sge_rd: int
    max_cq: int
    max_cqe: int
    max_mr: int
    max_pd: int
    max_qp_rd_atom: int
    max_res_rd_atom: int
    max_qp_init_rd_atom: int
    max_mw: int
    max_ah: int
    max_srq: int
    max_srq_wr: int
    max_srq_sge: int
    max_pkeys: int
    local_ca_ack_delay: int
    phys_port_cnt: int

PORT_FIELDS: str

class PortAttributes(NamedTuple):
    state: str
    max_mtu: int
    active_mtu: int
    gid_tbl_len: int
    port_cap_flags: int
    max_msg_sz: int
    pkey_tbl_len: int
    lid: int
    sm_lid: int
    active_width: int
    active_speed: int
    phys_state: int
    link_layer: str

class GID(NamedTuple):
    index: int  # type: ignore[assignment]
    type: str
    address: str
    raw: bytes

PORT_STATES: dict[int, str]
LINK_LAYERS: dict[int, str]
GID_TYPES: dict[int, str]
queue_makers: dict[str, Any]

class Device:
    name: str
    kind: Literal["kernel", "soft"]
    node: str
    def __init__(
        self, name: str, kind: Literal["kernel", "soft"], node: str
    ) -> None: ...
    @property
    def openable(self) -> bool: ...
    @property
    def reason(self) -> str: ...

def devices() -> list[Device]: ...
def open(name: str | None = None) -> Context: ...
def fork_init() -> None: ...
def open_any() -> Any: ...
def list_devices(kind: Any) -> tuple[list[Device], str]: ...
def refresh_limits() -> Any: ...
