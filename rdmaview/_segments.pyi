# Written by tools/make-stubs from the docstrings: change those, not this.

from collections.abc import Iterable, Sequence
from typing import Any, Literal, SupportsIndex, final, overload

import numpy.typing as npt
from typing_extensions import Buffer, disjoint_base

from ._arrays import ViewArray
from ._memory import _SupportsDLPack
from ._verbs import MemoryRegion
from ._view import MemoryRegionView

@final
class PieceList: ...

@disjoint_base
class SegmentIndex:
    @overload
    def view_at(
        self, addr: SupportsIndex, size: SupportsIndex, split: Literal[False] = False
    ) -> MemoryRegionView: ...
    @overload
    def view_at(
        self, addr: SupportsIndex, size: SupportsIndex, split: Literal[True]
    ) -> ViewArray: ...
    @overload
    def view_at(
        self, addr: SupportsIndex, size: SupportsIndex, split: bool
    ) -> MemoryRegionView | ViewArray: ...
    @overload
    def view_of(
        self,
        array: Buffer | npt.NDArray[Any] | _SupportsDLPack,
        split: Literal[False] = False,
    ) -> MemoryRegionView: ...
    @overload
    def view_of(
        self, array: Buffer | npt.NDArray[Any] | _SupportsDLPack, split: Literal[True]
    ) -> ViewArray: ...
    @overload
    def view_of(
        self, array: Buffer | npt.NDArray[Any] | _SupportsDLPack, split: bool
    ) -> MemoryRegionView | ViewArray: ...
    def runs_of(
        self, array: Buffer | npt.NDArray[Any] | _SupportsDLPack, split: bool = False
    ) -> ViewArray: ...
    def views_of(
        self,
        arrays: Iterable[Buffer | npt.NDArray[Any] | _SupportsDLPack],
        split: bool = False,
    ) -> ViewArray: ...
    def views_at(
        self,
        addrs: SupportsIndex | Sequence[int] | npt.NDArray[Any],
        sizes: SupportsIndex | Sequence[int] | npt.NDArray[Any],
        split: bool = False,
    ) -> ViewArray: ...

@final
class Split: ...

@final
class Extents: ...

def hold(buffer: Any) -> Any: ...
def close_block(table: Any, kind: Any) -> Any: ...
def rights_of(rights: Any) -> Any: ...
def is_pinned(mr: MemoryRegion) -> Any: ...
