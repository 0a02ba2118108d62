"""Which registered segment contains a range of memory: the look-ups of SegmentTable."""

cimport cython
from libc.stdint cimport UINT64_MAX, int64_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcpy, memmove

from ._arrays cimport (
    Column,
    ViewArray,
    common_count,
    new_view_array,
    parse_column,
    shorten,
    sort_registrations,
)
from ._errors cimport check_process, this_process
from ._memory cimport (
    DIMENSIONS,
    Extent,
    HostMemory,
    Layout,
    find_extent,
    find_layout,
    first_place,
    hold_memory,
    next_place,
)
from ._verbs cimport MemoryRegion, check_cuttable, cut_runs, end_block, rights_text
from ._view cimport (
    MemoryRegionView,
    Registration,
    new_view,
    number_text,
    parse_u64,
    rdmaview_view,
    rdmaview_within,
)

from ._errors import NotRegisteredError

cdef enum:
    # Shorter loops cost less than to give the GIL away and get it back.
    LONG = 4096
    # Where a range may lie: in what was registered as a device's, in the rest, or in both.
    ANY = 2


@cython.final
@cython.no_gc_clear
cdef class PieceList:
    """Sorted pieces; a search without the GIL keeps its list from changing."""

    def __cinit__(self):
        self.registrations = []
        self.reserve(8)
        self.list.starts[0] = UINT64_MAX

    def __dealloc__(self):
        free(self.list.starts)
        free(self.list.signposts)
        free(self.list.wholes)

    cdef int reserve(self, size_t count) except -1:
        """Make room for so many pieces."""
        cdef void *block
        if count <= self.capacity:
            return 0
        count = max(count, 2 * self.capacity)
        block = realloc(self.list.starts, (count + 1) * sizeof(uint64_t))
        if block == NULL:
            raise MemoryError()
        self.list.starts = <uint64_t *>block
        block = realloc(
            self.list.signposts, (count // SIGNPOST_STEP + 1) * sizeof(uint64_t)
        )
        if block == NULL:
            raise MemoryError()
        self.list.signposts = <uint64_t *>block
        block = realloc(self.list.wholes, count * sizeof(rdmaview_view))
        if block == NULL:
            raise MemoryError()
        self.list.wholes = <rdmaview_view *>block
        self.capacity = count
        return 0


cdef PieceList changeable(SegmentIndex index, size_t count):
    """The index's list with room for `count`; a copy if somebody reads it just now."""
    cdef PieceList pieces = index.pieces
    cdef PieceList copy
    if pieces.readers:
        copy = PieceList.__new__(PieceList)
        copy.reserve(max(count, pieces.list.count))
        memcpy(
            copy.list.starts,
            pieces.list.starts,
            (pieces.list.count + 1) * sizeof(uint64_t),
        )
        memcpy(
            copy.list.wholes,
            pieces.list.wholes,
            pieces.list.count * sizeof(rdmaview_view),
        )
        copy.list.count = pieces.list.count
        set_signposts(&copy.list, 0)
        copy.registrations = list(pieces.registrations)
        index.pieces = copy
        return copy
    pieces.reserve(count)
    return pieces


cdef inline uint64_t end_of(const rdmaview_view *view) noexcept nogil:
    return view.virtual_addr + view.size


cdef inline Registration registration_at(PieceList pieces, size_t i):
    return <Registration>(<list>pieces.registrations)[<Py_ssize_t>i]


cdef MemoryRegionView cut_one(
    PieceList pieces, uint64_t address, uint64_t size, int is_device
):
    cdef size_t found = find_piece(&pieces.list, address)
    cdef MemoryRegion mr
    cdef rdmaview_view view
    if not cut_piece(&pieces.list, found, address, size, &view):
        raise NotRegisteredError(why_not(pieces, address, size))
    mr = <MemoryRegion>registration_at(pieces, found)
    check_kind(mr, address, is_device)
    check_cuttable(mr)
    return new_view(&view, mr)


cdef int check_kind(MemoryRegion mr, uint64_t address, int is_device) except -1:
    # The address of a dma-buf is as its user chose it: it could be an array's, too.
    if is_device != ANY and is_device != mr.is_device:
        kinds = ("a device's", "host") if is_device else ("host", "a device's")
        raise NotRegisteredError(
            f"what is registered at {address:#x} is {kinds[1]} memory, and the array is "
            f"of {kinds[0]}"
        )
    return 0


cdef list overlapping(PieceList pieces, uint64_t address, uint64_t size):
    """The places of the pieces that have a byte of a range."""
    cdef size_t i = find_piece(&pieces.list, address)
    cdef list found = []
    while i < pieces.list.count and (
        pieces.list.starts[i] <= address
        or pieces.list.starts[i] - address < size
    ):
        if size and end_of(&pieces.list.wholes[i]) > address:
            found.append(i)
        i += 1
    return found


cdef str piece_text(PieceList pieces, size_t i):
    cdef const rdmaview_view *whole = &pieces.list.wholes[i]
    return f"[{whole.virtual_addr:#x}, {end_of(whole):#x})"


cdef str why_not(PieceList pieces, uint64_t address, uint64_t size, str what="them"):
    """Say why one view can't be cut of a range."""
    cdef list found = overlapping(pieces, address, size)
    cdef str text = f"{size} bytes at {address:#x}: no registered segment covers {what}"
    cdef size_t near
    if not found:
        if not pieces.list.count:
            return f"{text}; none is registered"
        near = find_piece(&pieces.list, address)
        if pieces.list.starts[near] <= address and near + 1 < pieces.list.count:
            return (
                f"{text}; the nearest are {piece_text(pieces, near)} and "
                f"{piece_text(pieces, near + 1)}"
            )
        return f"{text}; the nearest is {piece_text(pieces, near)}"
    names = " and ".join([piece_text(pieces, i) for i in found[:2]])
    if len(found) > 2:
        names += f" and {len(found) - 2} more"
    if missing_byte(pieces, address, size) >= 0:
        return f"{text} whole; a part of them is in {names}"
    return f"{text} alone: they straddle {names}. With split=True they are cut in pieces"


cdef object missing_byte(PieceList pieces, uint64_t address, uint64_t size):
    """The first address of a range that is in no piece; -1 if all are in some."""
    cdef rdmaview_view view
    cdef size_t piece
    cdef uint64_t part
    while size:
        part = cut_first(&pieces.list, address, size, &view, &piece)
        if not part:
            return address
        address += part
        size -= part
    return -1


@cython.final
@cython.no_gc_clear
cdef class Split:
    """Views of ranges that are cut in pieces, as many as it takes."""

    cdef PieceList pieces
    cdef rdmaview_view *views
    cdef Py_ssize_t count
    cdef Py_ssize_t capacity
    cdef set used

    def __cinit__(self):
        self.used = set()

    def __dealloc__(self):
        free(self.views)

    cdef int add(
        self, uint64_t address, uint64_t size, int is_device, str what
    ) except -1:
        cdef uint64_t part = 0
        cdef uint64_t left = size
        cdef uint64_t at = address
        cdef size_t piece
        cdef Py_ssize_t grown
        cdef void *block
        while left or not size:
            if self.count == self.capacity:
                grown = max(16, 2 * self.capacity)
                block = realloc(self.views, grown * sizeof(rdmaview_view))
                if block == NULL:
                    raise MemoryError()
                self.views = <rdmaview_view *>block
                self.capacity = grown
            if not size:
                piece = find_piece(&self.pieces.list, at)
                if not cut_piece(
                    &self.pieces.list, piece, at, 0, &self.views[self.count]
                ):
                    raise NotRegisteredError(why_not(self.pieces, at, 0, what))
            else:
                part = cut_first(
                    &self.pieces.list, at, left, &self.views[self.count], &piece
                )
                if not part:
                    raise NotRegisteredError(why_not(self.pieces, address, size, what))
            check_kind(<MemoryRegion>registration_at(self.pieces, piece), at, is_device)
            self.used.add(registration_at(self.pieces, piece))
            self.count += 1
            if not size:
                break
            at += part
            left -= part
        return 0

    cdef ViewArray result(self):
        cdef ViewArray views
        check_all_cuttable(self.used)
        views = new_view_array(self.count, sort_registrations(self.used))
        memcpy(views.start, self.views, self.count * sizeof(rdmaview_view))
        return views


cdef Split new_split(SegmentIndex index):
    cdef Split split = Split.__new__(Split)
    split.pieces = index.pieces
    return split


cdef int check_all_cuttable(object regions) except -1:
    cdef MemoryRegion mr
    for mr in regions:
        check_cuttable(mr)
    return 0


@cython.final
@cython.no_gc
cdef class Extents:
    """Where many arrays lie."""

    cdef uint64_t *addresses
    cdef uint64_t *sizes
    cdef unsigned char *is_device
    # How many of them are a device's.
    cdef size_t devices

    def __dealloc__(self):
        free(self.addresses)


cdef Extents find_extents(list arrays):
    cdef Extents extents = Extents.__new__(Extents)
    cdef size_t count = len(arrays)
    cdef size_t i
    cdef Extent extent
    extents.addresses = <uint64_t *>calloc(count + 1, 2 * sizeof(uint64_t) + 1)
    if extents.addresses == NULL:
        raise MemoryError()
    extents.sizes = extents.addresses + count
    extents.is_device = <unsigned char *>(extents.sizes + count)
    for i in range(count):
        find_extent(arrays[<Py_ssize_t>i], &extent, True)
        extents.addresses[i] = extent.address
        extents.sizes[i] = extent.size
        extents.is_device[i] = extent.is_device
        extents.devices += extent.is_device
    return extents


cdef ViewArray cut_ranges(
    PieceList pieces,
    const uint64_t *addresses,
    Py_ssize_t address_step,
    const uint64_t *sizes,
    Py_ssize_t size_step,
    Py_ssize_t count,
    int is_device,
    str what,
):
    """Cut each range out of one piece; all are found before any is given."""
    cdef ViewArray views = new_view_array(count, ())
    cdef rdmaview_view *cut = <rdmaview_view *>views.start
    cdef Py_ssize_t done
    cdef unsigned char *used = <unsigned char *>calloc(pieces.list.count + 1, 1)
    if used == NULL:
        raise MemoryError()
    pieces.readers += 1
    try:
        if count < LONG:
            done = cut_pieces(
                &pieces.list,
                addresses,
                address_step,
                sizes,
                size_step,
                count,
                cut,
                used,
            )
        else:
            with nogil:
                done = cut_pieces(
                    &pieces.list,
                    addresses,
                    address_step,
                    sizes,
                    size_step,
                    count,
                    cut,
                    used,
                )
        if done < count:
            raise NotRegisteredError(
                why_not(
                    pieces,
                    addresses[done * address_step],
                    sizes[done * size_step],
                    f"{what} {done}",
                )
            )
        attach(views, pieces, used, is_device)
    finally:
        pieces.readers -= 1
        free(used)
    return views


cdef int attach(
    ViewArray views, PieceList pieces, const unsigned char *used, int is_device
) except -1:
    """Let an array hold the regions that it was cut from."""
    cdef list regions = []
    cdef MemoryRegion mr
    cdef uint64_t last = 0
    cdef bint is_sorted = True
    cdef size_t i
    for i in range(pieces.list.count):
        if used[i]:
            mr = <MemoryRegion>registration_at(pieces, i)
            check_kind(mr, mr.whole.virtual_addr, is_device)
            check_cuttable(mr)
            is_sorted = is_sorted and mr.whole.id > last
            last = mr.whole.id
            regions.append(mr)
    # Mostly they are: a scanner lists segments by address, and so they are registered.
    views.registrations = (
        tuple(regions) if is_sorted else sort_registrations(set(regions))
    )
    return 0


cdef class SegmentIndex:
    """Finds what contains a range, among many registered pieces of memory."""

    def __cinit__(self, *args, **options):
        self.pieces = PieceList.__new__(PieceList)
        self.process = this_process()

    def __reduce__(self):
        raise TypeError(
            f"a {type(self).__name__} is of this process and can't be pickled: send "
            "views, or remote views, as bytes"
        )

    def view_at(self, addr, size, split=False):
        """The view of a range of memory.

        Parameters
        ----------
        addr : integer
            Virtual address of the first byte.
        size : integer
            Bytes.
        split : bool, default False
            Cut a range that several segments cover together in pieces.

        Returns
        -------
        MemoryRegionView or ViewArray
            The array, of one view or more, if `split`.

        Raises
        ------
        NotRegisteredError
            No segment covers all of it; if several do together, the text names them.
        StaleViewError
            The region of the segment was closed, other than by the table.
        """
        cdef uint64_t address
        cdef uint64_t length
        cdef Split pieces
        if parse_u64(addr, "addr", &address) or parse_u64(size, "size", &length):
            raise NotRegisteredError(
                f"{number_text(size)} bytes at {number_text(addr)}: they are not inside "
                "64 bits"
            )
        if not split:
            return cut_one(self.pieces, address, length, ANY)
        pieces = new_split(self)
        pieces.add(address, length, ANY, "them")
        return pieces.result()

    def view_of(self, array, split=False):
        """The view of an array that lies in a segment.

        Parameters
        ----------
        array : object with host memory
            Its own first byte and size count, not those of its base. Or an array or
            tensor of device memory, if such is registered.
        split : bool, default False
            As in `view_at`.

        Returns
        -------
        MemoryRegionView or ViewArray
            The array if `split`.

        Raises
        ------
        NotRegisteredError
            As in `view_at`.
        BufferError
            The array is not contiguous: see `runs_of`.
        StaleViewError
            As in `view_at`.
        """
        cdef Extent extent
        cdef Split pieces
        find_extent(array, &extent, True)
        if not split:
            return cut_one(
                self.pieces, extent.address, extent.size, extent.is_device
            )
        pieces = new_split(self)
        pieces.add(extent.address, extent.size, extent.is_device, "them")
        return pieces.result()

    def runs_of(self, array, split=False):
        """The views of an array that lies in a segment in pieces.

        Parameters
        ----------
        array : object with host memory
            It may be strided, reversed or broadcast, of any number of dimensions.
        split : bool, default False
            As in `view_at`. Without it the whole array must lie in one segment.

        Returns
        -------
        ViewArray
            One view for each run of bytes in C order, adjacent runs joined.

        Raises
        ------
        NotRegisteredError
            As in `view_at`.
        StaleViewError
            As in `view_at`.
        """
        cdef Layout layout
        cdef Split pieces
        cdef ViewArray views
        cdef MemoryRegionView whole
        cdef int64_t place[DIMENSIONS]
        cdef uint64_t at
        cdef uint64_t start = 0
        cdef uint64_t size = 0
        find_layout(array, &layout, True)
        if not split:
            if not layout.count:
                return new_view_array(0, ())
            whole = cut_one(
                self.pieces, layout.low, layout.span, layout.is_device
            )
            views = new_view_array(layout.count, (whole.registration,))
            shorten(
                views, cut_runs(&whole.value, &layout, <rdmaview_view *>views.start)
            )
            return views
        pieces = new_split(self)
        first_place(&layout, place)
        for _ in range(layout.count):
            at = next_place(&layout, place)
            if size and at == start + size:
                size += layout.piece
                continue
            if size:
                pieces.add(start, size, layout.is_device, "them")
            start, size = at, layout.piece
        if size:
            pieces.add(start, size, layout.is_device, "them")
        return pieces.result()

    def views_of(self, arrays, split=False):
        """The views of many arrays that lie in segments.

        Parameters
        ----------
        arrays : iterable of objects with host memory
            As in `view_of`.
        split : bool, default False
            As in `view_at`: then an array may give more than one view.

        Returns
        -------
        ViewArray
            In the order of the arrays.

        Raises
        ------
        NotRegisteredError
            As in `view_at`; the text says which array.
        BufferError
            An array is not contiguous.
        StaleViewError
            As in `view_at`.
        """
        cdef list items = list(arrays)
        cdef size_t count = len(items)
        cdef Extents extents
        cdef Split cuts
        cdef size_t i
        extents = find_extents(items)
        if not split and extents.devices in (0, count):
            return cut_ranges(
                self.pieces,
                extents.addresses,
                1,
                extents.sizes,
                1,
                count,
                extents.devices > 0,
                "array",
            )
        cuts = new_split(self)
        for i in range(count):
            cuts.add(
                extents.addresses[i],
                extents.sizes[i],
                extents.is_device[i],
                f"array {i}",
            )
            if not split and cuts.count > <Py_ssize_t>i + 1:
                raise NotRegisteredError(
                    why_not(
                        self.pieces,
                        extents.addresses[i],
                        extents.sizes[i],
                        f"array {i}",
                    )
                )
        return cuts.result()

    def views_at(self, addrs, sizes, split=False):
        """The views of many ranges of memory; all are found before any is given.

        Parameters
        ----------
        addrs, sizes : integer or sequence of integers
            Virtual addresses, and bytes; a single number is for all. An array of
            64-bit integers is read where it lies. Sorted addresses are found fastest.
        split : bool, default False
            As in `view_at`: then a range may give more than one view.

        Returns
        -------
        ViewArray
            In the order of the addresses.

        Raises
        ------
        NotRegisteredError
            As in `view_at`; the text says which range.
        TypeError
            They are no integers.
        ValueError
            There are more of one than of the other, or more than one dimension.
        StaleViewError
            As in `view_at`.
        """
        cdef Column address = parse_column(addrs, "addrs")
        cdef Column size = parse_column(sizes, "sizes")
        cdef Py_ssize_t count = common_count(address, size)
        cdef Split cuts
        cdef Py_ssize_t i
        if not split:
            return cut_ranges(
                self.pieces,
                address.values,
                address.step,
                size.values,
                size.step,
                count,
                ANY,
                "range",
            )
        cuts = new_split(self)
        for i in range(count):
            cuts.add(
                address.values[i * address.step],
                size.values[i * size.step],
                ANY,
                f"range {i}",
            )
        return cuts.result()

    # What SegmentTable changes it by. No Python code runs within.

    def _insert(self, MemoryRegionView piece not None):
        """Add a piece; return those that it hides, or None if one there hides it."""
        cdef PieceList pieces = changeable(self, self.pieces.list.count + 1)
        cdef size_t first = find_piece(&pieces.list, piece.value.virtual_addr)
        cdef size_t last
        cdef uint64_t end = end_of(&piece.value)
        if pieces.list.count:
            if rdmaview_within(
                pieces.list.wholes[first].size,
                piece.value.virtual_addr - pieces.list.wholes[first].virtual_addr,
                piece.value.size,
            ):
                return None
            if pieces.list.starts[first] < piece.value.virtual_addr:
                first += 1
        last = first
        while last < pieces.list.count and end_of(&pieces.list.wholes[last]) <= end:
            last += 1
        hidden = [view_of_piece(pieces, i) for i in range(first, last)]
        splice(pieces, first, last, [piece])
        return hidden

    def _remove(self, MemoryRegionView piece not None):
        """Take a piece out; say whether it was there."""
        cdef PieceList pieces = changeable(self, self.pieces.list.count)
        cdef size_t i = find_piece(&pieces.list, piece.value.virtual_addr)
        if (
            not pieces.list.count
            or pieces.list.wholes[i].id != piece.value.id
            or pieces.list.starts[i] != piece.value.virtual_addr
            or pieces.list.wholes[i].size != piece.value.size
        ):
            return False
        splice(pieces, i, i + 1, [])
        return True

    def _replace(self, list views not None):
        """Have these pieces, which are sorted, and no others; return those hidden."""
        cdef PieceList pieces = PieceList.__new__(PieceList)
        cdef MemoryRegionView piece
        cdef uint64_t end = 0
        cdef list hidden = []
        pieces.reserve(len(views))
        for piece in views:
            if pieces.list.count and end_of(&piece.value) <= end:
                hidden.append(piece)
                continue
            end = end_of(&piece.value)
            pieces.list.wholes[pieces.list.count] = piece.value
            pieces.list.starts[pieces.list.count] = piece.value.virtual_addr
            pieces.registrations.append(piece.registration)
            pieces.list.count += 1
        pieces.list.starts[pieces.list.count] = UINT64_MAX
        set_signposts(&pieces.list, 0)
        self.pieces = pieces
        return hidden

    def _pieces(self):
        """The pieces, in the order of their addresses."""
        return [
            view_of_piece(self.pieces, i) for i in range(self.pieces.list.count)
        ]

    def _overlapping(self, uint64_t address, uint64_t size):
        """The pieces that have a byte of a range."""
        return [
            view_of_piece(self.pieces, i)
            for i in overlapping(self.pieces, address, size)
        ]

    def _check_process(self):
        """Refuse the table of a parent process."""
        check_process(self.process, "a change of a segment table")


cdef MemoryRegionView view_of_piece(PieceList pieces, size_t i):
    return new_view(&pieces.list.wholes[i], registration_at(pieces, i))


cdef int splice(PieceList pieces, size_t first, size_t last, list added) except -1:
    """Put pieces in the place of others; the room is there."""
    cdef MemoryRegionView piece
    cdef size_t count = len(added)
    cdef size_t changed = first
    cdef size_t after = pieces.list.count - last
    # A region may end with the list that held it: not before all is in its place.
    replaced = pieces.registrations[first:last]
    pieces.registrations[first:last] = [piece.registration for piece in added]
    memmove(
        pieces.list.starts + first + count,
        pieces.list.starts + last,
        (after + 1) * sizeof(uint64_t),
    )
    memmove(
        pieces.list.wholes + first + count,
        pieces.list.wholes + last,
        after * sizeof(rdmaview_view),
    )
    for piece in added:
        pieces.list.starts[first] = piece.value.virtual_addr
        pieces.list.wholes[first] = piece.value
        first += 1
    pieces.list.count += count - (last - changed)
    set_signposts(&pieces.list, changed)
    del replaced
    return 0


def hold(buffer):
    """Hold the memory of an object: its address, bytes, whether it is read-only, and
    what holds it.
    """
    cdef HostMemory memory = hold_memory(buffer)
    return memory.address, memory.size, memory.readonly, memory


def close_block(table, kind):
    """Close at the end of a with-block, which `kind` of exception ended."""
    end_block(table, kind)


def rights_of(rights):
    """Name rights, for an error's text."""
    return rights_text(rights)


def is_pinned(MemoryRegion mr not None):
    """Say whether work in flight uses a region."""
    return mr.pins != 0
