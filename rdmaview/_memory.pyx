"""Where the bytes of an object lie, and how they are held: any kind of host memory.

No verb is called here.
"""

cimport cython
from cpython.buffer cimport (
    PyBUF_ANY_CONTIGUOUS,
    PyBUF_STRIDED_RO,
    PyBuffer_Release,
    PyObject_CheckBuffer,
    PyObject_GetBuffer,
)
from cpython.ref cimport PyObject
from libc.errno cimport errno
from libc.stdint cimport UINT64_MAX, int64_t, uint64_t, uintptr_t
from libc.string cimport strerror
from posix.mman cimport (
    MAP_ANONYMOUS,
    MAP_FAILED,
    MAP_PRIVATE,
    MAP_SHARED,
    PROT_READ,
    PROT_WRITE,
    mmap as map_memory,
    munmap as unmap_memory,
)

import array as _array
import math
import mmap

from . import _host
from ._errors import DetachedViewError, StaleViewError

cdef extern from "Python.h":
    bint PyObject_IS_GC(object thing) noexcept

cdef extern from "<sys/mman.h>":
    int MAP_HUGETLB

cdef extern from "<sys/syscall.h>":
    long SYS_mbind
    long syscall(long number, ...)

cdef extern from "<linux/mempolicy.h>":
    int MPOL_BIND
    int MPOL_MF_STRICT

cdef extern from "ndarray.h":
    bint is_ndarray(object x) noexcept
    bint read_ndarray(
        object x, uint64_t *address, uint64_t *size, bint *readonly
    ) noexcept
    PyObject *ndarray_base(object x) noexcept


@cython.final
@cython.no_gc_clear
cdef class HostMemory:
    """Keeps the bytes of a registration alive, for it and for arrays of its views."""

    def __init__(self):
        raise TypeError("HostMemory is made by ProtectionDomain.reg_mr")

    def __dealloc__(self):
        if self.exported:
            PyBuffer_Release(&self.buffer)


cdef object MMAP = mmap.mmap
cdef object ARRAY = _array.array


cdef inline bint is_plain(object buffer) noexcept:
    """Nearly every buffer but an ndarray is one of these, and they refer to nothing."""
    cdef object kind = type(buffer)
    return kind is bytearray or kind is bytes or kind is MMAP or kind is ARRAY


cdef bint may_hold_views(object owner) except -1:
    """Could the owner of memory refer to a view of it, so that the collector sees it?"""
    while type(owner) is memoryview:
        owner = owner.obj
    # The collector looks into some of the plain ones, but only for their type.
    return PyObject_IS_GC(owner) and not is_plain(owner)


cdef HostMemory hold_address(uint64_t address, uint64_t size, bint readonly, object owner):
    """Hold bytes by what keeps them, which may be None."""
    cdef HostMemory memory = HostMemory.__new__(HostMemory)
    memory.address = address
    memory.size = size
    memory.readonly = readonly
    memory.owner = owner
    memory.is_cyclic = may_hold_views(owner)
    return memory


cdef HostMemory hold_memory(object x):
    """Hold the bytes of an object, which must lie in one piece."""
    cdef HostMemory memory
    if not PyObject_CheckBuffer(x):
        if is_tensor(x):
            return hold_tensor(x)
        return hold_memory(as_ndarray(x))
    memory = HostMemory.__new__(HostMemory)
    try:
        PyObject_GetBuffer(x, &memory.buffer, PyBUF_ANY_CONTIGUOUS)
    except (DetachedViewError, StaleViewError):
        raise
    except (BufferError, ValueError) as refusal:
        raise why_in_pieces(x, refusal) from None
    memory.exported = True
    if not is_plain(x):
        check_items(x)
        memory.is_cyclic = may_hold_views(memory.buffer.obj)
    memory.address = <uint64_t><uintptr_t>memory.buffer.buf
    memory.size = <uint64_t>memory.buffer.len
    memory.readonly = memory.buffer.readonly
    return memory


cdef int check_items(object x) except -1:
    """Refuse memory that is a device's, or holds references to Python objects."""
    if hasattr(x, "__cuda_array_interface__"):
        raise TypeError(_host.no_buffer_text(x))
    dtype = getattr(x, "dtype", None)
    holds_objects = (
        "O" in x.format
        if isinstance(x, memoryview)
        else getattr(dtype, "hasobject", False)
    )
    if holds_objects:
        raise TypeError(
            f"this {type(x).__name__} holds references to Python objects (dtype "
            f"{dtype}), which are no bytes to move"
        )
    return 0


cdef object why_in_pieces(object x, object refusal):
    """The error that says why an object gives no bytes in one piece."""
    cdef Py_buffer whole
    try:
        PyObject_GetBuffer(x, &whole, PyBUF_STRIDED_RO)
    except (BufferError, ValueError):
        return BufferError(
            f"this {type(x).__name__} gives no contiguous buffer: {refusal}"
        )
    shape = tuple([whole.shape[i] for i in range(whole.ndim)])
    strides = ()
    if whole.strides != NULL:
        strides = tuple([whole.strides[i] for i in range(whole.ndim)])
    PyBuffer_Release(&whole)
    if 0 in shape:
        return ValueError(f"zero bytes can't be registered (shape {shape})")
    return not_contiguous(shape, strides)


cdef object not_contiguous(tuple shape, tuple strides):
    return BufferError(
        f"the buffer is not contiguous: shape {shape}, strides {strides}. Register its "
        "base and cut views from that (runs_of gives one for each piece), or register a "
        "copy made by numpy.ascontiguousarray"
    )


cdef bint is_tensor(object x) except -1:
    """Does it look like a tensor of torch, of which bfloat16 has no buffer in NumPy?"""
    if isinstance(x, type):
        return False
    return hasattr(x, "data_ptr") and hasattr(x, "untyped_storage")


cdef int check_host(object x) except -1:
    """Refuse what lies on another device than the processor's memory."""
    if _host.device_of(x) is not None:
        raise TypeError(_host.no_buffer_text(x))
    return 0


cdef HostMemory hold_tensor(object x):
    check_host(x)
    if not x.is_contiguous():
        raise not_contiguous(tuple(x.shape), byte_strides(x))
    return hold_address(x.data_ptr(), x.numel() * x.element_size(), False, x)


cdef tuple byte_strides(object tensor):
    size = tensor.element_size()
    return tuple([step * size for step in tensor.stride()])


cdef object as_ndarray(object x):
    """An ndarray of the same bytes, of what has other protocols than a buffer."""
    check_host(x)
    if not isinstance(x, type):
        if hasattr(x, "__array_interface__"):
            import numpy as np

            return np.asarray(x)
        if hasattr(x, "__dlpack__"):
            import numpy as np

            return np.from_dlpack(x)
    raise TypeError(_host.no_buffer_text(x))


cdef int find_extent(object x, Extent *extent, bint on_device) except -1:
    """Tell where the bytes of an object lie in one piece, without holding them."""
    cdef HostMemory memory
    cdef Layout layout
    extent.is_device = False
    if is_ndarray(x) and read_ndarray(
        x, &extent.address, &extent.size, &extent.readonly
    ):
        return 0
    if on_device and is_device_array(x):
        find_device_layout(x, &layout)
        if layout.count > 1:
            shape, strides, _, _ = device_layout(x)
            raise not_contiguous(shape, strides)
        extent.address = layout.address
        extent.size = layout.span
        extent.readonly = False
        extent.is_device = True
        return 0
    memory = hold_memory(x)
    extent.address = memory.address
    extent.size = memory.size
    extent.readonly = memory.readonly
    return 0


cdef bint is_device_array(object x) except -1:
    """Is it of another device's memory, and tells where it is there?"""
    if PyObject_CheckBuffer(x) or isinstance(x, type) or _host.device_of(x) is None:
        return False
    return is_tensor(x) or hasattr(x, "__cuda_array_interface__")


cdef tuple device_layout(object x):
    """Shape, strides in bytes, bytes of an item, address."""
    if is_tensor(x):
        return tuple(x.shape), byte_strides(x), x.element_size(), x.data_ptr()
    interface = x.__cuda_array_interface__
    shape = tuple(interface["shape"])
    item = int(interface["typestr"][2:])
    strides = interface.get("strides")
    if strides is None:
        strides, step = [], item
        for length in reversed(shape):
            strides.append(step)
            step *= length
        strides.reverse()
    return shape, tuple(strides), item, interface["data"][0] or 0


cdef int find_device_layout(object x, Layout *layout) except -1:
    shape, strides, item, address = device_layout(x)
    layout.address = address
    layout.is_device = True
    return lay_out(layout, shape, strides, item)


cdef int lay_out(Layout *layout, tuple shape, tuple strides, int64_t item) except -1:
    cdef int i
    if len(shape) > DIMENSIONS or len(shape) != len(strides):
        raise ValueError(
            f"shape {shape} and strides {strides} must be of one length, up to "
            f"{DIMENSIONS}"
        )
    # NumPy's and other exporters' are known to be so.
    reach = sum([(n - 1) * abs(step) for n, step in zip(shape, strides)])
    if min(shape, default=0) < 0 or item < 0 or (
        max(math.prod(shape) * item, reach) > 2**63 - 1
    ):
        raise ValueError(
            f"shape {shape} with strides {strides} and {item} bytes an item is no array"
        )
    layout.dimensions = len(shape)
    for i in range(layout.dimensions):
        layout.shape[i] = shape[i]
        layout.strides[i] = strides[i]
    return join_items(layout, item)


cdef int find_layout(object x, Layout *layout, bint on_device) except -1:
    """Tell where the bytes of an object lie, in C order, without holding them."""
    cdef Py_buffer buffer
    cdef int64_t item
    cdef int i
    layout.is_device = False
    if not PyObject_CheckBuffer(x):
        if on_device and is_device_array(x):
            return find_device_layout(x, layout)
        if not is_tensor(x):
            return find_layout(as_ndarray(x), layout, False)
        check_host(x)
        layout.address = x.data_ptr()
        return lay_out(layout, tuple(x.shape), byte_strides(x), x.element_size())
    if type(x) is not bytes:
        check_items(x)
    PyObject_GetBuffer(x, &buffer, PyBUF_STRIDED_RO)
    layout.address = <uint64_t><uintptr_t>buffer.buf
    # Exporters of one piece may tell no strides (ctypes does not), or no shape.
    layout.dimensions = buffer.ndim if buffer.strides != NULL else 0
    item = buffer.itemsize if buffer.strides != NULL else buffer.len
    for i in range(layout.dimensions):
        layout.shape[i] = buffer.shape[i]
        layout.strides[i] = buffer.strides[i]
    PyBuffer_Release(&buffer)
    return join_items(layout, item)


cdef int join_items(Layout *layout, int64_t piece) except -1:
    """Make the innermost dimensions that lie in one piece that piece."""
    cdef uint64_t reach
    cdef int last = layout.dimensions
    cdef int i
    while last and (
        layout.shape[last - 1] == 1 or layout.strides[last - 1] == piece
    ):
        piece *= layout.shape[last - 1]
        last -= 1
    layout.dimensions = last
    layout.piece = <uint64_t>piece
    layout.count = 1 if piece else 0
    layout.low = layout.address
    layout.span = <uint64_t>piece
    for i in range(last):
        layout.count *= <uint64_t>layout.shape[i]
        if layout.shape[i] == 0:
            continue
        reach = <uint64_t>(layout.shape[i] - 1) * <uint64_t>abs(layout.strides[i])
        layout.span += reach
        if layout.strides[i] < 0:
            layout.low -= reach
    if layout.count == 0:
        layout.span = 0
    return 0


cdef void first_place(const Layout *layout, int64_t *place) noexcept nogil:
    cdef int i
    for i in range(layout.dimensions):
        place[i] = 0


cdef uint64_t next_place(const Layout *layout, int64_t *place) noexcept nogil:
    """The address of the piece at a place; moves on to the next one in C order."""
    cdef uint64_t address = layout.address
    cdef int i
    for i in range(layout.dimensions):
        address += <uint64_t>(place[i] * layout.strides[i])
    i = layout.dimensions - 1
    while i >= 0:
        place[i] += 1
        if place[i] < layout.shape[i]:
            break
        place[i] = 0
        i -= 1
    return address


cdef object memory_owner(object x):
    """What the bytes of an object belong to: it lives as long as they do."""
    cdef PyObject *base
    while True:
        if is_ndarray(x):
            base = ndarray_base(x)
            if base == NULL:
                return x
            x = <object>base
        elif type(x) is memoryview:
            x = x.obj
        else:
            break
    if not PyObject_CheckBuffer(x) and is_tensor(x):
        return x.untyped_storage()
    return x


cdef int find_whole(object owner, Extent *extent) except -1:
    """Tell where all the memory of an owner lies, in however many pieces."""
    cdef Layout layout
    if is_ndarray(owner):
        if read_ndarray(owner, &extent.address, &extent.size, &extent.readonly):
            return 0
        find_layout(owner, &layout, False)
        extent.address = layout.low
        extent.size = layout.span
        extent.readonly = not owner.flags.writeable
        return 0
    if not PyObject_CheckBuffer(owner) and hasattr(owner, "nbytes"):
        if hasattr(owner, "data_ptr"):
            extent.address = owner.data_ptr()
            extent.size = owner.nbytes()
            extent.readonly = False
            return 0
    return find_extent(owner, extent, False)


cdef HostMemory hold_owner(object owner, const Extent *extent):
    """Hold all the memory of an owner where it was found."""
    # A reference is enough to keep NumPy from moving it.
    if is_ndarray(owner) or not PyObject_CheckBuffer(owner):
        return hold_address(extent.address, extent.size, extent.readonly, owner)
    return hold_memory(owner)


@cython.final
@cython.no_gc
cdef class Pages:
    """Pages of this process, unmapped when nothing holds them any more."""

    cdef void *start
    cdef uint64_t size

    def __dealloc__(self):
        if self.start != NULL:
            unmap_memory(self.start, self.size)


cdef HostMemory allocate(uint64_t size, bint huge_pages, int numa_node, int fd):
    """Map pages of their own, on one node, and of one file, if these aren't -1."""
    cdef Pages mapping = Pages.__new__(Pages)
    cdef uint64_t page = _host.huge_page_size() if huge_pages else mmap.PAGESIZE
    cdef int flags = MAP_SHARED if fd >= 0 else MAP_PRIVATE | MAP_ANONYMOUS
    cdef void *start
    if size == 0 or size > UINT64_MAX // 2:
        raise ValueError(f"{size} bytes can't be allocated")
    if huge_pages and fd < 0:
        flags |= MAP_HUGETLB
    mapping.size = (size + page - 1) // page * page
    start = map_memory(NULL, mapping.size, PROT_READ | PROT_WRITE, flags, fd, 0)
    if start == MAP_FAILED:
        raise allocation_error(size, huge_pages, fd)
    mapping.start = start
    if numa_node >= 0:
        bind_pages(mapping, numa_node)
    return hold_address(<uint64_t><uintptr_t>start, size, False, mapping)


cdef object allocation_error(uint64_t size, bint huge_pages, int fd):
    cdef int error = errno
    hint = ""
    if huge_pages:
        hint = f": {_host.huge_page_text()}"
    elif fd >= 0:
        hint = f": is descriptor {fd} a file or memfd, open for reading and writing?"
    return OSError(
        error, f"mmap of {size} bytes: {strerror(error).decode()}{hint}"
    )


cdef int bind_pages(Pages mapping, int node) except -1:
    """Have pages come from one node, which they do when they are first touched."""
    cdef unsigned long mask[16]
    cdef int bits = 8 * sizeof(unsigned long)
    cdef int i
    cdef int error
    for i in range(16):
        mask[i] = 0
    if node >= 16 * bits:
        raise ValueError(_host.no_node_text(node))
    mask[node // bits] = <unsigned long>1 << (node % bits)
    if syscall(
        SYS_mbind,
        mapping.start,
        mapping.size,
        MPOL_BIND,
        mask,
        <unsigned long>(16 * bits + 1),
        MPOL_MF_STRICT,
    ):
        error = errno
        raise OSError(
            error,
            f"mbind of {mapping.size} bytes to NUMA node {node}: "
            f"{strerror(error).decode()}",
        )
    return 0
