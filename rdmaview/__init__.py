"""Register memory once, slice it in nanoseconds, move it by RDMA."""

from . import softverbs
from ._errors import (
    DetachedViewError,
    DeviceNotFoundError,
    StaleViewError,
    VerbsError,
    WorkCompletionError,
)
from ._queue import (
    CompletionQueue,
    QueuePair,
    QueuePairInfo,
    QueuePairState,
    Status,
    WorkCompletion,
)
from ._verbs import (
    Access,
    Context,
    Device,
    MemoryRegion,
    ProtectionDomain,
    devices,
    fork_init,
    open,
)
from ._view import MemoryRegionView, RemoteView

__all__ = [
    "Access",
    "CompletionQueue",
    "Context",
    "DetachedViewError",
    "Device",
    "DeviceNotFoundError",
    "MemoryRegion",
    "MemoryRegionView",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairInfo",
    "QueuePairState",
    "RemoteView",
    "StaleViewError",
    "Status",
    "VerbsError",
    "WorkCompletion",
    "WorkCompletionError",
    "devices",
    "fork_init",
    "get_include",
    "open",
    "softverbs",
]

__version__ = "0.1.0"


def get_include():
    """Where ``rdmaview.h`` is, for a C compiler's include path.

    Returns
    -------
    str
    """
    return f"{__path__[0]}/include"
