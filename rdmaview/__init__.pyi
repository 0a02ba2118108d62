# Written by tools/make-stubs from the docstrings: change those, not this.

import numpy as np

from . import softverbs
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
__version__: str
REMOTE_DTYPE: np.dtype[np.void]
VIEW_DTYPE: np.dtype[np.void]

def get_include() -> str: ...
