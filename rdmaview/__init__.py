"""Register memory once, slice it in nanoseconds, move it by RDMA."""

from . import _arrays, softverbs
from ._arrays import RemoteViewArray, ViewArray
from ._cache import RegistrationCache
from ._errors import (
    DetachedViewError,
    DeviceNotFoundError,
    NotRegisteredError,
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
from .segments import Segment, SegmentTable, SyncReport

__all__ = [
    "REMOTE_DTYPE",
    "VIEW_DTYPE",
    "Access",
    "CompletionQueue",
    "Context",
    "DetachedViewError",
    "Device",
    "DeviceNotFoundError",
    "MemoryRegion",
    "MemoryRegionView",
    "NotRegisteredError",
    "ProtectionDomain",
    "QueuePair",
    "QueuePairInfo",
    "QueuePairState",
    "RegistrationCache",
    "RemoteView",
    "RemoteViewArray",
    "Segment",
    "SegmentTable",
    "StaleViewError",
    "Status",
    "SyncReport",
    "VerbsError",
    "ViewArray",
    "WorkCompletion",
    "WorkCompletionError",
    "devices",
    "fork_init",
    "get_include",
    "open",
    "softverbs",
]

__version__ = "0.1.0"


def __getattr__(name):
    # NumPy is imported when it is first needed: most of an import's time would be its.
    if name == "VIEW_DTYPE":
        value = _arrays.view_dtype()
    elif name == "REMOTE_DTYPE":
        value = _arrays.remote_dtype()
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def get_include():
    """Where ``rdmaview.h`` is, for a C compiler's include path.

    Returns
    -------
    str
    """
    return f"{__path__[0]}/include"
