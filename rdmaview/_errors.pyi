# Written by tools/make-stubs from the docstrings: change those, not this.

from ._queue import Status, WorkCompletion
from ._view import MemoryRegionView, RemoteView

class VerbsError(OSError):
    verb: str
    detail: str
    hint: str
    def __init__(
        self, errno: int, verb: str, detail: str = "", hint: str = ""
    ) -> None: ...

class DeviceNotFoundError(OSError):
    def __init__(self, text: str) -> None: ...

class StaleViewError(ValueError): ...
class NotRegisteredError(LookupError): ...
class DetachedViewError(ValueError): ...

class WorkCompletionError(OSError):
    completion: WorkCompletion
    status: Status
    vendor_err: int
    local: MemoryRegionView
    remote: RemoteView
    first_error: WorkCompletion | None
    completed: int
    def __init__(self, completion: WorkCompletion) -> None: ...
