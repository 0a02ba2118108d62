"""Arrays of views: packed as the C struct, cut, sorted and sent by the million.

No verb is called here, and nothing here needs a device or libibverbs.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_C_CONTIGUOUS,
    PyBUF_F_CONTIGUOUS,
    PyBUF_FORMAT,
    PyBUF_FULL_RO,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.slice cimport PySlice_Check
from libc.stdint cimport UINT64_MAX, int64_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy

from ._errors cimport check_process
from ._view cimport (
    OPEN,
    MemoryRegionView,
    Registration,
    RemoteView,
    check_attached,
    new_remote_view,
    new_view,
    number_text,
    parse_u64,
    rdmaview_at,
    rdmaview_coalesce,
    rdmaview_hash_many,
    rdmaview_load,
    rdmaview_mix,
    rdmaview_remote,
    rdmaview_remote_at,
    rdmaview_remote_coalesce,
    rdmaview_remote_hash_many,
    rdmaview_store,
    rdmaview_to_remote_many,
    rdmaview_view,
)

import operator

from . import _view
from ._errors import DetachedViewError

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX

cdef extern from "view_block.h" nogil:
    const Py_ssize_t BLOCK_ALIGNMENT

    void prefer_huge_pages(void *memory, size_t size)
    void *take_block(size_t size)
    void give_block(void *block, size_t size)
    size_t cut_slices(
        const rdmaview_view *whole,
        const uint64_t *offsets,
        Py_ssize_t offset_step,
        const uint64_t *sizes,
        Py_ssize_t size_step,
        size_t count,
        rdmaview_view *views,
    )
    size_t cut_remote_slices(
        const rdmaview_remote *whole,
        const uint64_t *offsets,
        Py_ssize_t offset_step,
        const uint64_t *sizes,
        Py_ssize_t size_step,
        size_t count,
        rdmaview_remote *views,
    )
    size_t copy_views(
        const char *views, Py_ssize_t stride, size_t count, rdmaview_view *copies
    )
    size_t copy_remotes(
        const char *views, Py_ssize_t stride, size_t count, rdmaview_remote *copies
    )

cdef extern from "view_wire.h" nogil:
    void pack_views(
        const char *views, Py_ssize_t stride, size_t count, unsigned char *wire
    )
    void pack_remotes(
        const char *views, Py_ssize_t stride, size_t count, unsigned char *wire
    )
    size_t unpack_views(const unsigned char *wire, size_t count, rdmaview_view *views)
    size_t unpack_remotes(
        const unsigned char *wire, size_t count, rdmaview_remote *views
    )

cdef enum:
    # Shorter loops cost less than to give the GIL away and get it back.
    LONG = 4096
    WIRE_HEAD = 12
    PACKED_SIZE = 40
    REMOTE_PACKED_SIZE = 28

# The format of PEP 3118: without it NumPy would take the fields for nameless bytes.
cdef char *VIEW_FORMAT = "T{Q:id:Q:virtual_addr:Q:rdma_addr:Q:size:I:lkey:I:rkey:}"
cdef char *REMOTE_FORMAT = "T{Q:id:Q:rdma_addr:Q:size:I:rkey:I:reserved:}"


def view_dtype():
    """numpy.dtype: that of packed views, 40 bytes."""
    import numpy as np

    return np.dtype(
        [
            ("id", "u8"),
            ("virtual_addr", "u8"),
            ("rdma_addr", "u8"),
            ("size", "u8"),
            ("lkey", "u4"),
            ("rkey", "u4"),
        ]
    )


def remote_dtype():
    """numpy.dtype: that of packed remote views, 32 bytes."""
    import numpy as np

    return np.dtype(
        [
            ("id", "u8"),
            ("rdma_addr", "u8"),
            ("size", "u8"),
            ("rkey", "u4"),
            ("reserved", "u4"),
        ]
    )


@cython.final
@cython.no_gc
cdef class ViewBlock:
    """Memory for packed views; arrays that are slices of one another share it."""

    cdef void *block
    cdef size_t size

    def __dealloc__(self):
        give_block(self.block, self.size)


cdef ViewBlock new_block(Py_ssize_t count, Py_ssize_t item_size):
    cdef ViewBlock memory = ViewBlock.__new__(ViewBlock)
    if count <= PY_SSIZE_T_MAX // item_size - BLOCK_ALIGNMENT:
        memory.size = <size_t>count * <size_t>item_size
        memory.block = take_block(memory.size)
    if memory.block == NULL:
        raise MemoryError(f"no memory for {count} views of {item_size} bytes")
    return memory


# Tells __new__ that its caller fills the array.
cdef object UNFILLED = object()


# An array never changes, so every reference cycle has another object to break it at.
@cython.no_gc_clear
cdef class PackedViews:
    """What arrays of views and of remote views have in common."""

    def __init__(self):
        raise TypeError("an array is a ViewArray or a RemoteViewArray")

    cdef Py_ssize_t item_size(self):
        return 0

    cdef char *item_format(self):
        return NULL

    cdef object item(self, Py_ssize_t i):
        return None

    cdef PackedViews like(
        self, char *start, Py_ssize_t count, Py_ssize_t stride, object memory
    ):
        return None

    def __len__(self):
        return self.count

    def __getitem__(self, key):
        cdef Py_ssize_t start
        cdef Py_ssize_t stop
        cdef Py_ssize_t step
        if PySlice_Check(key):
            start, stop, step = key.indices(self.count)
            return self.like(
                self.start + start * self.stride,
                len(range(start, stop, step)),
                step * self.stride,
                self.memory,
            )
        if isinstance(key, bool) or not hasattr(key, "__index__") or (
            getattr(key, "ndim", 0)
        ):
            return choose(self, key)
        index = operator.index(key)
        if not -self.count <= index < self.count:
            raise IndexError(
                f"index {number_text(key)} isn't inside the {self.count} views"
            )
        return self.item(index if index >= 0 else index + self.count)

    def __iter__(self):
        cdef Py_ssize_t i
        for i in range(self.count):
            yield self.item(i)

    def __eq__(self, other):
        if type(other) is not type(self):
            return NotImplemented
        return are_equal(self, other)

    def __hash__(self):
        cdef uint64_t mixed = <uint64_t>self.count
        cdef Py_ssize_t i
        cdef uint64_t *hashes = <uint64_t *>malloc(self.count * 8 + 1)
        if hashes == NULL:
            raise MemoryError()
        hash_all(self, hashes)
        for i in range(self.count):
            mixed = rdmaview_mix(mixed ^ hashes[i])
        free(hashes)
        return <Py_hash_t>mixed

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        cdef bint packed = self.stride == self.item_size() or self.count <= 1
        if flags & PyBUF_WRITABLE:
            raise BufferError("views never change: take a copy to write to")
        if not packed and (
            flags & PyBUF_STRIDES != PyBUF_STRIDES
            or flags & PyBUF_C_CONTIGUOUS == PyBUF_C_CONTIGUOUS
            or flags & PyBUF_F_CONTIGUOUS == PyBUF_F_CONTIGUOUS
            or flags & PyBUF_ANY_CONTIGUOUS == PyBUF_ANY_CONTIGUOUS
        ):
            raise BufferError(
                f"the views are {self.stride} bytes apart, which are no contiguous bytes"
            )
        buffer.buf = self.start
        buffer.obj = self
        buffer.len = self.count * self.item_size()
        buffer.readonly = 1
        buffer.itemsize = self.item_size()
        buffer.format = (
            self.item_format() if flags & PyBUF_FORMAT == PyBUF_FORMAT else NULL
        )
        buffer.ndim = 1
        buffer.shape = &self.count if flags & PyBUF_ND == PyBUF_ND else NULL
        buffer.strides = (
            &self.stride if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
        )
        buffer.suboffsets = NULL
        buffer.internal = NULL

    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce_ex__(self, protocol):
        from pickle import PickleBuffer

        wire = self.to_bytes()
        return (
            view_array_from_bytes
            if type(self) is ViewArray
            else remote_view_array_from_bytes,
            (PickleBuffer(wire) if protocol >= 5 else wire,),
        )

    def __sizeof__(self):
        return type(self).__basicsize__ + self.count * self.item_size()

    def hash_array(self):
        """The hash of each view.

        Returns
        -------
        numpy.ndarray of uint64
            Shape (n,). `hash` of a view is the same number, modulo what Python does
            to hashes.
        """
        import numpy as np

        cdef uint64_t[::1] hashes
        result = np.empty(self.count, np.uint64)
        if self.count:
            hashes = result
            hash_all(self, &hashes[0])
        return result

    @property
    def nbytes(self):
        """int: bytes of the packed views themselves, not of the memory they view."""
        return self.count * self.item_size()

    @property
    def total_size(self):
        """int: the sum of the views' sizes in bytes."""
        cdef Py_ssize_t i
        cdef uint64_t total = 0
        cdef uint64_t size
        for i in range(self.count):
            size = size_at(self, i)
            if size > UINT64_MAX - total:
                return sum([size_at(self, i) for i in range(self.count)])
            total += size
        return total


@cython.final
@cython.no_gc_clear
cdef class ViewArray(PackedViews):
    """Many views, packed: 40 bytes each, without an object each.

    It is a sequence of `MemoryRegionView`; ``numpy.asarray`` of it is a read-only
    structured array of `VIEW_DTYPE`, without a copy. It keeps the registrations that
    its views are cut from alive, and is immutable.

    Parameters
    ----------
    views : iterable of MemoryRegionView
        All attached, or all detached.

    Raises
    ------
    TypeError
        One of them is no MemoryRegionView.
    ValueError
        Some are attached, some are not.
    """

    def __cinit__(self, views):
        cdef list items
        cdef MemoryRegionView view
        cdef Py_ssize_t i
        cdef set registrations
        if views is UNFILLED:
            return
        items = list(views)
        registrations = set()
        self.memory = new_block(len(items), sizeof(rdmaview_view))
        self.start = <char *>(<ViewBlock>self.memory).block
        self.stride = sizeof(rdmaview_view)
        for i, item in enumerate(items):
            if type(item) is not MemoryRegionView:
                raise TypeError(
                    f"view {i} is a {type(item).__name__}, not a MemoryRegionView: "
                    f"{item!r}"
                )
            view = item
            (<rdmaview_view *>self.start)[i] = view.value
            registrations.add(view.registration)
        self.count = len(items)
        if None not in registrations:
            self.registrations = sort_registrations(registrations)
        elif len(registrations) > 1:
            raise ValueError("some of the views are attached to a registration, some not")

    def __init__(self, views):
        pass

    cdef Py_ssize_t item_size(self):
        return sizeof(rdmaview_view)

    cdef char *item_format(self):
        return VIEW_FORMAT

    cdef object item(self, Py_ssize_t i):
        cdef const rdmaview_view *view = rdmaview_at(self.start, self.stride, i)
        if self.registrations is None:
            return new_view(view, None)
        return new_view(
            view,
            <Registration>self.registrations[
                find_registration(self.registrations, view.id)
            ],
        )

    cdef PackedViews like(
        self, char *start, Py_ssize_t count, Py_ssize_t stride, object memory
    ):
        cdef ViewArray views = ViewArray.__new__(ViewArray, UNFILLED)
        views.start = start
        views.count = count
        views.stride = stride
        views.memory = memory
        views.registrations = self.registrations
        return views

    def __repr__(self):
        return f"<ViewArray of {self.count}{'' if self.attached else ', detached'}>"

    def sorted(self):
        """The same views in the order of their RDMA addresses, by registration.

        Returns
        -------
        ViewArray
            Where views begin at one address, the shorter one comes first.
        """
        import numpy as np

        packed = np.asarray(self)
        order = np.lexsort((packed["size"], packed["rdma_addr"], packed["id"]))
        return choose(self, order)

    def coalesce(self):
        """Join views that follow one another in the array and are adjacent in memory.

        Returns
        -------
        ViewArray
            In the same order; sort the array first to join all that can be.
        """
        cdef ViewArray joined = new_view_array(self.count, self.registrations)
        cdef size_t count
        count = rdmaview_coalesce(
            self.start, self.stride, self.count, <rdmaview_view *>joined.start
        )
        shorten(joined, count)
        return joined

    def remote(self):
        """What a peer needs to reach these bytes.

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        ValueError
            One of the registrations gives a peer no right (its rkey is 0).
        StaleViewError
            One of them was closed.
        """
        cdef RemoteViewArray remotes
        cdef Py_ssize_t i
        if self.registrations is not None:
            check_array_attached(self, "remote views")
        for i in range(self.count):
            if rdmaview_at(self.start, self.stride, i).rkey == 0:
                raise ValueError(
                    f"view {i}, {self.item(i)!r}, gives a peer no right: register with "
                    "Access.REMOTE_READ, REMOTE_WRITE or REMOTE_ATOMIC"
                )
        remotes = new_remote_view_array(self.count)
        rdmaview_to_remote_many(
            self.start, self.stride, self.count, <rdmaview_remote *>remotes.start
        )
        return remotes

    def to_bytes(self):
        """The wire form: b"RVA1", the count as ``!Q``, and ``!QQQQII`` for each view.

        Returns
        -------
        bytes
            12 + 40 * n bytes, in network order.
        """
        cdef bytes wire = new_wire(self, b"RVA1", PACKED_SIZE)
        cdef unsigned char *at = <unsigned char *>PyBytes_AS_STRING(wire) + WIRE_HEAD
        if self.count < LONG:
            pack_views(self.start, self.stride, self.count, at)
        else:
            with nogil:
                pack_views(self.start, self.stride, self.count, at)
        return wire

    @staticmethod
    def from_bytes(data):
        """Rebuild an array, detached, from its wire form.

        Parameters
        ----------
        data : bytes-like

        Returns
        -------
        ViewArray

        Raises
        ------
        ValueError
            Another magic, a length that doesn't fit the count, or a view whose address
            plus size passes 2**64.
        """
        return view_array_from_bytes(data)

    @staticmethod
    def from_array(packed):
        """Make an array, detached, of a structured NumPy array; it is copied.

        Parameters
        ----------
        packed : numpy.ndarray of VIEW_DTYPE
            One dimension.

        Returns
        -------
        ViewArray

        Raises
        ------
        TypeError
            Another dtype.
        ValueError
            Another number of dimensions, or a view whose address plus size passes
            2**64.
        """
        cdef Py_buffer buffer
        cdef ViewArray views
        cdef Py_ssize_t done
        packed = check_packed(packed, view_dtype(), "VIEW_DTYPE")
        PyObject_GetBuffer(packed, &buffer, PyBUF_FULL_RO)
        try:
            views = new_view_array(buffer.shape[0], None)
            done = copy_views(
                <char *>buffer.buf,
                buffer.strides[0],
                views.count,
                <rdmaview_view *>views.start,
            )
        finally:
            PyBuffer_Release(&buffer)
        if done < views.count:
            raise end_error(views, done)
        return views

    @property
    def attached(self):
        """bool: does the array hold the registrations of its views?"""
        return self.registrations is not None

    @property
    def mrs(self):
        """tuple of MemoryRegion: what the views are cut from; empty if detached."""
        cdef set ids
        cdef Py_ssize_t i
        if not self.registrations:
            return ()
        ids = set()
        for i in range(self.count):
            ids.add(rdmaview_at(self.start, self.stride, i).id)
        return tuple(
            [mr for mr in self.registrations if (<Registration>mr).whole.id in ids]
        )


@cython.final
@cython.no_gc_clear
cdef class RemoteViewArray(PackedViews):
    """Many remote views, packed: 32 bytes each, without an object each.

    It is a sequence of `RemoteView`; ``numpy.asarray`` of it is a read-only
    structured array of `REMOTE_DTYPE`, without a copy. It is immutable.

    Parameters
    ----------
    views : iterable of RemoteView

    Raises
    ------
    TypeError
        One of them is no RemoteView.
    """

    def __cinit__(self, views):
        cdef list items
        cdef Py_ssize_t i
        if views is UNFILLED:
            return
        items = list(views)
        self.memory = new_block(len(items), sizeof(rdmaview_remote))
        self.start = <char *>(<ViewBlock>self.memory).block
        self.stride = sizeof(rdmaview_remote)
        for i, item in enumerate(items):
            if type(item) is not RemoteView:
                raise TypeError(
                    f"view {i} is a {type(item).__name__}, not a RemoteView: {item!r}"
                )
            (<rdmaview_remote *>self.start)[i] = (<RemoteView>item).value
        self.count = len(items)

    def __init__(self, views):
        pass

    cdef Py_ssize_t item_size(self):
        return sizeof(rdmaview_remote)

    cdef char *item_format(self):
        return REMOTE_FORMAT

    cdef object item(self, Py_ssize_t i):
        return new_remote_view(rdmaview_remote_at(self.start, self.stride, i))

    cdef PackedViews like(
        self, char *start, Py_ssize_t count, Py_ssize_t stride, object memory
    ):
        cdef RemoteViewArray views = RemoteViewArray.__new__(RemoteViewArray, UNFILLED)
        views.start = start
        views.count = count
        views.stride = stride
        views.memory = memory
        return views

    def __repr__(self):
        return f"<RemoteViewArray of {self.count}>"

    def sorted(self):
        """The same views in the order of their addresses, by registration.

        Returns
        -------
        RemoteViewArray
            Where views begin at one address, the shorter one comes first.
        """
        import numpy as np

        packed = np.asarray(self)
        order = np.lexsort((packed["size"], packed["rdma_addr"], packed["id"]))
        return choose(self, order)

    def coalesce(self):
        """Join views that follow one another in the array and are adjacent in memory.

        Returns
        -------
        RemoteViewArray
            In the same order; sort the array first to join all that can be.
        """
        cdef RemoteViewArray joined = new_remote_view_array(self.count)
        cdef size_t count
        count = rdmaview_remote_coalesce(
            self.start, self.stride, self.count, <rdmaview_remote *>joined.start
        )
        shorten(joined, count)
        return joined

    def to_bytes(self):
        """The wire form: b"RRA1", the count as ``!Q``, and ``!QQQI`` for each view.

        Returns
        -------
        bytes
            12 + 28 * n bytes, in network order.
        """
        cdef bytes wire = new_wire(self, b"RRA1", REMOTE_PACKED_SIZE)
        cdef unsigned char *at = <unsigned char *>PyBytes_AS_STRING(wire) + WIRE_HEAD
        if self.count < LONG:
            pack_remotes(self.start, self.stride, self.count, at)
        else:
            with nogil:
                pack_remotes(self.start, self.stride, self.count, at)
        return wire

    @staticmethod
    def from_bytes(data):
        """Rebuild an array from its wire form.

        Parameters
        ----------
        data : bytes-like

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        ValueError
            Another magic, a length that doesn't fit the count, or a view whose address
            plus size passes 2**64.
        """
        return remote_view_array_from_bytes(data)

    @staticmethod
    def from_array(packed):
        """Make an array of a structured NumPy array; it is copied.

        Parameters
        ----------
        packed : numpy.ndarray of REMOTE_DTYPE
            One dimension.

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        TypeError
            Another dtype.
        ValueError
            Another number of dimensions, or a view whose address plus size passes
            2**64.
        """
        cdef Py_buffer buffer
        cdef RemoteViewArray views
        cdef Py_ssize_t done
        packed = check_packed(packed, remote_dtype(), "REMOTE_DTYPE")
        PyObject_GetBuffer(packed, &buffer, PyBUF_FULL_RO)
        try:
            views = new_remote_view_array(buffer.shape[0])
            done = copy_remotes(
                <char *>buffer.buf,
                buffer.strides[0],
                views.count,
                <rdmaview_remote *>views.start,
            )
        finally:
            PyBuffer_Release(&buffer)
        if done < views.count:
            raise end_error(views, done)
        return views


cdef ViewArray new_view_array(Py_ssize_t count, tuple registrations):
    cdef ViewArray views = ViewArray.__new__(ViewArray, UNFILLED)
    cdef ViewBlock memory = new_block(count, sizeof(rdmaview_view))
    views.memory = memory
    views.start = <char *>memory.block
    views.count = count
    views.stride = sizeof(rdmaview_view)
    views.registrations = registrations
    return views


cdef RemoteViewArray new_remote_view_array(Py_ssize_t count):
    cdef RemoteViewArray views = RemoteViewArray.__new__(RemoteViewArray, UNFILLED)
    cdef ViewBlock memory = new_block(count, sizeof(rdmaview_remote))
    views.memory = memory
    views.start = <char *>memory.block
    views.count = count
    views.stride = sizeof(rdmaview_remote)
    return views


cdef int shorten(PackedViews views, Py_ssize_t count) except -1:
    cdef ViewBlock memory
    if count < views.count // 2:
        # As large as what it holds: the rest would be kept for nothing.
        memory = new_block(count, views.item_size())
        memcpy(memory.block, views.start, memory.size)
        views.memory = memory
        views.start = <char *>memory.block
    views.count = count
    return 0


cdef PackedViews choose(PackedViews views, object key):
    """The views at the places that a list or array names, as NumPy takes it."""
    import numpy as np

    cdef Py_buffer buffer
    cdef char *start
    if isinstance(key, (list, tuple)) and not len(key):
        key = np.empty(0, np.intp)
    key = np.asarray(key)
    if key.ndim != 1 or key.dtype.kind not in "iub":
        raise TypeError(
            "an array of views is indexed by an int, a slice, or one dimension of ints or "
            f"bools, not by {key.ndim} dimensions of {key.dtype}"
        )
    chosen = np.asarray(views)[key]
    PyObject_GetBuffer(chosen, &buffer, PyBUF_SIMPLE)
    start = <char *>buffer.buf
    PyBuffer_Release(&buffer)
    return views.like(start, len(chosen), views.item_size(), chosen)


cdef uint64_t size_at(PackedViews views, Py_ssize_t i) noexcept:
    if type(views) is ViewArray:
        return rdmaview_at(views.start, views.stride, i).size
    return rdmaview_remote_at(views.start, views.stride, i).size


cdef bint are_equal(PackedViews a, PackedViews b) noexcept:
    cdef Py_ssize_t i
    cdef Py_ssize_t item_size = a.item_size()
    if a.count != b.count:
        return False
    if a.stride == item_size and b.stride == item_size:
        return memcmp(a.start, b.start, <size_t>(a.count * item_size)) == 0
    for i in range(a.count):
        if memcmp(a.start + i * a.stride, b.start + i * b.stride, <size_t>item_size):
            return False
    return True


cdef int hash_all(PackedViews views, uint64_t *hashes) except -1:
    if type(views) is ViewArray:
        rdmaview_hash_many(views.start, views.stride, views.count, hashes)
    else:
        rdmaview_remote_hash_many(views.start, views.stride, views.count, hashes)
    return 0


cdef bytes new_wire(PackedViews views, const char *magic, Py_ssize_t packed_size):
    cdef bytes wire = PyBytes_FromStringAndSize(
        NULL, WIRE_HEAD + views.count * packed_size
    )
    cdef char *at = PyBytes_AS_STRING(wire)
    prefer_huge_pages(at, len(wire))
    memcpy(at, magic, 4)
    rdmaview_store(<unsigned char *>at + 4, <uint64_t>views.count)
    return wire


cdef Py_ssize_t read_head(
    Py_buffer *buffer, str kind, const char *magic, Py_ssize_t packed_size
) except -1:
    cdef unsigned char *at = <unsigned char *>buffer.buf
    cdef uint64_t count
    if buffer.len < WIRE_HEAD:
        raise ValueError(f"{kind} is at least {WIRE_HEAD} bytes, not {buffer.len}")
    if memcmp(at, magic, 4):
        raise ValueError(f"{kind} starts with {magic[:4]!r}, not {(<char *>at)[:4]!r}")
    count = rdmaview_load(at + 4)
    if (
        count != <uint64_t>(buffer.len - WIRE_HEAD) // <uint64_t>packed_size
        or <uint64_t>(buffer.len - WIRE_HEAD) % <uint64_t>packed_size
    ):
        raise ValueError(
            f"{kind} of {count} views is {WIRE_HEAD + packed_size * int(count)} bytes, "
            f"not {buffer.len}"
        )
    return <Py_ssize_t>count


def view_array_from_bytes(data):
    """Rebuild an array: what `ViewArray.from_bytes` and pickle call."""
    cdef Py_buffer buffer
    cdef ViewArray views
    cdef Py_ssize_t count
    cdef Py_ssize_t done
    cdef unsigned char *at
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        count = read_head(&buffer, "the wire form of a view array", b"RVA1", PACKED_SIZE)
        views = new_view_array(count, None)
        at = <unsigned char *>buffer.buf + WIRE_HEAD
        if count < LONG:
            done = unpack_views(at, count, <rdmaview_view *>views.start)
        else:
            with nogil:
                done = unpack_views(at, count, <rdmaview_view *>views.start)
    finally:
        PyBuffer_Release(&buffer)
    if done < count:
        raise end_error(views, done)
    return views


def remote_view_array_from_bytes(data):
    """Rebuild an array: what `RemoteViewArray.from_bytes` and pickle call."""
    cdef Py_buffer buffer
    cdef RemoteViewArray views
    cdef Py_ssize_t count
    cdef Py_ssize_t done
    cdef unsigned char *at
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        count = read_head(
            &buffer, "the wire form of a remote view array", b"RRA1", REMOTE_PACKED_SIZE
        )
        views = new_remote_view_array(count)
        at = <unsigned char *>buffer.buf + WIRE_HEAD
        if count < LONG:
            done = unpack_remotes(at, count, <rdmaview_remote *>views.start)
        else:
            with nogil:
                done = unpack_remotes(at, count, <rdmaview_remote *>views.start)
    finally:
        PyBuffer_Release(&buffer)
    if done < count:
        raise end_error(views, done)
    return views


cdef object end_error(PackedViews views, Py_ssize_t i):
    return ValueError(f"view {i} ends past 2**64 - 1: {views.item(i)!r}")


cdef object check_packed(object packed, object dtype, str name):
    import numpy as np

    if not isinstance(packed, np.ndarray) or packed.dtype != dtype:
        found = getattr(packed, "dtype", type(packed).__name__)
        raise TypeError(f"the array's dtype must be {name}, not {found}")
    if packed.ndim != 1:
        raise ValueError(f"the array must have one dimension, not {packed.ndim}")
    return packed


def _id_of(registration):
    return (<Registration>registration).whole.id


cdef tuple sort_registrations(object registrations):
    return tuple(sorted(registrations, key=_id_of))


cdef Py_ssize_t find_registration(tuple registrations, uint64_t id) noexcept:
    """The position in what is sorted by id; -1 if it isn't there."""
    cdef Py_ssize_t low = 0
    cdef Py_ssize_t high = len(registrations)
    cdef Py_ssize_t middle
    cdef uint64_t found
    while low < high:
        middle = (low + high) // 2
        found = (<Registration>registrations[middle]).whole.id
        if found == id:
            return middle
        if found < id:
            low = middle + 1
        else:
            high = middle
    return -1


cdef int check_array_attached(ViewArray views, str use) except -1:
    """Refuse an array that is detached, or of which a registration was closed."""
    cdef Registration registration
    cdef Py_ssize_t i
    if views.registrations is None:
        raise DetachedViewError(
            f"{views!r} is detached, rebuilt from its values: it has no memory here, so "
            f"it can't give {use}. Cut views from the memory region instead"
        )
    for registration in views.registrations:
        check_process(registration.process, "use of views")
        if registration.state != OPEN:
            # Perhaps one that no view of this array is cut from.
            for i in range(views.count):
                if rdmaview_at(views.start, views.stride, i).id == registration.whole.id:
                    check_attached(views.item(i), use)
    return 0


cdef ViewArray as_view_array(object views, str what):
    """A ViewArray as it is, or one made of a list of views."""
    if type(views) is ViewArray:
        return views
    if not isinstance(views, (list, tuple)):
        raise TypeError(
            f"{what} are a ViewArray or a list of MemoryRegionViews, not "
            f"{type(views).__name__}: {views!r}"
        )
    return ViewArray(views)


cdef RemoteViewArray as_remote_view_array(object views, str what):
    """A RemoteViewArray as it is, or one made of a list of remote views."""
    if type(views) is RemoteViewArray:
        return views
    if not isinstance(views, (list, tuple)):
        raise TypeError(
            f"{what} are a RemoteViewArray or a list of RemoteViews, not "
            f"{type(views).__name__}: {views!r}"
        )
    return RemoteViewArray(views)


@cython.final
@cython.no_gc_clear
cdef class Column:
    """Numbers as unsigned 64-bit integers, without a copy where they are that."""

    def __dealloc__(self):
        free(self.own)
        PyBuffer_Release(&self.buffer)

    cdef str text(self, Py_ssize_t i):
        cdef uint64_t number = self.values[i * self.step]
        return str(<int64_t>number) if self.is_signed else str(number)


cdef Column parse_column(object numbers, str name):
    """Read one number, or many; negative ones come out over any size."""
    cdef Column column = Column.__new__(Column)
    column.name = name
    column.count = -1
    column.values = &column.single
    if isinstance(numbers, (list, tuple, range)):
        read_list(column, list(numbers))
    elif PyObject_CheckBuffer(numbers) and getattr(numbers, "ndim", 1) != 0:
        read_numbers(column, numbers)
    elif parse_u64(numbers, name, &column.single):
        raise IndexError(f"{name} {number_text(numbers)} isn't inside 64 bits")
    return column


cdef int read_list(Column column, list numbers) except -1:
    cdef Py_ssize_t i
    column.count = len(numbers)
    column.step = 1
    column.own = <uint64_t *>malloc(column.count * sizeof(uint64_t) + 1)
    if column.own == NULL:
        raise MemoryError()
    column.values = column.own
    for i in range(column.count):
        if parse_u64(numbers[i], f"{column.name}[{i}]", &column.own[i]):
            raise IndexError(
                f"{column.name}[{i}] is {number_text(numbers[i])}, which isn't inside 64 "
                "bits"
            )
    return 0


cdef int read_numbers(Column column, object numbers) except -1:
    cdef bytes form
    PyObject_GetBuffer(numbers, &column.buffer, PyBUF_FULL_RO)
    if column.buffer.ndim != 1:
        raise ValueError(
            f"{column.name} must be a number or one dimension of them, not "
            f"{column.buffer.ndim} dimensions"
        )
    form = column.buffer.format if column.buffer.format != NULL else b"B"
    if (
        column.buffer.itemsize != 8
        or form not in (b"Q", b"q", b"L", b"l", b"N", b"n")
        or column.buffer.strides[0] % 8
        or <size_t>column.buffer.buf % 8
    ):
        PyBuffer_Release(&column.buffer)
        return read_numbers(column, widen(numbers, column.name))
    column.is_signed = form in (b"q", b"l", b"n")
    column.values = <const uint64_t *>column.buffer.buf
    column.count = column.buffer.shape[0]
    column.step = column.buffer.strides[0] // 8
    return 0


cdef object widen(object numbers, str name):
    """Other integers as those of 64 bits."""
    import numpy as np

    array = np.asarray(numbers)
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must be integers, not {array.dtype}")
    return array.astype(np.int64 if array.dtype.kind == "i" else np.uint64)


cdef Py_ssize_t common_count(Column first, Column second) except -1:
    """How many rows two columns have, of which one may be a single number."""
    if first.count >= 0 and second.count >= 0 and first.count != second.count:
        raise ValueError(
            f"{first.name} has {first.count} numbers, {second.name} has {second.count}"
        )
    if first.count < 0 and second.count < 0:
        return 1
    return max(first.count, second.count)


cdef object range_error(Column offsets, Column sizes, Py_ssize_t i, uint64_t whole):
    return IndexError(
        f"view {i}: offset {offsets.text(i)} and size {sizes.text(i)} aren't inside the "
        f"{whole} bytes"
    )


cdef ViewArray cut_many(
    const rdmaview_view *whole, Registration registration, object offsets, object sizes
):
    cdef Column offset = parse_column(offsets, "offsets")
    cdef Column size = parse_column(sizes, "sizes")
    cdef ViewArray views = new_view_array(
        common_count(offset, size), None if registration is None else (registration,)
    )
    cdef Py_ssize_t cut
    if views.count < LONG:
        cut = cut_slices(
            whole,
            offset.values,
            offset.step,
            size.values,
            size.step,
            views.count,
            <rdmaview_view *>views.start,
        )
    else:
        with nogil:
            cut = cut_slices(
                whole,
                offset.values,
                offset.step,
                size.values,
                size.step,
                views.count,
                <rdmaview_view *>views.start,
            )
    if cut < views.count:
        raise range_error(offset, size, cut, whole.size)
    return views


cdef RemoteViewArray cut_many_remote(
    const rdmaview_remote *whole, object offsets, object sizes
):
    cdef Column offset = parse_column(offsets, "offsets")
    cdef Column size = parse_column(sizes, "sizes")
    cdef RemoteViewArray views = new_remote_view_array(common_count(offset, size))
    cdef Py_ssize_t cut
    if views.count < LONG:
        cut = cut_remote_slices(
            whole,
            offset.values,
            offset.step,
            size.values,
            size.step,
            views.count,
            <rdmaview_remote *>views.start,
        )
    else:
        with nogil:
            cut = cut_remote_slices(
                whole,
                offset.values,
                offset.step,
                size.values,
                size.step,
                views.count,
                <rdmaview_remote *>views.start,
            )
    if cut < views.count:
        raise range_error(offset, size, cut, whole.size)
    return views


def cut_views(view, offsets, sizes):
    """Cut many views out of one: what `MemoryRegionView.views` and `RemoteView.views` call."""
    if type(view) is MemoryRegionView:
        return cut_many(
            &(<MemoryRegionView>view).value,
            (<MemoryRegionView>view).registration,
            offsets,
            sizes,
        )
    return cut_many_remote(&(<RemoteView>view).value, offsets, sizes)


def split_view(view, size):
    """Cut a view into pieces: what `split` calls."""
    cdef uint64_t whole = view.size
    cdef uint64_t piece
    cdef uint64_t count
    cdef PackedViews views
    if parse_u64(size, "size", &piece) or not piece:
        raise ValueError(f"size must be from 1 to 2**64 - 1, not {number_text(size)}")
    count = whole // piece + (1 if whole % piece else 0)
    check_grid_memory(count)
    views = fill_grid(view, count, piece, piece)
    if whole % piece:
        if type(view) is MemoryRegionView:
            (<rdmaview_view *>views.start)[count - 1].size = whole % piece
        else:
            (<rdmaview_remote *>views.start)[count - 1].size = whole % piece
    return views


def grid_view(view, count, stride, size):
    """Cut pieces at equal distances out of a view: what `grid` calls."""
    cdef uint64_t whole = view.size
    cdef uint64_t pieces
    cdef uint64_t distance
    cdef uint64_t length
    cdef bint outside = parse_u64(count, "count", &pieces)
    outside |= parse_u64(stride, "stride", &distance)
    outside |= parse_u64(size, "size", &length)
    if not outside and pieces:
        # (pieces - 1) * distance + length <= whole, without a sum or product that wraps.
        outside = length > whole or (
            pieces > 1
            and distance > 0
            and (whole - length) // distance < pieces - 1
        )
    if outside:
        raise IndexError(
            f"{number_text(count)} pieces of {number_text(size)} bytes, "
            f"{number_text(stride)} apart, aren't inside the {whole} bytes"
        )
    check_grid_memory(pieces)
    return fill_grid(view, pieces, distance, length)


cdef int check_grid_memory(uint64_t count) except -1:
    if count >> 48:
        raise MemoryError(f"no memory for {count} views")
    return 0


cdef PackedViews fill_grid(object view, uint64_t count, uint64_t stride, uint64_t size):
    cdef rdmaview_view *views
    cdef rdmaview_remote *remotes
    cdef PackedViews array
    cdef Registration registration
    cdef uint64_t i
    if type(view) is MemoryRegionView:
        registration = (<MemoryRegionView>view).registration
        array = new_view_array(
            count, None if registration is None else (registration,)
        )
        views = <rdmaview_view *>array.start
        for i in range(count):
            views[i] = (<MemoryRegionView>view).value
            views[i].virtual_addr += i * stride
            views[i].rdma_addr += i * stride
            views[i].size = size
        return array
    array = new_remote_view_array(count)
    remotes = <rdmaview_remote *>array.start
    for i in range(count):
        remotes[i] = (<RemoteView>view).value
        remotes[i].rdma_addr += i * stride
        remotes[i].size = size
    return array


_view.array_makers.update(views=cut_views, split=split_view, grid=grid_view)
