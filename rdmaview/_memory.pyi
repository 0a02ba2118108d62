# Written by tools/make-stubs from the docstrings: change those, not this.

from typing import Any, Protocol, final

@final
class HostMemory: ...

@final
class Pages: ...

class _SupportsDLPack(Protocol):
    def __dlpack_device__(self) -> tuple[Any, Any]: ...
