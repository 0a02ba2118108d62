"""Registrations that are made on first use and kept: RegistrationCache."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals
from libc.errno cimport EBUSY, ENOMEM
from libc.stdint cimport UINT64_MAX, uint64_t, uintptr_t
from posix.unistd cimport usleep

from ._errors cimport check_process, raise_verbs_error, this_process
from ._memory cimport (
    Extent,
    HostMemory,
    find_extent,
    find_whole,
    hold_address,
    hold_memory,
    hold_owner,
    memory_owner,
)
from ._verbs cimport (
    Lender,
    MemoryRegion,
    ProtectionDomain,
    end_block,
    fitting_rights,
    lend,
    parse_access,
    register,
)
from ._view cimport (
    CLOSED,
    MemoryRegionView,
    new_view,
    number_text,
    parse_u64,
    rdmaview_slice,
    rdmaview_view,
)

import time
import weakref

from ._errors import VerbsError


@cython.final
@cython.no_gc_clear
cdef class Entry(Lender):
    """The registration of an owner's memory."""

    cdef int take_back(self) except -1:
        self.lent = NULL
        if not self.kept:
            # Its end deregisters.
            self.own = None
        return 0

    def forget(self, owner_ref):
        """Drop it: its owner is dead.

        Parameters
        ----------
        owner_ref : object
        """
        drop(self.cache, self)


@cython.final
cdef class RegistrationCache:
    """Registers memory when it is first used, and again only if it is another memory.

    What is registered is the whole memory of what owns it: of the array at the root of
    ``.base``, of the storage of a tensor, of the object behind a memoryview. So all
    slices of an array share one registration. It ends when the owner dies; the cache
    does not hold the owner, but views do. Memory is known by its owner, its address and
    its size: memory that was freed and given out again is registered anew.

    An owner that can't be referred to weakly (bytes, bytearray) is registered for each
    view, and as long as that lives: ``uncached`` counts these.

    Threads may share a cache; it has no lock.

    Parameters
    ----------
    pd : ProtectionDomain
    access : Access, optional
        The rights of each registration. Default: LOCAL_WRITE for writable memory, none
        for read-only memory.
    max_regions : integer, optional
        How many registrations to keep. Default: no limit.
    max_bytes : integer, optional
        How many bytes to keep registered. Default: no limit. Over a limit, what was
        not used for longest is deregistered, but nothing of which a view is left: so
        what is in use may exceed the limits.

    Attributes
    ----------
    pd : ProtectionDomain
    bytes_pinned : int
        Bytes of the registrations.
    hits : int
        How often a registration was there.
    misses : int
        Registrations made and kept.
    uncached : int
        Registrations made for one view.
    evictions : int
        Registrations that ended because of a limit, of this cache or of the device.
    registration_seconds : float
        Time spent in registering.
    """

    def __cinit__(self, pd, access=None, max_regions=None, max_bytes=None):
        if not isinstance(pd, ProtectionDomain):
            raise TypeError(f"pd must be a ProtectionDomain, not {type(pd).__name__}")
        self.rights = -1 if access is None else parse_access(access)
        self.max_regions = parse_limit(max_regions, "max_regions")
        self.max_bytes = parse_limit(max_bytes, "max_bytes")
        self.process = this_process()
        self.entries = {}
        self.pd = pd

    def __reduce__(self):
        raise TypeError(
            "a RegistrationCache is of this process and can't be pickled: send views, or "
            "remote views, as bytes"
        )

    def __repr__(self):
        return (
            f"<RegistrationCache of {len(self)} regions, {self.bytes_pinned} bytes"
            f"{' closed' if self.is_closed else ''}>"
        )

    def __enter__(self):
        check_usable(self)
        return self

    def __exit__(self, kind, error, traceback):
        end_block(self, kind)

    def __len__(self):
        return len(self.entries)

    def view_of(self, array):
        """The view of an array, whose memory is registered if it isn't yet.

        Parameters
        ----------
        array : object with host memory
            Contiguous. Its own first byte and size count, not those of its base.

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        BufferError
            It is not contiguous, or read-only and the rights would write.
        ValueError
            It is empty, or the cache is closed.
        VerbsError
            ibv_reg_mr failed, though nothing idle is left to evict.
        """
        cdef object owner = memory_owner(array)
        cdef object key = <uintptr_t><void *>owner
        cdef Extent extent
        cdef Extent whole
        cdef Entry entry
        cdef MemoryRegion mr
        cdef rdmaview_view view
        check_usable(self)
        find_extent(array, &extent, False)
        if owner is array:
            whole = extent
        else:
            find_whole(owner, &whole)
        self.uses += 1
        entry = <Entry>self.entries.get(key)
        while entry is not None and entry.own is None:
            wait_for(entry)
            entry = <Entry>self.entries.get(key)
        if entry is not None and (
            entry.extent.address != whole.address
            or entry.extent.size != whole.size
            or entry.extent.readonly != whole.readonly
        ):
            drop(self, entry)
            entry = None
        if entry is None:
            entry = add(self, owner, key, &whole)
            if entry is None:
                return view_uncached(self, array)
        else:
            self.hits += 1
        entry.used = self.uses
        mr = <MemoryRegion>entry.lent if entry.lent != NULL else lend_out(entry, owner)
        if not rdmaview_slice(
            &mr.whole, extent.address - mr.whole.virtual_addr, extent.size, &view
        ):
            raise ValueError(
                f"the {extent.size} bytes at {extent.address:#x} of this "
                f"{type(array).__name__} are not inside the {whole.size} bytes at "
                f"{whole.address:#x} of its owner, a {type(owner).__name__}"
            )
        return new_view(&view, mr)

    def clear(self):
        """Keep nothing: what is in use is deregistered with the last view of it."""
        check_process(self.process, "a RegistrationCache")
        for entry in list(self.entries.values()):
            drop(self, entry)

    def close(self):
        """Deregister all; views become stale at once. A second call does nothing.

        Raises
        ------
        VerbsError
            EBUSY: work in flight uses the memory of a view. Nothing was changed.
        """
        cdef Entry entry
        cdef list entries
        if self.is_closed:
            return
        check_process(self.process, "a RegistrationCache")
        entries = list(self.entries.values())
        for entry in entries:
            if entry.lent != NULL and (<MemoryRegion>entry.lent).pins:
                raise_verbs_error(
                    EBUSY,
                    "ibv_dereg_mr",
                    f"{self!r} has memory in use by "
                    f"{(<MemoryRegion>entry.lent).pins} work requests in flight",
                    "Wait for them",
                )
        self.is_closed = True
        # All of them before any is deregistered, which lets other threads post.
        for entry in entries:
            if entry.lent != NULL:
                (<MemoryRegion>entry.lent).state = CLOSED
                entry.lent = NULL
        for entry in entries:
            drop(self, entry)

    @property
    def in_use(self):
        """int: how many of the registrations have views."""
        cdef Entry entry
        return sum([entry.lent != NULL for entry in self.entries.values()])

    @property
    def stats(self):
        """dict of str to float: the counters by their names, and ``regions``."""
        return {
            "regions": len(self),
            "in_use": self.in_use,
            "bytes_pinned": self.bytes_pinned,
            "hits": self.hits,
            "misses": self.misses,
            "uncached": self.uncached,
            "evictions": self.evictions,
            "registration_seconds": self.registration_seconds,
        }

    @property
    def closed(self):
        """bool: was it closed?"""
        return self.is_closed


cdef uint64_t parse_limit(object limit, str name) except? 0:
    cdef uint64_t parsed
    if limit is None:
        return UINT64_MAX
    if parse_u64(limit, name, &parsed) or parsed == 0:
        raise ValueError(f"{name} must be 1 or more, not {number_text(limit)}")
    return parsed


cdef int check_usable(RegistrationCache cache) except -1:
    if cache.is_closed:
        raise ValueError("this RegistrationCache is closed")
    return 0


cdef int wait_for(Entry entry) except -1:
    """Another thread registers just this memory."""
    while entry.own is None and entry.kept:
        with nogil:
            usleep(20)
        PyErr_CheckSignals()
    return 0


cdef int drop(RegistrationCache cache, Entry entry) except -1:
    """Keep an entry no longer; it ends at once if it is idle, else when it is."""
    if not entry.kept:
        return 0
    entry.kept = False
    if cache.entries.get(entry.key) is entry:
        del cache.entries[entry.key]
    if entry.own is not None:
        cache.bytes_pinned -= entry.extent.size
    if entry.lent == NULL:
        entry.own = None
    return 0


cdef bint evict(RegistrationCache cache) except -1:
    """Drop what is idle and was not used for longest; say whether there was any."""
    cdef Entry entry
    cdef Entry oldest = None
    for entry in list(cache.entries.values()):
        if entry.own is None or entry.lent != NULL or not entry.kept:
            continue
        if oldest is None or entry.used < oldest.used:
            oldest = entry
    if oldest is None:
        return False
    cache.evictions += 1
    drop(cache, oldest)
    return True


cdef MemoryRegion register_evicting(
    RegistrationCache cache, HostMemory memory, int rights
):
    """Register; if the device has no room, make some."""
    started = time.perf_counter()
    try:
        while True:
            try:
                return register(cache.pd, memory, rights, None)
            except VerbsError as error:
                if error.errno != ENOMEM or not evict(cache):
                    raise
    finally:
        cache.registration_seconds += time.perf_counter() - started


cdef Entry add(RegistrationCache cache, object owner, object key, const Extent *whole):
    """Register an owner's memory; None if the owner can't be told to be alive."""
    cdef Entry entry = Entry.__new__(Entry)
    cdef HostMemory memory = hold_address(
        whole.address, whole.size, whole.readonly, None
    )
    cdef int rights = fitting_rights(memory, cache.rights, owner)
    try:
        entry.owner_ref = weakref.ref(owner, entry.forget)
    except TypeError:
        return None
    entry.cache = cache
    entry.key = key
    entry.extent = whole[0]
    entry.kept = True
    # From here on other threads wait for this one.
    cache.entries[key] = entry
    try:
        while (
            <uint64_t>len(cache.entries) > cache.max_regions
            or cache.bytes_pinned + whole.size > cache.max_bytes
        ) and evict(cache):
            pass
        entry.own = register_evicting(cache, memory, rights)
    except BaseException:
        entry.kept = False
        if cache.entries.get(key) is entry:
            del cache.entries[key]
        raise
    cache.misses += 1
    if entry.kept:
        cache.bytes_pinned += whole.size
    return entry


cdef MemoryRegion lend_out(Entry entry, object owner):
    """Let views hold a registration, and its memory with it."""
    cdef MemoryRegion lent = lend(
        entry.own, hold_owner(owner, &entry.extent), entry
    )
    entry.lent = <void *>lent
    return lent


cdef MemoryRegionView view_uncached(RegistrationCache cache, object array):
    cdef HostMemory memory = hold_memory(array)
    cdef int rights = fitting_rights(memory, cache.rights, array)
    cdef MemoryRegion mr = register_evicting(cache, memory, rights)
    cache.uncached += 1
    return new_view(&mr.whole, mr)
