# Written by tools/make-stubs from the docstrings: change those, not this.

from typing import Any

def cuda_segments(device: int | None = None) -> list[tuple[Any, ...]]: ...
