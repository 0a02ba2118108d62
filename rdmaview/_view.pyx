"""Views of registered memory: immutable values that cost nanoseconds.

No verb is called here, and nothing here needs a device or libibverbs.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_FORMAT,
    PyBUF_ND,
    PyBUF_SIMPLE,
    PyBUF_STRIDES,
    PyBUF_WRITABLE,
    PyBuffer_Release,
    PyObject_GetBuffer,
)
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.object cimport PyObject
from cpython.long cimport PyLong_Check, PyLong_CheckExact
from libc.stdint cimport UINT32_MAX, UINT64_MAX, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

from ._errors cimport Process, check_process, is_this_process, this_process

import operator
import os

from ._errors import DetachedViewError, StaleViewError

cdef extern from "Python.h":
    const Py_ssize_t PY_SSIZE_T_MAX
    ctypedef struct TypeSlots "PyTypeObject":
        object (*tp_alloc)(TypeSlots *cls, Py_ssize_t items)
        object (*tp_new)(TypeSlots *cls, object arguments, PyObject *keywords)

    ctypedef struct PySliceObject:
        PyObject *start
        PyObject *stop
        PyObject *step

    PyObject *PyErr_Occurred() noexcept
    void PyErr_Clear() noexcept
    Py_ssize_t PyVectorcall_NARGS(size_t count_and_flag) noexcept
    # Errors are looked for by PyErr_Occurred, and cleared.
    Py_ssize_t PyLong_AsSsize_t(object number) noexcept
    bint PyIndex_Check(object number) noexcept
    bint PySlice_Check(object key) noexcept
    int PySlice_Unpack(
        object key, Py_ssize_t *start, Py_ssize_t *stop, Py_ssize_t *step
    ) except -1
    Py_ssize_t PySlice_AdjustIndices(
        Py_ssize_t length, Py_ssize_t *start, Py_ssize_t *stop, Py_ssize_t step
    ) noexcept

cdef extern from *:
    """
    /* Reads digit by digit; PyLong_AsUnsignedLongLong, byte by byte, takes 7 times as long. */
    #if ULONG_MAX == UINT64_MAX
    #define long_as_u64 PyLong_AsUnsignedLong
    #else
    #define long_as_u64 PyLong_AsUnsignedLongLong
    #endif
    """
    uint64_t long_as_u64(object number) noexcept

cdef extern from "view_type.h":
    ctypedef object (*CallSlot "vectorcallfunc")(
        object cls, PyObject *const *arguments, size_t count_and_flag, PyObject *names
    )
    object make_view(
        TypeSlots *cls, const rdmaview_view *value, object registration
    )
    Py_ssize_t uncounted_header(object view) noexcept
    int set_up_view_type(TypeSlots *cls, CallSlot call) except -1

cdef enum:
    VIEW_WIRE_SIZE = 44
    REMOTE_WIRE_SIZE = 32

# What makes arrays of views, by method: the room above puts it here when it is imported.
array_makers = {}


cdef class Registration:
    """What a view needs of the memory region that it is cut from."""

    def __init__(self):
        raise TypeError("memory regions are made by ProtectionDomain.reg_mr")


# view_type.h takes its life in hand, the collector's part included.
@cython.final
@cython.no_gc
cdef class MemoryRegionView:
    """A slice of a registration: an immutable value of six integers.

    Views are cut from a memory region (`MemoryRegion.view`, ``mr[a:b]``) or from
    another view, and then are *attached*: they keep the registration alive. A view
    built from its six fields, from bytes or by pickle is *detached*: it has the
    same value, equality and hash, but no memory.

    Parameters
    ----------
    id : integer
        Names one registration of one process; never reused.
    virtual_addr : integer
        Address of the first byte in the process that registered it.
    rdma_addr : integer
        Address of the first byte in a work request.
    size : integer
        Bytes.
    lkey, rkey : integer
        Local and remote key, 32 bits. An rkey of 0 says: no remote right.

    Raises
    ------
    TypeError
        A field is no integer.
    ValueError
        A field does not fit its width, or an address plus `size` passes 2**64.
    """

    def __cinit__(
        self,
        id=None,
        virtual_addr=None,
        rdma_addr=None,
        size=None,
        lkey=None,
        rkey=None,
    ):
        parse_view(id, virtual_addr, rdma_addr, size, lkey, rkey, &self.value)

    def __repr__(self):
        return (
            f"MemoryRegionView(id={self.value.id:#x}, "
            f"virtual_addr={self.value.virtual_addr:#x}, "
            f"rdma_addr={self.value.rdma_addr:#x}, size={self.value.size}, "
            f"lkey={self.value.lkey:#x}, rkey={self.value.rkey:#x})"
        )

    def __eq__(self, other):
        if type(other) is not MemoryRegionView:
            return NotImplemented
        return rdmaview_equal(&self.value, &(<MemoryRegionView>other).value)

    def __hash__(self):
        return <Py_hash_t>rdmaview_hash(&self.value)

    def __bool__(self):
        return self.value.size != 0

    def __len__(self):
        return to_length(self.value.size)

    def __getitem__(self, key):
        cdef uint64_t offset
        cdef uint64_t length
        cdef rdmaview_view part
        parse_slice(key, self.value.size, &offset, &length)
        rdmaview_slice(&self.value, offset, length, &part)
        return new_view(&part, self.registration)

    def __contains__(self, other):
        if type(other) is not MemoryRegionView:
            raise TypeError(
                f"a view contains views, not {type(other).__name__}: {other!r}"
            )
        return rdmaview_contains(&self.value, &(<MemoryRegionView>other).value)

    def __getbuffer__(self, Py_buffer *buffer, int flags):
        check_attached(self, "its memory")
        if self.registration.is_device:
            raise BufferError(
                "this view is of device memory, which the processor does not read. Move "
                "its bytes to and from host memory by reads and writes"
            )
        if flags & PyBUF_WRITABLE and self.registration.readonly:
            raise BufferError("this view is of a read-only buffer")
        fill_buffer(self, buffer, flags)

    def __array__(self, dtype=None, copy=None):
        # NumPy comes here only when the buffer was refused, having dropped the reason.
        return self.array()

    # Called with no keyword, and so without what it takes to look for them.
    @cython.always_allow_keywords(False)
    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return view_from_bytes, (self.to_bytes(),)

    def __sizeof__(self):
        return sizeof(MemoryRegionView) - uncounted_header(self)

    def subview(self, offset, size):
        """Cut `size` bytes out of this view, from `offset` on; never clamp.

        Parameters
        ----------
        offset, size : integer
            Bytes, relative to this view.

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        IndexError
            They aren't inside this view.
        TypeError
            One of them is no integer.
        """
        cdef uint64_t first
        cdef uint64_t length
        cdef rdmaview_view part
        parse_range(offset, size, self.value.size, &first, &length)
        rdmaview_slice(&self.value, first, length, &part)
        return new_view(&part, self.registration)

    def views(self, offsets, sizes):
        """Cut many views at once; all are checked before any is given.

        Parameters
        ----------
        offsets, sizes : integer or sequence of integers
            Bytes, relative to this view; a single number is for all.

        Returns
        -------
        ViewArray

        Raises
        ------
        IndexError
            One of them isn't inside this view; the text says which.
        TypeError
            They are no integers.
        ValueError
            There are more of one than of the other, or more than one dimension.
        """
        return array_makers["views"](self, offsets, sizes)

    def split(self, size):
        """Cut the view into pieces that cover it.

        Parameters
        ----------
        size : integer
            Bytes of each piece; the last is smaller if the view is no multiple.

        Returns
        -------
        ViewArray

        Raises
        ------
        ValueError
            `size` is below 1.
        """
        return array_makers["split"](self, size)

    def grid(self, count, stride, size):
        """Cut pieces at equal distances, as the rows of a matrix.

        Parameters
        ----------
        count : integer
            Pieces.
        stride : integer
            Bytes from the start of one to the start of the next.
        size : integer
            Bytes of each.

        Returns
        -------
        ViewArray

        Raises
        ------
        IndexError
            They aren't inside this view.
        """
        return array_makers["grid"](self, count, stride, size)

    def overlaps(self, MemoryRegionView other not None):
        """Do this view and `other` share a byte of one registration?

        Parameters
        ----------
        other : MemoryRegionView

        Returns
        -------
        bool
        """
        return rdmaview_overlaps(&self.value, &other.value)

    def array(self, dtype="u1", shape=None):
        """The bytes as a NumPy array, without a copy.

        The array keeps the memory, but not the registration, alive. It is
        read-only where the registered buffer is.

        Parameters
        ----------
        dtype : numpy dtype or what makes one, default "u1"
        shape : int or tuple of int, optional
            One of them may be -1. Default: one dimension.

        Returns
        -------
        numpy.ndarray

        Raises
        ------
        ValueError
            The size is no multiple of the item size, or doesn't fit the shape; or
            the dtype holds Python objects.
        StaleViewError
            The registration was closed.
        DetachedViewError
            The view has no memory.
        BufferError
            The view is of a dma-buf.
        """
        import numpy as np

        memory = memoryview(self)
        dtype = np.dtype(dtype)
        if dtype.hasobject:
            raise ValueError(f"dtype {dtype} holds Python objects, not bytes")
        count, rest = divmod(len(memory), dtype.itemsize) if dtype.itemsize else (0, 1)
        if rest:
            raise ValueError(
                f"a view of {len(memory)} bytes is no whole number of items of "
                f"{dtype.itemsize} bytes (dtype {dtype})"
            )
        flat = np.ndarray((count,), dtype, memory)
        return flat if shape is None else flat.reshape(shape)

    def remote(self):
        """What a peer needs to reach these bytes.

        Returns
        -------
        RemoteView

        Raises
        ------
        ValueError
            The registration gives a peer no right (its rkey is 0).
        StaleViewError
            The registration was closed.
        """
        cdef rdmaview_remote remote
        if self.registration is not None:
            check_attached(self, "a remote view")
        if self.value.rkey == 0:
            raise ValueError(
                f"{self!r} gives a peer no right: register with Access.REMOTE_READ, "
                "REMOTE_WRITE or REMOTE_ATOMIC"
            )
        remote = rdmaview_to_remote(&self.value)
        return new_remote_view(&remote)

    def to_bytes(self):
        """The wire form: ``!4sQQQQII`` of b"RMV1" and the six fields, 44 bytes.

        Returns
        -------
        bytes
        """
        cdef bytes wire = PyBytes_FromStringAndSize(NULL, VIEW_WIRE_SIZE)
        cdef char *at = PyBytes_AS_STRING(wire)
        memcpy(at, b"RMV1", 4)
        rdmaview_pack(&self.value, <unsigned char *>at + 4)
        return wire

    @staticmethod
    def from_bytes(data):
        """Rebuild a view, detached, from its wire form.

        Parameters
        ----------
        data : bytes-like
            Exactly 44 bytes.

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        ValueError
            Another length or magic, or an address plus size that passes 2**64.
        """
        return view_from_bytes(data)

    def to_dict(self):
        """The six fields by name.

        Returns
        -------
        dict of str to int
        """
        return {
            "id": self.value.id,
            "virtual_addr": self.value.virtual_addr,
            "rdma_addr": self.value.rdma_addr,
            "size": self.value.size,
            "lkey": self.value.lkey,
            "rkey": self.value.rkey,
        }

    @staticmethod
    def from_dict(fields):
        """Rebuild a view, detached, from what `to_dict` gave.

        Parameters
        ----------
        fields : dict of str to int

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        TypeError
            A field is missing, unknown or no integer.
        ValueError
            A field does not fit.
        """
        return MemoryRegionView(**fields)

    @property
    def id(self):
        """int: names the registration."""
        return self.value.id

    @property
    def virtual_addr(self):
        """int: address of the first byte in the owner's memory."""
        return self.value.virtual_addr

    @property
    def rdma_addr(self):
        """int: address of the first byte in a work request."""
        return self.value.rdma_addr

    @property
    def size(self):
        """int: bytes."""
        return self.value.size

    @property
    def lkey(self):
        """int: the key for the local side of a work request."""
        return self.value.lkey

    @property
    def rkey(self):
        """int: the key for the remote side of a work request; 0: no remote right."""
        return self.value.rkey

    @property
    def mr(self):
        """MemoryRegion or None: what the view is cut from; None if detached."""
        return self.registration

    @property
    def attached(self):
        """bool: does the view hold its registration?"""
        return self.registration is not None


@cython.final
cdef class RemoteView:
    """What a peer needs of a view: an immutable value of four integers.

    Parameters
    ----------
    id : integer
        Names one registration of one process.
    rdma_addr : integer
        Address of the first byte in a work request.
    size : integer
        Bytes.
    rkey : integer
        Remote key, 32 bits.

    Raises
    ------
    TypeError
        A field is no integer.
    ValueError
        A field does not fit its width, or `rdma_addr` plus `size` passes 2**64.
    """

    def __cinit__(self, id=None, rdma_addr=None, size=None, rkey=None):
        if rkey is None:
            raise TypeError("RemoteView takes four integers: id, rdma_addr, size, rkey")
        to_u64(id, "id", &self.value.id)
        to_u64(rdma_addr, "rdma_addr", &self.value.rdma_addr)
        to_u64(size, "size", &self.value.size)
        to_u32(rkey, "rkey", &self.value.rkey)
        check_end("rdma_addr", self.value.rdma_addr, self.value.size)

    def __repr__(self):
        return (
            f"RemoteView(id={self.value.id:#x}, rdma_addr={self.value.rdma_addr:#x}, "
            f"size={self.value.size}, rkey={self.value.rkey:#x})"
        )

    def __eq__(self, other):
        if type(other) is not RemoteView:
            return NotImplemented
        return rdmaview_remote_equal(&self.value, &(<RemoteView>other).value)

    def __hash__(self):
        return <Py_hash_t>rdmaview_remote_hash(&self.value)

    def __bool__(self):
        return self.value.size != 0

    def __len__(self):
        return to_length(self.value.size)

    def __getitem__(self, key):
        cdef uint64_t offset
        cdef uint64_t length
        cdef rdmaview_remote part
        parse_slice(key, self.value.size, &offset, &length)
        rdmaview_remote_slice(&self.value, offset, length, &part)
        return new_remote_view(&part)

    def __contains__(self, other):
        if type(other) is not RemoteView:
            raise TypeError(
                f"a remote view contains remote views, not {type(other).__name__}: "
                f"{other!r}"
            )
        return rdmaview_remote_contains(&self.value, &(<RemoteView>other).value)

    # Called with no keyword, and so without what it takes to look for them.
    @cython.always_allow_keywords(False)
    def __copy__(self):
        return self

    def __deepcopy__(self, memo):
        return self

    def __reduce__(self):
        return remote_view_from_bytes, (self.to_bytes(),)

    def subview(self, offset, size):
        """Cut `size` bytes out of this view, from `offset` on; never clamp.

        Parameters
        ----------
        offset, size : integer
            Bytes, relative to this view.

        Returns
        -------
        RemoteView

        Raises
        ------
        IndexError
            They aren't inside this view.
        TypeError
            One of them is no integer.
        """
        cdef uint64_t first
        cdef uint64_t length
        cdef rdmaview_remote part
        parse_range(offset, size, self.value.size, &first, &length)
        rdmaview_remote_slice(&self.value, first, length, &part)
        return new_remote_view(&part)

    def views(self, offsets, sizes):
        """Cut many views at once; all are checked before any is given.

        Parameters
        ----------
        offsets, sizes : integer or sequence of integers
            Bytes, relative to this view; a single number is for all.

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        IndexError
            One of them isn't inside this view; the text says which.
        TypeError
            They are no integers.
        ValueError
            There are more of one than of the other, or more than one dimension.
        """
        return array_makers["views"](self, offsets, sizes)

    def split(self, size):
        """Cut the view into pieces that cover it.

        Parameters
        ----------
        size : integer
            Bytes of each piece; the last is smaller if the view is no multiple.

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        ValueError
            `size` is below 1.
        """
        return array_makers["split"](self, size)

    def grid(self, count, stride, size):
        """Cut pieces at equal distances, as the rows of a matrix.

        Parameters
        ----------
        count : integer
            Pieces.
        stride : integer
            Bytes from the start of one to the start of the next.
        size : integer
            Bytes of each.

        Returns
        -------
        RemoteViewArray

        Raises
        ------
        IndexError
            They aren't inside this view.
        """
        return array_makers["grid"](self, count, stride, size)

    def overlaps(self, RemoteView other not None):
        """Do this view and `other` share a byte of one registration?

        Parameters
        ----------
        other : RemoteView

        Returns
        -------
        bool
        """
        return rdmaview_remote_overlaps(&self.value, &other.value)

    def to_bytes(self):
        """The wire form: ``!4sQQQI`` of b"RRV1" and the four fields, 32 bytes.

        Returns
        -------
        bytes
        """
        cdef bytes wire = PyBytes_FromStringAndSize(NULL, REMOTE_WIRE_SIZE)
        cdef char *at = PyBytes_AS_STRING(wire)
        memcpy(at, b"RRV1", 4)
        rdmaview_remote_pack(&self.value, <unsigned char *>at + 4)
        return wire

    @staticmethod
    def from_bytes(data):
        """Rebuild a remote view from its wire form.

        Parameters
        ----------
        data : bytes-like
            Exactly 32 bytes.

        Returns
        -------
        RemoteView

        Raises
        ------
        ValueError
            Another length or magic, or an address plus size that passes 2**64.
        """
        return remote_view_from_bytes(data)

    def to_dict(self):
        """The four fields by name.

        Returns
        -------
        dict of str to int
        """
        return {
            "id": self.value.id,
            "rdma_addr": self.value.rdma_addr,
            "size": self.value.size,
            "rkey": self.value.rkey,
        }

    @staticmethod
    def from_dict(fields):
        """Rebuild a remote view from what `to_dict` gave.

        Parameters
        ----------
        fields : dict of str to int

        Returns
        -------
        RemoteView

        Raises
        ------
        TypeError
            A field is missing, unknown or no integer.
        ValueError
            A field does not fit.
        """
        return RemoteView(**fields)

    @property
    def id(self):
        """int: names the registration."""
        return self.value.id

    @property
    def rdma_addr(self):
        """int: address of the first byte in a work request."""
        return self.value.rdma_addr

    @property
    def size(self):
        """int: bytes."""
        return self.value.size

    @property
    def rkey(self):
        """int: the key for the remote side of a work request."""
        return self.value.rkey


cdef MemoryRegionView new_view(const rdmaview_view *value, Registration registration):
    return <MemoryRegionView>make_view(
        <TypeSlots *>MemoryRegionView, value, registration
    )


cdef RemoteView new_remote_view(const rdmaview_remote *value):
    cdef TypeSlots *cls = <TypeSlots *>RemoteView
    cdef RemoteView view = <RemoteView>cls.tp_alloc(cls, 0)
    view.value = value[0]
    return view


cdef object call_view_type(
    object cls, PyObject *const *arguments, size_t count_and_flag, PyObject *names
):
    """MemoryRegionView(...), which needs no tuple for six arguments by position."""
    cdef TypeSlots *slots = <TypeSlots *>MemoryRegionView
    cdef Py_ssize_t count = PyVectorcall_NARGS(count_and_flag)
    cdef Py_ssize_t i
    cdef rdmaview_view value
    if names == NULL and count == 6:
        parse_view(
            <object>arguments[0],
            <object>arguments[1],
            <object>arguments[2],
            <object>arguments[3],
            <object>arguments[4],
            <object>arguments[5],
            &value,
        )
        return new_view(&value, None)
    positional = tuple([<object>arguments[i] for i in range(count)])
    named = {}
    if names != NULL:
        for i, name in enumerate(<tuple>names):
            named[name] = <object>arguments[count + i]
    return slots.tp_new(slots, positional, <PyObject *>named)


set_up_view_type(<TypeSlots *>MemoryRegionView, call_view_type)


# The high 24 bits of every id of this process, and the process that drew them.
cdef uint64_t id_epoch = 0
cdef uint64_t id_count = 0
cdef Process id_process


cdef uint64_t next_registration_id() except 0:
    global id_epoch, id_count, id_process
    if id_epoch == 0 or not is_this_process(id_process):
        drawn = 0
        while not drawn:
            drawn = int.from_bytes(os.urandom(3), "big")
        id_epoch = <uint64_t>drawn << 40
        id_process = this_process()
    id_count += 1
    if id_count >> 40:
        raise OverflowError("2**40 registrations were made by this process")
    return id_epoch | id_count


cdef int check_attached(MemoryRegionView view, str use) except -1:
    cdef Registration registration = view.registration
    if registration is None:
        raise DetachedViewError(
            f"{view!r} is detached, rebuilt from its values: it has no memory here, "
            f"so it can't give {use}. Cut a view from the memory region instead"
        )
    if registration.state != OPEN:
        raise StaleViewError(
            f"{view!r} is stale: its memory region was closed, so it can't give {use}"
        )
    return check_process(registration.process, "use of a view")


cdef int parse_u64(object number, str name, uint64_t *parsed) except -1:
    """Read an integer; return 1 if it is negative or over 64 bits."""
    if not PyLong_CheckExact(number):
        # A bool is an int, and always a mistake here; so is NumPy's (an int until 2.3).
        is_int = PyLong_Check(number)
        if (
            isinstance(number, bool)
            or not PyIndex_Check(number)
            or not is_int
            and getattr(getattr(number, "dtype", None), "kind", "") == "b"
        ):
            raise TypeError(
                f"{name} must be an int, not {type(number).__name__}: {number!r}"
            )
        if not is_int:
            number = operator.index(number)
    parsed[0] = long_as_u64(number)
    if parsed[0] == UINT64_MAX and PyErr_Occurred() != NULL:
        PyErr_Clear()
        return 1
    return 0


cdef int parse_view(
    object id,
    object virtual_addr,
    object rdma_addr,
    object size,
    object lkey,
    object rkey,
    rdmaview_view *value,
) except -1:
    if rkey is None:
        raise TypeError(
            "MemoryRegionView takes six integers: "
            "id, virtual_addr, rdma_addr, size, lkey, rkey"
        )
    to_u64(id, "id", &value.id)
    to_u64(virtual_addr, "virtual_addr", &value.virtual_addr)
    to_u64(rdma_addr, "rdma_addr", &value.rdma_addr)
    to_u64(size, "size", &value.size)
    to_u32(lkey, "lkey", &value.lkey)
    to_u32(rkey, "rkey", &value.rkey)
    return check_view_end(value)


cdef str number_text(object number):
    """Write a number; Python refuses to write one of thousands of digits."""
    try:
        return repr(number)
    except ValueError:
        return f"an int of {operator.index(number).bit_length()} bits"


cdef inline int to_u64(object number, str name, uint64_t *parsed) except -1:
    if PyLong_CheckExact(number):
        parsed[0] = long_as_u64(number)
        if parsed[0] != UINT64_MAX:
            return 0
    return to_odd_u64(number, name, parsed)


cdef int to_odd_u64(object number, str name, uint64_t *parsed) except -1:
    PyErr_Clear()
    if parse_u64(number, name, parsed):
        raise ValueError(f"{name} must be from 0 to 2**64 - 1, not {number_text(number)}")
    return 0


cdef inline int to_u32(object number, str name, uint32_t *parsed) except -1:
    cdef uint64_t wide
    if PyLong_CheckExact(number):
        wide = long_as_u64(number)
        if wide <= UINT32_MAX:
            parsed[0] = <uint32_t>wide
            return 0
    return to_odd_u32(number, name, parsed)


cdef int to_odd_u32(object number, str name, uint32_t *parsed) except -1:
    cdef uint64_t wide
    PyErr_Clear()
    if parse_u64(number, name, &wide) or wide > UINT32_MAX:
        raise ValueError(f"{name} must be from 0 to 2**32 - 1, not {number_text(number)}")
    parsed[0] = <uint32_t>wide
    return 0


cdef int check_end(str name, uint64_t address, uint64_t size) except -1:
    if size > UINT64_MAX - address:
        raise ValueError(f"{name} {address:#x} plus size {size} passes 2**64 - 1")
    return 0


cdef int check_view_end(const rdmaview_view *value) except -1:
    check_end("virtual_addr", value.virtual_addr, value.size)
    return check_end("rdma_addr", value.rdma_addr, value.size)


cdef Py_ssize_t to_length(uint64_t size) except -1:
    if size > <uint64_t>PY_SSIZE_T_MAX:
        raise OverflowError(f"len() can't give {size}: use .size")
    return <Py_ssize_t>size


cdef int parse_slice(
    object key, uint64_t size, uint64_t *offset, uint64_t *length
) except -1:
    cdef Py_ssize_t start
    cdef Py_ssize_t stop
    cdef Py_ssize_t step
    if not PySlice_Check(key):
        raise TypeError(
            f"a view is cut by a slice, as view[a:b], not by {type(key).__name__}: "
            f"{key!r}"
        )
    if unpack_plain_slice(<PySliceObject *>key, size, offset, length):
        return 0
    PySlice_Unpack(key, &start, &stop, &step)
    if step != 1:
        raise ValueError(f"a view is contiguous: the step must be 1, not {step}")
    if size > <uint64_t>PY_SSIZE_T_MAX:
        raise OverflowError(f"slices can't reach {size} bytes: use subview()")
    length[0] = <uint64_t>PySlice_AdjustIndices(<Py_ssize_t>size, &start, &stop, 1)
    offset[0] = <uint64_t>start
    return 0


cdef inline bint unpack_plain_slice(
    PySliceObject *key, uint64_t size, uint64_t *offset, uint64_t *length
) noexcept:
    """Read [a:b] of two ints with 0 <= a <= b <= size: nearly every slice is one."""
    cdef Py_ssize_t start
    cdef Py_ssize_t stop
    if (
        <object>key.step is not None
        or not PyLong_CheckExact(<object>key.start)
        or not PyLong_CheckExact(<object>key.stop)
    ):
        return False
    start = PyLong_AsSsize_t(<object>key.start)
    stop = PyLong_AsSsize_t(<object>key.stop)
    if start < 0 or stop < start or <uint64_t>stop > size:
        PyErr_Clear()
        return False
    offset[0] = <uint64_t>start
    length[0] = <uint64_t>(stop - start)
    return True


cdef int parse_range(
    object offset, object size, uint64_t whole, uint64_t *offset_out, uint64_t *size_out
) except -1:
    cdef bint outside = parse_u64(offset, "offset", offset_out)
    outside |= parse_u64(size, "size", size_out)
    if outside or not rdmaview_within(whole, offset_out[0], size_out[0]):
        raise IndexError(
            f"offset {number_text(offset)} and size {number_text(size)} aren't inside "
            f"the {whole} bytes"
        )
    return 0


cdef char *UNSIGNED_BYTES = "B"


cdef int fill_buffer(MemoryRegionView view, Py_buffer *buffer, int flags) except -1:
    buffer.len = to_length(view.value.size)
    buffer.obj = view.registration.memory
    buffer.buf = <void *>view.value.virtual_addr
    buffer.readonly = view.registration.readonly
    buffer.itemsize = 1
    buffer.format = UNSIGNED_BYTES if flags & PyBUF_FORMAT == PyBUF_FORMAT else NULL
    buffer.ndim = 1
    # One dimension of single bytes: the length is the shape, the item size the stride.
    buffer.shape = &buffer.len if flags & PyBUF_ND == PyBUF_ND else NULL
    buffer.strides = (
        &buffer.itemsize if flags & PyBUF_STRIDES == PyBUF_STRIDES else NULL
    )
    buffer.suboffsets = NULL
    buffer.internal = NULL
    return 0


cdef int load_wire(object data, str kind, const char *magic, char *wire, int size) except -1:
    cdef Py_buffer buffer
    PyObject_GetBuffer(data, &buffer, PyBUF_SIMPLE)
    try:
        if buffer.len != size:
            raise ValueError(f"{kind} is {size} bytes, not {buffer.len}")
        memcpy(wire, buffer.buf, size)
    finally:
        PyBuffer_Release(&buffer)
    if memcmp(wire, magic, 4):
        raise ValueError(
            f"{kind} starts with {magic[:4]!r}, not {wire[:4]!r}"
        )
    return 0


def view_from_bytes(data):
    """Rebuild a view: what `MemoryRegionView.from_bytes` and pickle call."""
    cdef char wire[VIEW_WIRE_SIZE]
    cdef rdmaview_view value
    load_wire(data, "the wire form of a view", b"RMV1", wire, VIEW_WIRE_SIZE)
    if not rdmaview_unpack(<unsigned char *>wire + 4, &value):
        check_view_end(&value)
    return new_view(&value, None)


def remote_view_from_bytes(data):
    """Rebuild a remote view: what `RemoteView.from_bytes` and pickle call."""
    cdef char wire[REMOTE_WIRE_SIZE]
    cdef rdmaview_remote value
    load_wire(data, "the wire form of a remote view", b"RRV1", wire, REMOTE_WIRE_SIZE)
    if not rdmaview_remote_unpack(<unsigned char *>wire + 4, &value):
        check_end("rdma_addr", value.rdma_addr, value.size)
    return new_remote_view(&value)
