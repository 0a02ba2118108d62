"""What finds segments for `SegmentTable.sync`: mappings of this process, an arena.

A scanner is anything that gives tuples ``(addr, size, device, *more)``; that of PyTorch
is `rdmaview.torch`.
"""

import mmap
import threading
from typing import NamedTuple

from . import _host

_STEP = 2 << 20


class Mapping(NamedTuple):
    """A line of /proc/self/maps (proc_pid_maps(5)).

    Attributes
    ----------
    start, end : int
        First address, and the one after the last.
    permissions : str
        As ``rw-p``: readable, writable, executable, and private or shared.
    offset : int
        Where in the file it begins, in bytes.
    device : str
        Of the file, as ``00:01``.
    inode : int
        Of the file; 0 if there is none.
    path : str
        Of the file, or a name such as ``[heap]``; empty for anonymous memory.
    """

    start: int
    end: int
    permissions: str
    offset: int
    device: str
    inode: int
    path: str


def mapped_segments(keep):
    """Find what is mapped in this process.

    Adjacent mappings of one file or of anonymous memory that are both kept are one
    segment: the kernel splits and joins them as it likes. That memory was unmapped
    and other memory mapped at its address is told by the file it is of. Anonymous
    memory of the same size can't be told so: name what is never unmapped, or a memfd.

    Parameters
    ----------
    keep : function of Mapping
        Says of each whether it is wanted.

    Returns
    -------
    list of tuple
        ``(addr, size, None, file, offset)`` of each, in the order of their addresses.
    """
    found = []
    for start, end, line in _host.mappings(0, 1 << 64):
        _, permissions, offset, device, inode, *path = line.split(" ", 5)
        mapping = Mapping(
            start, end, permissions, int(offset, 16), device, int(inode), "".join(path)
        )
        if not keep(mapping):
            continue
        file = f"{device} {inode}" if mapping.inode else mapping.path
        begin = mapping.offset if mapping.inode else 0
        if found:
            addr, size, _, before, offset = found[-1]
            after = offset + size if mapping.inode else 0
            if addr + size == start and (before, after) == (file, begin):
                found[-1] = (addr, end - addr, None, file, offset)
                continue
        found.append((start, end - start, None, file, begin))
    return found


class Arena:
    """Memory that is handed out from its start on, and is one segment that grows.

    It is never given back in parts: the pages are freed when the arena, its arrays and
    the segment in the table are gone. Threads may share it.

    Parameters
    ----------
    limit : int
        Bytes at most. They cost address space, and pages only where they are used.
    step : int, default 2 MiB
        Bytes that the segment grows by: each growth is a registration.
    """

    def __init__(self, limit, step=_STEP):
        if limit < 1 or step < 1:
            raise ValueError(f"limit and step must be positive: {limit}, {step}")
        import numpy as np

        self._memory = mmap.mmap(-1, limit, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._bytes = np.frombuffer(self._memory, np.uint8)
        self._lock = threading.Lock()
        self._step = step
        self._used = 0

    def __repr__(self):
        return f"<Arena of {self._used} of {len(self._bytes)} bytes>"

    def take(self, size, align=64):
        """Hand out memory; `segments` has it from then on.

        Parameters
        ----------
        size : int
            Bytes.
        align : int, default 64
            What the address is a multiple of: a power of two, a page at most.

        Returns
        -------
        numpy.ndarray of uint8
            Zeros.

        Raises
        ------
        ValueError
            `size` is negative, or `align` no power of two up to a page.
        MemoryError
            Less than that is left of the limit.
        """
        if size < 0 or align not in (1 << bits for bits in range(13)):
            raise ValueError(
                f"size must be from 0 on and align a power of two up to 4096: {size}, "
                f"{align}"
            )
        with self._lock:
            start = (self._used + align - 1) & -align
            if start + size > len(self._bytes):
                raise MemoryError(
                    f"{size} bytes do not fit in what is left of {len(self._bytes)}: "
                    f"{self._used} are used"
                )
            self._used = start + size
        return self._bytes[start : start + size]

    def segments(self):
        """Tell what was handed out, rounded up to a step.

        Returns
        -------
        list of tuple
            ``(addr, size, None, memory)``, or none as long as nothing was taken.
        """
        size = -(-self._used // self._step) * self._step
        if not size:
            return []
        size = min(size, len(self._bytes))
        return [(self._bytes.ctypes.data, size, None, self._memory)]
