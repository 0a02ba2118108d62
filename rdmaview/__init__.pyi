# Written by tools/make-stubs from the docstrings: change those, not this.

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
__version__: str

def get_include() -> str: ...
