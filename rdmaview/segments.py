"""Registered segments of memory, found by address: SegmentTable."""

import errno
import threading
import weakref
from bisect import bisect_left, insort
from contextlib import contextmanager

from ._errors import VerbsError
from ._segments import SegmentIndex, close_block, hold, is_pinned, rights_of
from ._verbs import Access, MemoryRegion, ProtectionDomain

_WRITES = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_ATOMIC


class Segment:
    """A range of memory that a `SegmentTable` has registered.

    Attributes
    ----------
    addr : int
        Virtual address of the first byte.
    size : int
        Bytes.
    access : Access
        The rights of its registration.
    count : int
        How often it was registered, less how often it was removed; 0 when it is gone.
    pieces : tuple of MemoryRegionView
        The views that make it up, in the order of their addresses: one, or more if it
        is over the device's max_mr_size.
    """

    __slots__ = (
        "__weakref__",
        "_generation",
        "access",
        "addr",
        "count",
        "pieces",
        "size",
    )

    def __init__(self, addr, size, access, pieces):
        self.addr = addr
        self.size = size
        self.access = access
        self.pieces = pieces
        self.count = 1
        self._generation = ()

    def __repr__(self):
        times = f" x{self.count}" if self.count != 1 else ""
        return f"<Segment [{self.addr:#x}, {self.addr + self.size:#x}){times}>"


class SyncReport:
    """What `SegmentTable.sync` did.

    Attributes
    ----------
    added : list of Segment
        Registered, where none began before or what began there is another one now.
    grown : list of Segment
        Registered anew, because the segment that began there was smaller.
    retired : list of Segment
        No longer found: the smaller ones of the grown, shrunk ones, and those gone.
    """

    __slots__ = ("added", "grown", "retired")

    def __init__(self, added, grown, retired):
        self.added = added
        self.grown = grown
        self.retired = retired

    def __repr__(self):
        return (
            f"<SyncReport {len(self.added)} added, {len(self.grown)} grown, "
            f"{len(self.retired)} retired>"
        )


class SegmentTable(SegmentIndex):
    """Many registered segments of memory, and the views of what lies in them.

    Ranges may overlap, by one rule. The same range again is the same segment, counted.
    A range inside a registered one is a slice of that one's registration. A range that
    overlaps another in part is registered separately. A registration ends when the last
    segment that uses it is removed.

    Threads may share a table. Look-ups take no lock.

    Parameters
    ----------
    pd : ProtectionDomain
    access : Access, optional
        The rights of each registration. Default: LOCAL_WRITE for writable memory, none
        for read-only memory.

    Attributes
    ----------
    stats : dict of str to int
    """

    def __init__(self, pd, access=None):
        if not isinstance(pd, ProtectionDomain):
            raise TypeError(f"pd must be a ProtectionDomain, not {type(pd).__name__}")
        self._pd = pd
        self._access = None if access is None else Access(access)
        self._lock = threading.RLock()
        self._is_changing = False
        # By (addr, size), by the adopted region's id, and by addr.
        self._registered = {}
        self._adopted = {}
        self._scanned = {}
        # What another piece contains, sorted: (addr, size, id, view).
        self._hidden = []
        # By region's id: the region, how many pieces use it, is it the table's own?
        self._users = {}
        self._retired = weakref.WeakSet()

    def __enter__(self):
        return self

    def __exit__(self, kind, error, traceback):
        close_block(self, kind)

    def __repr__(self):
        return f"<SegmentTable of {len(self)} segments, {len(self._retired)} retired>"

    def __len__(self):
        return len(self._registered) + len(self._adopted) + len(self._scanned)

    def __iter__(self):
        """Iterate over the segments, in the order of their addresses.

        Returns
        -------
        Iterator of Segment
        """
        everyone = [
            *self._registered.values(),
            *self._adopted.values(),
            *self._scanned.values(),
        ]
        return iter(sorted(everyone, key=lambda segment: (segment.addr, segment.size)))

    def register(self, buffer):
        """Register the memory of an object; it is held until the segment is removed.

        Parameters
        ----------
        buffer : object with host memory
            As for `ProtectionDomain.reg_mr`.

        Returns
        -------
        Segment
            One that is there already, if it has the same range.

        Raises
        ------
        ValueError
            It is empty, or overlaps a segment that has other rights.
        BufferError
            It is not contiguous, or read-only and the rights would write.
        VerbsError
            ibv_reg_mr failed. The table is as it was.
        """
        addr, size, readonly, memory = hold(buffer)
        access = self._rights(readonly)
        if readonly and access & _WRITES:
            raise BufferError(
                f"the buffer of this {type(buffer).__name__} is read-only, so it can't "
                f"be registered with {rights_of(access)}"
            )
        with self._changing():
            same = self._registered.get((addr, size))
            if same is not None and access & ~same.access == 0:
                same.count += 1
                return same
            pieces = self._cover(addr, size, access)
            if pieces is None:
                pieces = self._register_pieces(addr, size, access, memory)
            segment = Segment(addr, size, access, pieces)
            self._registered[addr, size] = segment
            self._add(segment)
            return segment

    def adopt(self, mr):
        """Find views in a region that somebody else has registered, and will close.

        Parameters
        ----------
        mr : MemoryRegion

        Returns
        -------
        Segment

        Raises
        ------
        ValueError
            It overlaps a segment that has other rights, or is of another protection
            domain.
        StaleViewError
            The region is closed.
        """
        if not isinstance(mr, MemoryRegion):
            raise TypeError(f"mr must be a MemoryRegion, not {type(mr).__name__}")
        if mr.pd is not self._pd:
            raise ValueError(f"{mr!r} is of another protection domain than the table")
        piece = mr.view()
        with self._changing():
            same = self._adopted.get(mr.id)
            if same is not None:
                same.count += 1
                return same
            self._check_overlaps(mr.addr, mr.length, mr.access, exact=True)
            segment = Segment(mr.addr, mr.length, mr.access, (piece,))
            self._adopted[mr.id] = segment
            self._add(segment, is_own=False)
            return segment

    def remove(self, segment):
        """Undo one `register` or `adopt`; the last one deregisters, unless adopted.

        Parameters
        ----------
        segment : Segment

        Raises
        ------
        ValueError
            The table does not have it, or not any more.
        VerbsError
            EBUSY: work in flight uses its memory. The segment is as it was.
        """
        with self._changing():
            place, key = self._place_of(segment)
            if segment.count > 1:
                segment.count -= 1
                return
            self._check_idle([segment])
            del place[key]
            self._close(self._take_out(segment))

    def sync(self, segments):
        """Have the segments that a scanner found, and no others that it found before.

        What was registered or adopted otherwise stays. Of a segment that is retired the
        views keep their registration, until the last of them is gone or `reap` is
        called; it is found no more. It is all or nothing. Scanners are in
        `rdmaview.scanners` and `rdmaview.torch`.

        Parameters
        ----------
        segments : iterable of tuple
            ``(addr, size)``, ``(addr, size, device)`` or ``(addr, size, device, *more)``
            of each. `device` is None or "cpu" for host memory, else of device memory,
            as ``"cuda:0"``: views of that give no array. Whatever is in `more` tells the
            memory that is there from other memory at its address: if it differs from
            the last time, or `device` does, the segment is registered anew. It is kept
            for as long as the segment is in the table, and so may own the memory.

        Returns
        -------
        SyncReport

        Raises
        ------
        ValueError
            Two begin at one address, or one is empty or overlaps a segment that has
            other rights.
        TypeError
            A device is no text.
        VerbsError
            A registration failed. The table is as it was.
        """
        wanted = {}
        for addr, size, *more in segments:
            if addr in wanted:
                raise ValueError(f"two segments begin at {addr:#x}")
            wanted[addr] = (size, tuple(more))
        access = self._rights(readonly=False)
        with self._changing():
            old = self._scanned
            kept = {
                addr: segment
                for addr, segment in old.items()
                if wanted.get(addr) == (segment.size, segment._generation)
            }
            fresh = {}
            try:
                for addr, (size, generation) in wanted.items():
                    if addr in kept:
                        continue
                    self._check_overlaps(addr, size, access, exact=True)
                    pieces = self._register_pieces(
                        addr, size, access, is_device=_is_device(*generation[:1])
                    )
                    fresh[addr] = Segment(addr, size, access, pieces)
                    fresh[addr]._generation = generation
            except BaseException:
                for segment in fresh.values():
                    for piece in segment.pieces:
                        piece.mr.close()
                raise
            retired = [segment for addr, segment in old.items() if addr not in kept]
            self._exchange(retired, list(fresh.values()))
            self._scanned = kept | fresh
            grown = [
                segment
                for addr, segment in fresh.items()
                if addr in old
                and old[addr].size < segment.size
                and old[addr]._generation == segment._generation
            ]
            added = [segment for segment in fresh.values() if segment not in grown]
            return SyncReport(added, grown, retired)

    def reap(self):
        """Deregister what is retired, though views of it be left: they become stale.

        What work in flight uses stays.

        Returns
        -------
        int
            How many regions were deregistered.
        """
        with self._changing():
            freed = 0
            for mr in list(self._retired):
                if is_pinned(mr):
                    continue
                try:
                    mr.close()
                except VerbsError as error:
                    if error.errno != errno.EBUSY:
                        raise
                else:
                    self._retired.discard(mr)
                    freed += 1
            return freed

    def close(self):
        """Deregister all, except what was adopted; a second call does nothing.

        Raises
        ------
        VerbsError
            EBUSY: work in flight uses the memory of a segment. Nothing was changed.
        """
        with self._changing():
            segments = list(self)
            self._check_idle(segments, self._retired)
            self._exchange(segments, [])
            for place in (self._registered, self._adopted, self._scanned):
                place.clear()
            self._close(list(self._retired))

    @property
    def stats(self):
        """What the table has.

        ``segments``, ``registrations``, ``bytes`` (that are registered), ``adopted``,
        ``retired`` (registrations) and ``retired_bytes``.
        """
        with self._changing():
            own = [mr for mr, _, is_own in self._users.values() if is_own]
            retired = [mr for mr in self._retired if not mr.closed]
            return {
                "segments": len(self),
                "registrations": len(own),
                "bytes": sum(mr.length for mr in own),
                "adopted": len(self._adopted),
                "retired": len(retired),
                "retired_bytes": sum(mr.length for mr in retired),
            }

    @contextmanager
    def _changing(self):
        """Change the table, one thread at a time."""
        self._check_process()
        with self._lock:
            if self._is_changing:
                raise RuntimeError(
                    "the table is changed from within a change of it, by a finaliser or "
                    "a signal handler"
                )
            self._is_changing = True
            try:
                yield
            finally:
                self._is_changing = False

    def _rights(self, readonly):
        if self._access is not None:
            return self._access
        return Access(0) if readonly else Access.LOCAL_WRITE

    def _check_overlaps(self, addr, size, access, exact=False):
        """Refuse a range that overlaps another with rights of which one lacks some."""
        for piece in self._overlapping(addr, size):
            rights = piece.mr.access
            start, end = piece.virtual_addr, piece.virtual_addr + piece.size
            inside = start <= addr and addr + size <= end
            if rights != access and (exact or not inside or access & ~rights):
                raise ValueError(
                    f"{size} bytes at {addr:#x} with {rights_of(access)} overlap a "
                    f"segment with {rights_of(rights)}, [{start:#x}, {end:#x}): "
                    "overlapping segments have the same rights"
                )

    def _cover(self, addr, size, access):
        """Slice a range out of the registrations of one segment that contains it."""
        self._check_overlaps(addr, size, access)
        pieces = [piece for piece in self._overlapping(addr, size) if size]
        if len(pieces) > 1:
            large = [
                segment
                for segment in self
                if len(segment.pieces) > 1
                and segment.addr <= addr
                and addr + size <= segment.addr + segment.size
            ]
            pieces = large[0].pieces if large else []
        cut = []
        for piece in pieces:
            first = max(addr, piece.virtual_addr)
            end = min(addr + size, piece.virtual_addr + piece.size)
            if first < end:
                cut.append(piece[first - piece.virtual_addr : end - piece.virtual_addr])
        if cut and sum(map(len, cut)) == size:
            return tuple(cut)
        return None

    def _register_pieces(self, addr, size, access, owner=None, is_device=False):
        """Register a range, in more than one region if it is too large for one."""
        largest = self._pd.context.attributes.max_mr_size
        if size > largest:
            largest &= -(1 << 21) if largest >= 1 << 21 else -4096
        pieces = []
        try:
            for at in range(addr, addr + size, largest) if size else (addr,):
                length = min(largest, addr + size - at)
                mr = self._pd.reg_mr_address(
                    at, length, access, owner=owner, is_device=is_device
                )
                pieces.append(mr.view())
        except BaseException:
            for piece in pieces:
                piece.mr.close()
            raise
        return tuple(pieces)

    def _add(self, segment, is_own=True):
        self._count_users([segment], +1, is_own)
        for piece in segment.pieces:
            self._insert_piece(piece)

    def _insert_piece(self, piece):
        hidden = self._insert(piece)
        for other in [piece] if hidden is None else hidden:
            insort(self._hidden, _hidden_entry(other))

    def _count_users(self, segments, change, is_own=True):
        """Count who uses each region; return own ones that nobody uses any more."""
        unused = []
        for segment in segments:
            for piece in segment.pieces:
                mr = piece.mr
                entry = self._users.setdefault(mr.id, [mr, 0, is_own])
                entry[1] += change
                if entry[1] == 0:
                    del self._users[mr.id]
                    if entry[2]:
                        unused.append(mr)
        return unused

    def _take_out(self, segment):
        """Find a segment's pieces no more; return the regions to deregister."""
        for piece in segment.pieces:
            entry = _hidden_entry(piece)
            at = bisect_left(self._hidden, entry)
            if self._hidden[at : at + 1] == [entry]:
                del self._hidden[at]
            elif self._remove(piece):
                end = piece.virtual_addr + piece.size
                first = bisect_left(self._hidden, (piece.virtual_addr,))
                last = bisect_left(self._hidden, (end,))
                again = self._hidden[first:last]
                del self._hidden[first:last]
                for *_, other in again:
                    self._insert_piece(other)
        return self._let_go([segment])

    def _exchange(self, gone, fresh):
        """Put many segments in the place of others; retire the regions of those."""
        self._count_users(fresh, +1)
        leaving = {}
        for segment in gone:
            for piece in segment.pieces:
                entry = _hidden_entry(piece)[:-1]
                leaving[entry] = leaving.get(entry, 0) + 1
        pieces = []
        for piece in [
            *self._pieces(),
            *(entry[-1] for entry in self._hidden),
            *(piece for segment in fresh for piece in segment.pieces),
        ]:
            entry = _hidden_entry(piece)[:-1]
            if leaving.get(entry):
                leaving[entry] -= 1
            else:
                pieces.append(piece)
        pieces.sort(key=lambda piece: (piece.virtual_addr, -piece.size))
        self._hidden = sorted(map(_hidden_entry, self._replace(pieces)))
        self._retired.update(self._let_go(gone))

    def _let_go(self, segments):
        """Count segments out; return the regions that are the table's to deregister."""
        unused = self._count_users(segments, -1)
        for segment in segments:
            segment.count = 0
            segment.pieces = ()
        return unused

    def _check_idle(self, segments, retired=()):
        """Refuse to close anything while work in flight uses some of it."""
        regions = {piece.mr.id: piece.mr for s in segments for piece in s.pieces}
        for mr in [*regions.values(), *retired]:
            if is_pinned(mr) and self._users.get(mr.id, (mr, 0, True))[2]:
                # It is refused, with the count of what is in flight.
                mr.close()

    def _close(self, regions):
        """Deregister regions that no segment has; what fails is retired."""
        failure = None
        for mr in regions:
            try:
                mr.close()
            except VerbsError as error:
                self._retired.add(mr)
                failure = error
            else:
                self._retired.discard(mr)
        if failure is not None:
            raise failure

    def _place_of(self, segment):
        """Which dict has a segment, and by what key."""
        if not isinstance(segment, Segment):
            raise TypeError(f"segment must be a Segment, not {type(segment).__name__}")
        places = [
            (self._registered, (segment.addr, segment.size)),
            (self._scanned, segment.addr),
        ]
        if segment.pieces:
            places.append((self._adopted, segment.pieces[0].id))
        for place, key in places:
            if place.get(key) is segment:
                return place, key
        raise ValueError(f"{segment!r} is not in the table, or not any more")


def _is_device(device=None):
    if device is not None and not isinstance(device, str):
        raise TypeError(
            f"a segment's device is None or text such as 'cuda:0', not {device!r}"
        )
    return device not in (None, "cpu")


def _hidden_entry(piece):
    return piece.virtual_addr, piece.size, piece.id, piece
