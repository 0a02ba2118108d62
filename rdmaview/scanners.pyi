# Written by tools/make-stubs from the docstrings: change those, not this.

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy.typing as npt

class Mapping(NamedTuple):
    start: int
    end: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str

def mapped_segments(keep: Callable[[Mapping], object]) -> list[tuple[Any, ...]]: ...

class Arena:
    def __init__(self, limit: int, step: int = 2097152) -> None: ...
    def take(self, size: int, align: int = 64) -> npt.NDArray[Any]: ...
    def segments(self) -> list[tuple[Any, ...]]: ...
