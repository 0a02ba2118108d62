"""Devices, protection domains and memory regions: ibv_reg_mr and what it needs."""

cimport cython
from cpython.exc cimport PyErr_CheckSignals, PyErr_SetObject, PyErr_WriteUnraisable
from libc.errno cimport EBUSY, EINVAL, EOPNOTSUPP
from libc.stdint cimport UINT64_MAX, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset
from posix.unistd cimport _SC_PAGESIZE, sysconf, usleep

from ._arrays cimport ViewArray, cut_many, new_view_array, shorten
from ._errors cimport (
    Process,
    check_process,
    clear_errno,
    failure,
    is_this_process,
    last_errno,
    raise_verbs_error,
    this_process,
)
from ._library cimport Library
from ._memory cimport (
    DIMENSIONS,
    Extent,
    HostMemory,
    Layout,
    allocate,
    find_extent,
    find_layout,
    first_place,
    hold_address,
    hold_memory,
    next_place,
)
from ._view cimport (
    CLOSED,
    CLOSING,
    OPEN,
    MemoryRegionView,
    Registration,
    State,
    new_view,
    next_registration_id,
    number_text,
    parse_range,
    parse_slice,
    parse_u64,
    rdmaview_slice,
    rdmaview_view,
    rdmaview_within,
)
from .libibverbs cimport (
    IBV_ACCESS_HUGETLB,
    IBV_ACCESS_LOCAL_WRITE,
    IBV_ACCESS_MW_BIND,
    IBV_ACCESS_ON_DEMAND,
    IBV_ACCESS_OPTIONAL_RANGE,
    IBV_ACCESS_RELAXED_ORDERING,
    IBV_ACCESS_REMOTE_ATOMIC,
    IBV_ACCESS_REMOTE_READ,
    IBV_ACCESS_REMOTE_WRITE,
    IBV_ACCESS_ZERO_BASED,
    IBV_FORK_DISABLED,
    IBV_FORK_ENABLED,
    IBV_GID_TYPE_IB,
    IBV_GID_TYPE_ROCE_V1,
    IBV_GID_TYPE_ROCE_V2,
    IBV_LINK_LAYER_ETHERNET,
    IBV_LINK_LAYER_INFINIBAND,
    IBV_PORT_ACTIVE,
    IBV_PORT_ACTIVE_DEFER,
    IBV_PORT_ARMED,
    IBV_PORT_DOWN,
    IBV_PORT_INIT,
    IBV_PORT_NOP,
    _compat_ibv_port_attr,
    ibv_device,
    IBV_ODP_SUPPORT,
    IBV_ODP_SUPPORT_ATOMIC,
    IBV_ODP_SUPPORT_READ,
    IBV_ODP_SUPPORT_WRITE,
    ibv_device_attr,
    ibv_device_attr_ex,
    ibv_gid_entry,
    ibv_mr,
    ibv_port_attr,
    query_device_ex,
)

import enum
import errno
import operator
import os
import sys
import warnings
import weakref
from collections import namedtuple

from . import _host
from ._errors import DeviceNotFoundError, StaleViewError, VerbsError
from ._library import open_library

cdef enum:
    PEER_RIGHTS = (
        IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
    )
    WRITE_RIGHTS = (
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC
    )


class Access(enum.IntFlag):
    """Rights to registered memory, as in ibv_reg_mr(3)."""

    LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE
    REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE
    REMOTE_READ = IBV_ACCESS_REMOTE_READ
    REMOTE_ATOMIC = IBV_ACCESS_REMOTE_ATOMIC
    MW_BIND = IBV_ACCESS_MW_BIND
    ZERO_BASED = IBV_ACCESS_ZERO_BASED
    ON_DEMAND = IBV_ACCESS_ON_DEMAND
    HUGETLB = IBV_ACCESS_HUGETLB
    RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING


cdef int KNOWN_RIGHTS = 0
for _right in Access:
    KNOWN_RIGHTS |= <int>_right.value
del _right

DEVICE_FIELDS = (
    "fw_ver node_guid sys_image_guid max_mr_size page_size_cap vendor_id "
    "vendor_part_id hw_ver max_qp max_qp_wr device_cap_flags max_sge max_sge_rd "
    "max_cq max_cqe max_mr max_pd max_qp_rd_atom max_res_rd_atom "
    "max_qp_init_rd_atom max_mw max_ah max_srq max_srq_wr max_srq_sge max_pkeys "
    "local_ca_ack_delay phys_port_cnt"
)
DeviceAttributes = namedtuple("DeviceAttributes", DEVICE_FIELDS, module=__name__)
DeviceAttributes.__doc__ = """What a device can do, named as in ibv_query_device(3).

Attributes
----------
fw_ver : str
node_guid, sys_image_guid, max_mr_size, page_size_cap, vendor_id : int
vendor_part_id, hw_ver, max_qp, max_qp_wr, device_cap_flags, max_sge : int
max_sge_rd, max_cq, max_cqe, max_mr, max_pd, max_qp_rd_atom : int
max_res_rd_atom, max_qp_init_rd_atom, max_mw, max_ah, max_srq : int
max_srq_wr, max_srq_sge, max_pkeys, local_ca_ack_delay, phys_port_cnt : int
"""

PORT_FIELDS = (
    "state max_mtu active_mtu gid_tbl_len port_cap_flags max_msg_sz pkey_tbl_len lid "
    "sm_lid active_width active_speed phys_state link_layer"
)
PortAttributes = namedtuple("PortAttributes", PORT_FIELDS, module=__name__)
PortAttributes.__doc__ = """A port, named as in ibv_query_port(3).

Attributes
----------
state : str
    As "ACTIVE".
max_mtu, active_mtu, max_msg_sz : int
    Bytes.
gid_tbl_len, port_cap_flags, pkey_tbl_len, lid, sm_lid : int
active_width, active_speed, phys_state : int
link_layer : str
    As "Ethernet".
"""

GID = namedtuple("GID", "index type address raw", module=__name__)
GID.__doc__ = """An entry of a port's GID table.

Attributes
----------
index : int
type : str
    "IB", "RoCE v1" or "RoCE v2".
address : str
raw : bytes
    16 bytes: what `address` is the text of.
"""

PORT_STATES = {
    IBV_PORT_NOP: "NOP",
    IBV_PORT_DOWN: "DOWN",
    IBV_PORT_INIT: "INIT",
    IBV_PORT_ARMED: "ARMED",
    IBV_PORT_ACTIVE: "ACTIVE",
    IBV_PORT_ACTIVE_DEFER: "ACTIVE_DEFER",
}
LINK_LAYERS = {
    IBV_LINK_LAYER_INFINIBAND: "InfiniBand",
    IBV_LINK_LAYER_ETHERNET: "Ethernet",
}
GID_TYPES = {
    IBV_GID_TYPE_IB: "IB",
    IBV_GID_TYPE_ROCE_V1: "RoCE v1",
    IBV_GID_TYPE_ROCE_V2: "RoCE v2",
}


# What makes queues, by verb: the room above puts it here when it is imported.
queue_makers = {}


class Device:
    """A device that is listed, open or not.

    Attributes
    ----------
    name : str
    kind : {"kernel", "soft"}
    node : str
        What must be opened to use it, as ``"/dev/infiniband/uverbs0"``.
    """

    def __init__(self, name, kind, node):
        self.name = name
        self.kind = kind
        self.node = node
        self._reason = None

    def __repr__(self):
        return f"<Device {self.name} ({self.kind})>"

    @property
    def openable(self):
        """bool: could it be opened? Tried at the first look."""
        return self.reason == ""

    @property
    def reason(self):
        """str: why it can't be opened; empty if it can."""
        if self._reason is None:
            try:
                open_context(self.name, self.kind).close()
            except OSError as error:
                self._reason = str(error)
            else:
                self._reason = ""
        return self._reason


def devices():
    """List the devices, kernel ones first; no device is opened.

    Returns
    -------
    list of Device
    """
    return [*list_devices("kernel")[0], *list_devices("soft")[0]]


def open(name=None):
    """Open a device.

    Parameters
    ----------
    name : str, optional
        Default: ``$RDMAVIEW_DEVICE``, else the first kernel device that can be
        opened and has an active port. The built-in device is never chosen unasked.

    Returns
    -------
    Context

    Raises
    ------
    DeviceNotFoundError
        No such device, or none to choose from; the text says why.
    VerbsError
        The named device can't be opened.
    """
    if name is None:
        name = os.environ.get("RDMAVIEW_DEVICE") or None
    elif not isinstance(name, str):
        raise TypeError(f"a device's name is a str, not {type(name).__name__}: {name!r}")
    if name is None:
        return open_any()
    troubles = []
    for kind in ("soft", "kernel"):
        found, trouble = list_devices(kind)
        if name in [device.name for device in found]:
            return open_context(name, kind)
        troubles.append(trouble)
    present = ", ".join(device.name for device in devices()) or "none"
    raise DeviceNotFoundError(
        f"no device is named {name!r} (present: {present}). " + " ".join(troubles)
    )


def fork_init():
    """Make registered memory safe to fork() around, on kernels that need it.

    See ibv_fork_init(3): it must come before the first registration, makes each
    registration slower, and is not needed where the kernel copies pinned pages at
    fork. rdmaview never calls it by itself.

    Raises
    ------
    VerbsError
        Memory was registered already (EINVAL), or ibv_fork_init failed.
    """
    cdef Library library
    cdef int error
    for kind in ("kernel", "soft"):
        try:
            library = open_library(kind)
        except OSError:
            continue
        if (
            library.verbs.is_fork_initialized != NULL
            and library.verbs.is_fork_initialized() != IBV_FORK_DISABLED
        ):
            continue
        if library.has_registered:
            raise_verbs_error(
                EINVAL,
                "ibv_fork_init",
                "memory was registered already in this process",
                "It is too late: call fork_init() before the first registration",
            )
        error = failure(library.verbs.fork_init())
        if error:
            raise_verbs_error(
                error,
                "ibv_fork_init",
                library.path,
                "Another library may have registered memory before",
            )


def open_any():
    """Open the first kernel device that has an active port."""
    found, trouble = list_devices("kernel")
    reasons = [trouble] if trouble else []
    for device in found:
        try:
            context = open_context(device.name, device.kind)
        except OSError as error:
            reasons.append(f"{device.name}: {error}.")
            continue
        if context.has_active_port():
            return context
        context.close()
        reasons.append(f"{device.name}: no port is active.")
    raise DeviceNotFoundError(
        "no kernel RDMA device can be used. "
        + " ".join(reasons)
        + " Without hardware, soft-RoCE makes one of any network interface: "
        "rdma link add rxe0 type rxe netdev IFACE. Or ask for the built-in device "
        'by name: open("soft0") or RDMAVIEW_DEVICE=soft0'
    )


def list_devices(kind):
    """List one library's devices, and say what is wrong if they are too few.

    Returns
    -------
    found : list of Device
    trouble : str
        Empty if nothing is.
    """
    cdef Library library
    cdef ibv_device **handles
    cdef int count = 0
    cdef int error
    cdef list found = []
    try:
        library = open_library(kind)
    except OSError as failed:
        return found, f"{failed}."
    with nogil:
        clear_errno()
        handles = library.verbs.get_device_list(&count)
        error = last_errno() if handles == NULL else 0
    if handles != NULL:
        for i in range(count):
            node = handles[i].dev_name.decode()
            if kind == "kernel":
                node = f"/dev/infiniband/{node}"
            found.append(Device(handles[i].name.decode(), kind, node))
        library.verbs.free_device_list(handles)
    if kind == "soft":
        return found, ""
    return found, _host.kernel_trouble([device.name for device in found], max(error, 0))


cdef Context open_context(str name, str kind):
    cdef Library library = open_library(kind)
    cdef Context context = Context.__new__(Context)
    cdef ibv_device **handles
    cdef ibv_device *device = NULL
    cdef int error = 0
    cdef bytes wanted = name.encode()
    handles = library.verbs.get_device_list(NULL)
    if handles == NULL:
        raise_verbs_error(last_errno(), "ibv_get_device_list", library.path)
    i = 0
    while handles[i] != NULL:
        if handles[i].name == wanted:
            device = handles[i]
            break
        i += 1
    if device == NULL:
        library.verbs.free_device_list(handles)
        raise DeviceNotFoundError(f"{name} is gone")
    node = device.dev_name.decode()
    context.library = library
    context.name = name
    with nogil:
        clear_errno()
        context.handle = library.verbs.open_device(device)
        error = last_errno() if context.handle == NULL else 0
        library.verbs.free_device_list(handles)
    if error:
        raise_verbs_error(error, "ibv_open_device", name, _host.open_hint(error, kind, node))
    context.process = this_process()
    context.state = OPEN
    try:
        read_limits(context)
    except BaseException:
        context.close()
        raise
    _contexts.add(context)
    return context


_contexts = weakref.WeakSet()


def refresh_limits():
    """Ask each open device for its limits anew."""
    for context in list(_contexts):
        # Those that fork() copied from the parent are not ours to ask.
        if (<Context>context).state == OPEN and is_this_process(
            (<Context>context).process
        ):
            read_limits(context)


cdef class Handle:
    """What the owners of verbs objects have in common."""

    def __init__(self):
        raise TypeError(f"{type(self).__name__} objects are made by their parents")

    def __reduce__(self):
        raise TypeError(
            f"a {type(self).__name__} is a handle of this process and can't be "
            "pickled: send views as bytes"
        )

    def __enter__(self):
        check_open(self, type(self).__name__)
        return self

    def __exit__(self, kind, error, traceback):
        end_block(self, kind)

    @property
    def closed(self):
        """bool: was it closed?"""
        return self.state == CLOSED


@cython.final
@cython.no_gc_clear
cdef class Context(Handle):
    """An open device.

    Attributes
    ----------
    name : str
    mr_count : int
        Memory regions that are registered through this context now.
    mr_bytes : int
        Their bytes.
    """

    def __cinit__(self):
        self.state = CLOSED

    def __dealloc__(self):
        cdef int error = 0
        if not may_finalise(self):
            return
        with nogil:
            error = failure(self.library.verbs.close_device(self.handle))
        report_lost(error, "ibv_close_device", self.name)
        if not self.tended and not sys.is_finalizing():
            warn_unclosed(f"unclosed rdmaview.Context of {self.name}")

    def __repr__(self):
        return f"<Context {self.name} ({self.kind}){' closed' if self.closed else ''}>"

    def __enter__(self):
        check_open(self, "Context")
        self.tended = True
        return self

    def alloc_pd(self):
        """Allocate a protection domain.

        Returns
        -------
        ProtectionDomain

        Raises
        ------
        VerbsError
            ibv_alloc_pd failed.
        ValueError
            The context is closed.
        """
        cdef ProtectionDomain pd = ProtectionDomain.__new__(ProtectionDomain)
        cdef int error
        check_open(self, "Context")
        self.children += 1
        with nogil:
            clear_errno()
            pd.handle = self.library.verbs.alloc_pd(self.handle)
            error = last_errno() if pd.handle == NULL else 0
        if error:
            self.children -= 1
            raise_verbs_error(
                error, "ibv_alloc_pd", f"{self.name}, max_pd {self.limits.max_pd}"
            )
        pd.context = self
        pd.process = self.process
        pd.state = OPEN
        return pd

    def create_cq(self, depth=256):
        """Create a completion queue.

        Parameters
        ----------
        depth : int, default 256
            Completions that it can hold, and so work requests in flight that may
            report to it.

        Returns
        -------
        CompletionQueue

        Raises
        ------
        ValueError
            `depth` is below 1 or over the device's max_cqe.
        VerbsError
            ibv_create_cq failed.
        """
        return queue_makers["create_cq"](self, depth)

    def port(self, n=1):
        """Ask for a port's attributes.

        Parameters
        ----------
        n : int, default 1
            Ports are counted from 1.

        Returns
        -------
        PortAttributes
        """
        cdef ibv_port_attr port
        read_port(self, check_port(self, n), &port)
        return PortAttributes(
            state=PORT_STATES.get(port.state, str(port.state)),
            max_mtu=128 << port.max_mtu,
            active_mtu=128 << port.active_mtu,
            gid_tbl_len=port.gid_tbl_len,
            port_cap_flags=port.port_cap_flags,
            max_msg_sz=port.max_msg_sz,
            pkey_tbl_len=port.pkey_tbl_len,
            lid=port.lid,
            sm_lid=port.sm_lid,
            active_width=port.active_width,
            active_speed=port.active_speed,
            phys_state=port.phys_state,
            link_layer=LINK_LAYERS.get(port.link_layer, "unspecified"),
        )

    def gids(self, n=1):
        """Read a port's GID table; empty entries are left out.

        Parameters
        ----------
        n : int, default 1
            Ports are counted from 1.

        Returns
        -------
        list of GID
        """
        cdef ibv_gid_entry entries[256]
        cdef ssize_t count
        cdef int port = check_port(self, n)
        cdef int error = 0
        if self.library.verbs.query_gid_table == NULL:
            raise_verbs_error(
                errno.ENOSYS,
                "ibv_query_gid_table",
                f"{self.library.path} lacks it",
                "It came with rdma-core 32 (IBVERBS_1.11)",
            )
        self.children += 1
        with nogil:
            clear_errno()
            count = self.library.verbs.query_gid_table(
                self.handle, entries, 256, 0, sizeof(ibv_gid_entry)
            )
            if count < 0:
                error = <int>-count
        self.children -= 1
        if error:
            raise_verbs_error(error, "ibv_query_gid_table", f"{self.name} port {port}")
        return [
            GID(
                entries[i].gid_index,
                GID_TYPES.get(entries[i].gid_type, "unknown"),
                _host.gid_text(entries[i].gid.raw[:16]),
                <bytes>entries[i].gid.raw[:16],
            )
            for i in range(count)
            if entries[i].port_num == <uint32_t>port
        ]

    def has_active_port(self):
        """Is any port active?

        Returns
        -------
        bool
        """
        cdef ibv_port_attr port
        for n in range(1, self.limits.phys_port_cnt + 1):
            read_port(self, n, &port)
            if port.state == IBV_PORT_ACTIVE:
                return True
        return False

    def close(self):
        """Close the device; a second call does nothing.

        Raises
        ------
        VerbsError
            EBUSY: protection domains or completion queues of it are open.
        """
        cdef int error
        retry_lost_regions()
        if not begin_close(
            &self.state, self.process, &self.children, "ibv_close_device", self.name
        ):
            return
        with nogil:
            error = failure(self.library.verbs.close_device(self.handle))
        self.state = OPEN if error else CLOSED
        if error:
            raise_verbs_error(error, "ibv_close_device", self.name)
        self.tended = True

    @property
    def kind(self):
        """str: "kernel" or "soft"."""
        return self.library.kind

    @property
    def attributes(self):
        """DeviceAttributes: what the device can do, asked for anew."""
        cdef ibv_device_attr *attr = &self.limits
        read_limits(self)
        return DeviceAttributes(
            fw_ver=attr.fw_ver.decode(errors="replace"),
            node_guid=int.from_bytes((<char *>&attr.node_guid)[:8], "big"),
            sys_image_guid=int.from_bytes((<char *>&attr.sys_image_guid)[:8], "big"),
            max_mr_size=attr.max_mr_size,
            page_size_cap=attr.page_size_cap,
            vendor_id=attr.vendor_id,
            vendor_part_id=attr.vendor_part_id,
            hw_ver=attr.hw_ver,
            max_qp=attr.max_qp,
            max_qp_wr=attr.max_qp_wr,
            device_cap_flags=attr.device_cap_flags,
            max_sge=attr.max_sge,
            max_sge_rd=attr.max_sge_rd,
            max_cq=attr.max_cq,
            max_cqe=attr.max_cqe,
            max_mr=attr.max_mr,
            max_pd=attr.max_pd,
            max_qp_rd_atom=attr.max_qp_rd_atom,
            max_res_rd_atom=attr.max_res_rd_atom,
            max_qp_init_rd_atom=attr.max_qp_init_rd_atom,
            max_mw=attr.max_mw,
            max_ah=attr.max_ah,
            max_srq=attr.max_srq,
            max_srq_wr=attr.max_srq_wr,
            max_srq_sge=attr.max_srq_sge,
            max_pkeys=attr.max_pkeys,
            local_ca_ack_delay=attr.local_ca_ack_delay,
            phys_port_cnt=attr.phys_port_cnt,
        )


@cython.final
@cython.no_gc_clear
cdef class ProtectionDomain(Handle):
    """What memory regions and queue pairs must share to be used together.

    Attributes
    ----------
    context : Context
    """

    def __cinit__(self):
        self.state = CLOSED

    def __dealloc__(self):
        cdef int error
        if not may_finalise(self):
            return
        with nogil:
            error = failure(self.context.library.verbs.dealloc_pd(self.handle))
        self.context.children -= 1
        report_lost(error, "ibv_dealloc_pd", self.context.name)

    def __repr__(self):
        state = "closed" if self.closed else f"{self.children} in use"
        return f"<ProtectionDomain of {self.context.name}, {state}>"

    def reg_mr(self, buffer, access=None, *, iova=None):
        """Register the memory of `buffer`.

        The buffer is held until the region is deregistered: it can't be resized
        or freed meanwhile.

        Parameters
        ----------
        buffer : object with host memory
            ndarray of any dtype (C or Fortran order), bytearray, bytes, memoryview,
            array.array, mmap, ctypes array, the buf of a SharedMemory; a tensor of
            torch on the CPU; what has `__array_interface__`, or `__dlpack__` on the
            CPU. The bytes are registered in the order in which they lie in memory.
        access : Access, optional
            Default: LOCAL_WRITE for a writable buffer, no right for a read-only
            one. A peer's rights are always asked for by name.
        iova : integer, optional
            The RDMA address of the first byte. Default: its virtual address. It
            must have the virtual address's offset in its page (the kernel's rule).

        Returns
        -------
        MemoryRegion

        Raises
        ------
        TypeError
            `buffer` exports no buffer, is device memory or holds Python objects.
        BufferError
            It is not contiguous, or read-only while `access` has a write right.
        ValueError
            It is empty or over the device's max_mr_size; `access` has REMOTE_WRITE
            or REMOTE_ATOMIC without LOCAL_WRITE; `iova` doesn't fit.
        VerbsError
            The device refused; the text has address, size, rights, memlock.
        """
        cdef HostMemory memory
        cdef int rights = -1 if access is None else parse_access(access)
        check_open(self, "ProtectionDomain")
        memory = hold_memory(buffer)
        return register(self, memory, fitting_rights(memory, rights, buffer), iova)

    def reg_mr_address(
        self,
        addr,
        length,
        access=IBV_ACCESS_LOCAL_WRITE,
        *,
        iova=None,
        owner=None,
        is_device=False,
    ):
        """Register memory by its address.

        Parameters
        ----------
        addr : integer
            Virtual address of the first byte.
        length : integer
            Bytes.
        access : Access, default LOCAL_WRITE
        iova : integer, optional
            As in `reg_mr`.
        owner : object, optional
            Kept alive until the region is deregistered and no array of it is left.
        is_device : bool, default False
            The address is of a GPU's memory, which only a driver with peer memory
            support (nvidia-peermem) can register; views of it give no array.

        Returns
        -------
        MemoryRegion

        Raises
        ------
        TypeError
            `addr` or `length` is no integer.
        ValueError
            As in `reg_mr`, or `addr` plus `length` passes 2**64.
        VerbsError
            As in `reg_mr`; EFAULT if the memory isn't mapped.
        """
        cdef HostMemory memory
        cdef uint64_t address
        cdef uint64_t size
        cdef int rights = parse_access(access)
        check_open(self, "ProtectionDomain")
        if parse_u64(addr, "addr", &address) or parse_u64(length, "length", &size):
            raise ValueError(
                f"addr and length must be from 0 to 2**64 - 1: "
                f"{number_text(addr)}, {number_text(length)}"
            )
        memory = hold_address(
            address, size, not rights & IBV_ACCESS_LOCAL_WRITE, owner
        )
        memory.is_device = bool(is_device)
        return register(self, memory, rights, iova)

    def reg_dmabuf_mr(self, fd, offset, length, access, *, iova):
        """Register a part of a dma-buf: memory of a device, as of a GPU.

        Its views move bytes as others do, but give no array. Export the allocation that
        the part is in, with `offset` the part's address less that of the allocation.

        Parameters
        ----------
        fd : integer
            Descriptor of the dma-buf. It may be closed afterwards. The built-in device
            takes a memfd.
        offset : integer
            Where the part starts in the dma-buf, in bytes.
        length : integer
            Bytes.
        access : Access
        iova : integer
            The RDMA address of the first byte, and what the views give for their virtual
            address: mostly the part's address on its device. It must have the offset in
            its page that `offset` has (the kernel's rule).

        Returns
        -------
        MemoryRegion

        Raises
        ------
        ValueError
            It is empty or over the device's max_mr_size; `access` has REMOTE_WRITE or
            REMOTE_ATOMIC without LOCAL_WRITE; `iova` doesn't fit.
        VerbsError
            EOPNOTSUPP: the device or its driver takes no dma-bufs. EINVAL: the
            descriptor is of no dma-buf, or the part is not inside it.
        """
        cdef uint64_t start
        cdef uint64_t size
        cdef int rights = parse_access(access)
        cdef int file = operator.index(fd)
        if parse_u64(offset, "offset", &start) or parse_u64(length, "length", &size):
            raise ValueError(
                f"offset and length must be from 0 to 2**64 - 1: {number_text(offset)}, "
                f"{number_text(length)}"
            )
        if iova is None:
            raise TypeError("iova must be an integer: a dma-buf has no address here")
        check_open(self, "ProtectionDomain")
        return register_dmabuf(self, file, start, size, rights, iova)

    def alloc_mr(
        self, size, access=None, huge_pages=False, numa_node=None, *, fd=None
    ):
        """Allocate memory, and register it as one region.

        It begins at a page, and shares none with other memory; it reads as zeros. It is
        freed when the region is closed and no view or array of it is left: ``mr[:].array()``
        is all of it.

        Parameters
        ----------
        size : integer
            Bytes.
        access : Access, optional
            Default: LOCAL_WRITE.
        huge_pages : bool, default False
            Take huge pages of the default size, which must be reserved: see
            /proc/sys/vm/nr_hugepages. It never falls back to others.
        numa_node : integer, optional
            Take pages of this node only; see mbind(2). Default: as the process does.
        fd : integer, optional
            Map this file from its start: a memfd, or one in /dev/shm. Other processes
            that map it share the memory. It must have `size` bytes, and may be closed
            afterwards. With `huge_pages` it is one of huge pages. Default: private
            memory.

        Returns
        -------
        MemoryRegion

        Raises
        ------
        ValueError
            `size` is 0 or over the device's max_mr_size; the node does not exist; the
            file is too short.
        OSError
            No memory, or no huge pages; the text says how many are free.
        VerbsError
            As in `reg_mr`.
        """
        cdef uint64_t length
        cdef int rights = IBV_ACCESS_LOCAL_WRITE if access is None else parse_access(access)
        cdef int node = -1
        cdef int file = -1
        check_open(self, "ProtectionDomain")
        if parse_u64(size, "size", &length):
            raise ValueError(f"size must be 1 to 2**63 - 1, not {number_text(size)}")
        if length > self.context.limits.max_mr_size:
            raise ValueError(
                f"{length} bytes are over max_mr_size {self.context.limits.max_mr_size} of "
                f"{self.context.name}"
            )
        if numa_node is not None:
            if operator.index(numa_node) not in _host.numa_nodes():
                raise ValueError(_host.no_node_text(numa_node))
            node = numa_node
        if fd is not None:
            file = operator.index(fd)
            found = os.fstat(file).st_size
            if found < length:
                raise ValueError(f"the file of descriptor {fd} has {found} bytes, not {size}")
        return register(self, allocate(length, bool(huge_pages), node, file), rights, None)

    def create_qp(
        self,
        cq,
        *,
        max_send_wr=128,
        max_recv_wr=1,
        max_send_sge=1,
        max_recv_sge=1,
        max_inline_data=0,
        port=1,
        gid_index=None,
    ):
        """Create a reliable connected queue pair, not yet connected.

        Parameters
        ----------
        cq : CompletionQueue
            Of the same context; gets the completions of sends and receives.
        max_send_wr, max_recv_wr : int
            Work requests that may be in flight. Defaults 128 and 1.
        max_send_sge, max_recv_sge : int, default 1
            Pieces of a work request.
        max_inline_data : int, default 0
            Bytes that a work request may carry in itself.
        port : int, default 1
        gid_index : int, optional
            Default: the routable RoCE v2 entry, IPv4 before IPv6.

        Returns
        -------
        QueuePair

        Raises
        ------
        ValueError
            A size is over the device's limit, or `cq` is of another context.
        VerbsError
            ibv_create_qp or ibv_modify_qp failed, or the port has no routable GID.
        """
        return queue_makers["create_qp"](
            self,
            cq,
            max_send_wr,
            max_recv_wr,
            max_send_sge,
            max_recv_sge,
            max_inline_data,
            port,
            gid_index,
        )

    def close(self):
        """Deallocate the protection domain; a second call does nothing.

        Raises
        ------
        VerbsError
            EBUSY: memory regions or queue pairs of it are open.
        """
        cdef int error
        retry_lost_regions()
        if not begin_close(
            &self.state,
            self.process,
            &self.children,
            "ibv_dealloc_pd",
            f"the protection domain of {self.context.name}",
        ):
            return
        with nogil:
            error = failure(self.context.library.verbs.dealloc_pd(self.handle))
        self.state = OPEN if error else CLOSED
        if error:
            raise_verbs_error(error, "ibv_dealloc_pd", self.context.name)
        self.context.children -= 1


cdef class Lender:
    """Lends a registration to the holders of views."""

    def __init__(self):
        raise TypeError("a Lender is a part of RegistrationCache")

    cdef int take_back(self) except -1:
        return 0


@cython.final
@cython.no_gc_clear
cdef class MemoryRegion(Registration):
    """Registered memory, from which views are cut.

    It is deregistered by `close`, at the end of a with-statement, or when the last
    holder is gone: a view, or a work request in flight, is one.

    Attributes
    ----------
    pd : ProtectionDomain
    """

    def __cinit__(self):
        self.state = CLOSED

    # No __dealloc__: in a reference cycle that would come after the owner of the memory
    # has let go of it, but the collector calls every __del__ before it breaks a cycle.
    def __del__(self):
        cdef int error
        if self.lender is not None:
            self.state = CLOSED
            self.lender.take_back()
            return
        if self.state != OPEN or self.pins or not is_this_process(self.process):
            return
        self.state = CLOSING
        with nogil:
            error = failure(self.pd.context.library.verbs.dereg_mr(self.handle))
        if error:
            # The device may still write there: the memory has to stay.
            keep_lost_region(self)
            report_lost(error, "ibv_dereg_mr", repr(self))
        else:
            count_out(self)
        self.state = CLOSED

    def __reduce__(self):
        raise TypeError(
            "a MemoryRegion is a handle of this process and can't be pickled: send "
            "views, or remote views, as bytes"
        )

    def __repr__(self):
        return (
            f"<MemoryRegion id={self.id:#x} addr={self.addr:#x} iova={self.iova:#x} "
            f"length={self.length} access={rights_text(self.rights)}"
            f"{' closed' if self.closed else ''}>"
        )

    def __enter__(self):
        if self.state != OPEN:
            raise StaleViewError(f"{self!r} is closed")
        return self

    def __exit__(self, kind, error, traceback):
        end_block(self, kind)

    def __len__(self):
        return self.whole.size

    def __getitem__(self, key):
        """Cut a view by a slice.

        Returns
        -------
        MemoryRegionView
        """
        cdef uint64_t offset
        cdef uint64_t length
        parse_slice(key, self.whole.size, &offset, &length)
        return cut(self, offset, length)

    def view(self, offset=0, size=None):
        """Cut a view.

        Parameters
        ----------
        offset : integer, default 0
            Bytes from the region's start.
        size : integer, optional
            Bytes. Default: all from `offset` on.

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        IndexError
            They aren't inside the region.
        StaleViewError
            The region is closed.
        """
        cdef uint64_t first
        cdef uint64_t length
        if size is None:
            if parse_u64(offset, "offset", &first) or first > self.whole.size:
                raise IndexError(
                    f"offset {number_text(offset)} isn't inside the "
                    f"{self.whole.size} bytes"
                )
            length = self.whole.size - first
        else:
            parse_range(offset, size, self.whole.size, &first, &length)
        return cut(self, first, length)

    def views(self, offsets, sizes):
        """Cut many views at once; all are checked before any is given.

        Parameters
        ----------
        offsets, sizes : integer or sequence of integers
            Bytes from the region's start; a single number is for all. An array of
            64-bit integers is read where it lies.

        Returns
        -------
        ViewArray

        Raises
        ------
        IndexError
            One of them isn't inside the region; the text says which.
        TypeError
            They are no integers.
        ValueError
            There are more of one than of the other, or more than one dimension.
        StaleViewError
            The region is closed.
        """
        check_cuttable(self)
        return cut_many(&self.whole, self, offsets, sizes)

    def view_of(self, array):
        """The view of an array that lies in the region.

        Parameters
        ----------
        array : object with host memory
            Its own first byte and size count, not those of its base. If the region is
            of device memory, an array or tensor of that.

        Returns
        -------
        MemoryRegionView

        Raises
        ------
        ValueError
            The array is not inside the region.
        TypeError
            The array is of device memory and the region is not, or the other way round.
        BufferError
            The array is not contiguous.
        StaleViewError
            The region is closed.
        """
        cdef Extent extent
        find_extent(array, &extent, self.is_device)
        check_kind(self, extent.is_device)
        check_inside(self, extent.address, extent.size, "the array")
        return cut(self, extent.address - self.whole.virtual_addr, extent.size)

    def views_of(self, arrays):
        """The views of many arrays that lie in the region.

        Parameters
        ----------
        arrays : iterable of objects with host memory
            As in `view_of`.

        Returns
        -------
        ViewArray
            One view for each, in their order.

        Raises
        ------
        ValueError
            One of them is not inside the region; the text says which.
        BufferError
            One of them is not contiguous.
        StaleViewError
            The region is closed.
        """
        cdef list items = list(arrays)
        cdef ViewArray views = new_view_array(len(items), (self,))
        cdef Extent extent
        cdef Py_ssize_t i
        check_cuttable(self)
        for i in range(views.count):
            find_extent(items[i], &extent, self.is_device)
            check_kind(self, extent.is_device)
            if not rdmaview_slice(
                &self.whole,
                extent.address - self.whole.virtual_addr,
                extent.size,
                <rdmaview_view *>views.start + i,
            ):
                check_inside(self, extent.address, extent.size, f"array {i},")
        return views

    def runs_of(self, array):
        """The views of an array that lies in the region in pieces.

        Parameters
        ----------
        array : object with host memory
            It may be strided, reversed or broadcast, of any number of dimensions.

        Returns
        -------
        ViewArray
            One view for each run of bytes in C order, adjacent runs joined: their
            bytes one after the other are ``array.tobytes()``. None if it is empty.

        Raises
        ------
        ValueError
            A part of it is not inside the region.
        StaleViewError
            The region is closed.
        """
        cdef Layout layout
        cdef ViewArray views
        find_layout(array, &layout, self.is_device)
        check_kind(self, layout.is_device)
        check_cuttable(self)
        if layout.count:
            check_inside(self, layout.low, layout.span, "the array")
        views = new_view_array(layout.count, (self,))
        shorten(views, cut_runs(&self.whole, &layout, <rdmaview_view *>views.start))
        return views

    def close(self):
        """Deregister; a second call does nothing. All views become stale at once.

        Raises
        ------
        VerbsError
            EBUSY: work in flight uses the memory. Or ibv_dereg_mr failed. The
            region is as it was, and closing can be tried again.
        ValueError
            It is a RegistrationCache's, which has to close it.
        """
        cdef int error
        if self.lender is not None:
            raise ValueError(f"{self!r} is a RegistrationCache's: close that")
        if not begin_close(
            &self.state, self.process, &self.pins, "ibv_dereg_mr", "the memory region"
        ):
            return
        with nogil:
            error = failure(self.pd.context.library.verbs.dereg_mr(self.handle))
        if error:
            self.state = OPEN
            raise_verbs_error(
                error, "ibv_dereg_mr", repr(self), "It is still registered: try again"
            )
        self.state = CLOSED
        count_out(self)
        self.memory = None

    @property
    def addr(self):
        """int: virtual address of the first byte."""
        return self.whole.virtual_addr

    @property
    def length(self):
        """int: bytes."""
        return self.whole.size

    @property
    def iova(self):
        """int: RDMA address of the first byte."""
        return self.whole.rdma_addr

    @property
    def lkey(self):
        """int: local key."""
        return self.whole.lkey

    @property
    def rkey(self):
        """int: remote key; 0 if no remote right was asked for."""
        return self.whole.rkey

    @property
    def id(self):
        """int: names this registration, never reused."""
        return self.whole.id

    @property
    def access(self):
        """Access: the rights."""
        return Access(self.rights)

    @property
    def closed(self):
        """bool: was it closed?"""
        return self.state == CLOSED


cdef int fitting_rights(HostMemory memory, int rights, object buffer) except -1:
    """Check that memory allows the rights; -1 stands for those that it allows."""
    if rights < 0:
        return 0 if memory.readonly else IBV_ACCESS_LOCAL_WRITE
    if memory.readonly and rights & WRITE_RIGHTS:
        raise BufferError(
            f"the buffer of this {type(buffer).__name__} is read-only, so it can't be "
            f"registered with {rights_text(rights)}"
        )
    return rights


cdef MemoryRegion register(
    ProtectionDomain pd, HostMemory memory, int rights, object iova
):
    cdef uint64_t address = memory.address
    cdef uint64_t size = memory.size
    cdef Context context = pd.context
    cdef Library library = context.library
    cdef MemoryRegion mr = MemoryRegion.__new__(MemoryRegion)
    cdef uint64_t rdma_addr = check_registration(
        context, address, size, rights, iova
    )
    # The RDMA address is told by its value; the flag would say it a second time.
    cdef int device_rights = rights & ~<int>IBV_ACCESS_ZERO_BASED
    cdef int error = 0
    mr.whole.id = next_registration_id()
    retry_lost_regions()
    # Only now: an argument's own code or another thread may have closed it meanwhile.
    check_open(pd, "ProtectionDomain")
    pd.children += 1
    with nogil:
        clear_errno()
        if library.verbs.reg_mr_iova2 != NULL:
            mr.handle = library.verbs.reg_mr_iova2(
                pd.handle, <void *>address, size, rdma_addr, device_rights
            )
        elif rdma_addr == address:
            mr.handle = library.verbs.reg_mr(
                pd.handle,
                <void *>address,
                size,
                device_rights & ~<int>IBV_ACCESS_OPTIONAL_RANGE,
            )
        elif library.verbs.reg_mr_iova != NULL:
            mr.handle = library.verbs.reg_mr_iova(
                pd.handle,
                <void *>address,
                size,
                rdma_addr,
                device_rights & ~<int>IBV_ACCESS_OPTIONAL_RANGE,
            )
        else:
            error = EOPNOTSUPP
        if mr.handle == NULL and not error:
            error = last_errno()
    if error:
        pd.children -= 1
        raise_registration_error(pd, memory, rdma_addr, rights, error)
    mr.memory = memory
    mr.is_device = memory.is_device
    mr.is_cyclic = memory.is_cyclic
    mr.readonly = memory.readonly
    begin_region(mr, pd, rights, address, rdma_addr, size)
    return mr


cdef int begin_region(
    MemoryRegion mr,
    ProtectionDomain pd,
    int rights,
    uint64_t address,
    uint64_t rdma_addr,
    uint64_t size,
) except -1:
    """Let a region that has its handle be used."""
    pd.context.library.has_registered = True
    mr.pd = pd
    mr.rights = rights
    mr.process = pd.process
    mr.whole.virtual_addr = address
    mr.whole.rdma_addr = rdma_addr
    mr.whole.size = size
    mr.whole.lkey = mr.handle.lkey
    # A key that gives no right must not look as if it did: devices hand one out.
    mr.whole.rkey = mr.handle.rkey if rights & PEER_RIGHTS else 0
    mr.state = OPEN
    pd.context.mr_count += 1
    pd.context.mr_bytes += size
    return 0


cdef MemoryRegion register_dmabuf(
    ProtectionDomain pd,
    int fd,
    uint64_t offset,
    uint64_t size,
    int rights,
    object iova,
):
    cdef Library library = pd.context.library
    cdef MemoryRegion mr = MemoryRegion.__new__(MemoryRegion)
    cdef uint64_t rdma_addr = check_registration(pd.context, offset, size, rights, iova)
    cdef int error = 0
    if library.verbs.reg_dmabuf_mr == NULL:
        raise_verbs_error(
            EOPNOTSUPP,
            "ibv_reg_dmabuf_mr",
            f"{library.path} lacks it",
            "It came with rdma-core 34",
        )
    mr.whole.id = next_registration_id()
    retry_lost_regions()
    check_open(pd, "ProtectionDomain")
    pd.children += 1
    with nogil:
        clear_errno()
        mr.handle = library.verbs.reg_dmabuf_mr(
            pd.handle,
            offset,
            size,
            rdma_addr,
            fd,
            rights & ~<int>IBV_ACCESS_ZERO_BASED,
        )
        if mr.handle == NULL:
            error = last_errno()
    if error:
        pd.children -= 1
        raise_verbs_error(
            error,
            "ibv_reg_dmabuf_mr",
            f"{size} bytes at offset {offset:#x} of descriptor {fd}, iova "
            f"{rdma_addr:#x}, access {rights_text(rights)}, on {pd.context.name}",
            _host.explain_dmabuf(error, pd.context.name),
        )
    mr.is_device = True
    mr.readonly = not rights & IBV_ACCESS_LOCAL_WRITE
    begin_region(mr, pd, rights, rdma_addr, rdma_addr, size)
    return mr


cdef int count_out(MemoryRegion mr) except -1:
    mr.pd.children -= 1
    mr.pd.context.mr_count -= 1
    mr.pd.context.mr_bytes -= mr.whole.size
    return 0


cdef long PAGE_SIZE = sysconf(_SC_PAGESIZE)


cdef MemoryRegion lend(MemoryRegion mr, HostMemory memory, Lender lender):
    """The same registration for views to hold, together with its memory."""
    cdef MemoryRegion lent = MemoryRegion.__new__(MemoryRegion)
    lent.handle = mr.handle
    lent.pd = mr.pd
    lent.memory = memory
    lent.is_cyclic = memory.is_cyclic
    lent.readonly = mr.readonly
    lent.rights = mr.rights
    lent.process = mr.process
    lent.whole = mr.whole
    lent.lender = lender
    lent.state = OPEN
    return lent


cdef uint64_t check_registration(
    Context context, uint64_t address, uint64_t size, int rights, object iova
) except? 0:
    """Refuse what no device may be asked; return the RDMA address."""
    cdef uint64_t rdma_addr = address
    if size == 0:
        raise ValueError("zero bytes can't be registered")
    if size > UINT64_MAX - address:
        raise ValueError(f"address {address:#x} plus {size} bytes passes 2**64 - 1")
    if size > context.limits.max_mr_size:
        raise ValueError(
            f"{size} bytes are over max_mr_size {context.limits.max_mr_size} of "
            f"{context.name}: register the buffer in pieces"
        )
    if rights & (WRITE_RIGHTS & ~<int>IBV_ACCESS_LOCAL_WRITE) and not (
        rights & IBV_ACCESS_LOCAL_WRITE
    ):
        raise ValueError(
            f"access {rights_text(rights)}: REMOTE_WRITE and REMOTE_ATOMIC need "
            "LOCAL_WRITE too (ibv_reg_mr(3))"
        )
    if iova is not None:
        if parse_u64(iova, "iova", &rdma_addr):
            raise ValueError(f"iova must be from 0 to 2**64 - 1, not {number_text(iova)}")
    elif rights & IBV_ACCESS_ZERO_BASED:
        rdma_addr = 0
    if rights & IBV_ACCESS_ZERO_BASED and rdma_addr != 0:
        raise ValueError(f"ZERO_BASED means an iova of 0, not {rdma_addr:#x}")
    if size > UINT64_MAX - rdma_addr:
        raise ValueError(f"iova {rdma_addr:#x} plus {size} bytes passes 2**64 - 1")
    if rights & IBV_ACCESS_ON_DEMAND:
        check_on_demand(context, rights)
    if (address ^ rdma_addr) & (PAGE_SIZE - 1):
        raise ValueError(
            f"iova {rdma_addr:#x} and address {address:#x} must have the same offset in "
            f"a page of {PAGE_SIZE} bytes: use iova {address & (PAGE_SIZE - 1):#x}, or "
            "page-aligned memory"
        )
    return rdma_addr


cdef int check_on_demand(Context context, int rights) except -1:
    """Ask for the capabilities that paging on demand needs: nothing falls back."""
    cdef ibv_device_attr_ex attributes
    cdef uint32_t rc
    cdef int error
    memset(&attributes, 0, sizeof(attributes))
    with nogil:
        error = query_device_ex(context.handle, &attributes)
    lacks = []
    if error or not attributes.odp_caps.general_caps & IBV_ODP_SUPPORT:
        lacks.append("IBV_ODP_SUPPORT")
    rc = attributes.odp_caps.per_transport_caps.rc_odp_caps
    if rights & IBV_ACCESS_REMOTE_READ and not rc & IBV_ODP_SUPPORT_READ:
        lacks.append("IBV_ODP_SUPPORT_READ")
    if rights & IBV_ACCESS_REMOTE_WRITE and not rc & IBV_ODP_SUPPORT_WRITE:
        lacks.append("IBV_ODP_SUPPORT_WRITE")
    if rights & IBV_ACCESS_REMOTE_ATOMIC and not rc & IBV_ODP_SUPPORT_ATOMIC:
        lacks.append("IBV_ODP_SUPPORT_ATOMIC")
    if lacks:
        raise_verbs_error(
            EOPNOTSUPP,
            "ibv_reg_mr",
            f"access {rights_text(rights)}: {context.name} lacks {', '.join(lacks)} for RC "
            "queue pairs",
            "Register without ON_DEMAND: then the memory is pinned",
        )
    return 0


cdef int check_kind(MemoryRegion mr, bint is_device) except -1:
    # The address of a dma-buf is as its user chose it: it could be an array's, too.
    if is_device != mr.is_device:
        raise TypeError(
            f"the array is of host memory, and the region of {mr.whole.size} bytes at "
            f"{mr.whole.virtual_addr:#x} of a device's"
        )
    return 0


cdef int check_inside(
    MemoryRegion mr, uint64_t address, uint64_t size, str what
) except -1:
    if not rdmaview_within(mr.whole.size, address - mr.whole.virtual_addr, size):
        raise ValueError(
            f"{what} of {size} bytes at {address:#x} is not inside the region of "
            f"{mr.whole.size} bytes at {mr.whole.virtual_addr:#x}"
        )
    return 0


cdef Py_ssize_t cut_runs(
    const rdmaview_view *whole, const Layout *layout, rdmaview_view *views
) noexcept:
    """Cut what is inside a region; return the number of runs that are left, joined."""
    cdef int64_t place[DIMENSIONS]
    cdef uint64_t address
    cdef Py_ssize_t count = 0
    first_place(layout, place)
    for _ in range(layout.count):
        address = next_place(layout, place)
        if count and views[count - 1].virtual_addr + views[count - 1].size == address:
            views[count - 1].size += layout.piece
        else:
            rdmaview_slice(
                whole, address - whole.virtual_addr, layout.piece, &views[count]
            )
            count += 1
    return count


cdef int check_cuttable(MemoryRegion mr) except -1:
    if mr.state != OPEN:
        raise StaleViewError(f"{mr!r} gives no views any more")
    return 0


cdef MemoryRegionView cut(MemoryRegion mr, uint64_t offset, uint64_t size):
    cdef rdmaview_view part
    check_cuttable(mr)
    rdmaview_slice(&mr.whole, offset, size, &part)
    return new_view(&part, mr)


# Regions whose finaliser could not deregister them.
cdef list _lost_regions = []


@cython.final
@cython.no_gc_clear
cdef class LostRegion:
    cdef ibv_mr *handle
    cdef object memory
    cdef ProtectionDomain pd
    cdef uint64_t size


cdef int keep_lost_region(MemoryRegion mr) except -1:
    cdef LostRegion lost = LostRegion.__new__(LostRegion)
    lost.handle = mr.handle
    lost.memory = mr.memory
    lost.pd = mr.pd
    lost.size = mr.whole.size
    _lost_regions.append(lost)
    return 0


cdef int retry_lost_regions() except -1:
    """Deregister once more what could not be, now that its owner is gone."""
    global _lost_regions
    cdef LostRegion lost
    cdef int error
    cdef list regions = _lost_regions
    if not regions:
        return 0
    _lost_regions = []
    for region in regions:
        lost = region
        if not is_this_process(lost.pd.process):
            continue
        with nogil:
            error = failure(lost.pd.context.library.verbs.dereg_mr(lost.handle))
        if error:
            _lost_regions.append(lost)
        else:
            lost.pd.children -= 1
            lost.pd.context.mr_count -= 1
            lost.pd.context.mr_bytes -= lost.size
    return 0


cdef int report_lost(int error, str verb, str what) except -1:
    """Tell of a finaliser that failed: it can't raise."""
    if error:
        write_unraisable(VerbsError(max(error, 0), verb, what), verb)
    return 0


cdef int warn_unclosed(str text) except -1:
    try:
        warnings.warn(text, ResourceWarning, stacklevel=1)
    except ResourceWarning as warning:
        # Warnings are errors here, but a finaliser can't raise.
        write_unraisable(warning, text)
    return 0


cdef int write_unraisable(object error, str where) except -1:
    # It tells of the exception that is raised, which one that is handled is not.
    PyErr_SetObject(type(error), error)
    PyErr_WriteUnraisable(where)
    return 0


cdef bint may_finalise(Handle handle) noexcept:
    # At interpreter exit a daemon thread's objects go while it is still in a verb.
    return (
        handle.state == OPEN
        and handle.children == 0
        and is_this_process(handle.process)
    )


cdef int end_block(object handle, object kind) except -1:
    """Close at the end of a with-block, which `kind` of exception ended."""
    try:
        handle.close()
    except Exception:
        # The block's own exception says more than a close that it prevented.
        if kind is None:
            raise
    return 0


cdef int check_open(Handle handle, str what) except -1:
    if handle.state != OPEN:
        raise ValueError(f"this {what} is closed")
    return check_process(handle.process, what)


cdef int begin_close(
    State *state, Process process, Py_ssize_t *children, str verb, str what
) except -1:
    """Claim the closing of a handle; return 0 if it is closed already."""
    while state[0] == CLOSING and is_this_process(process):
        # Another thread is at it: what it comes to is the answer to this call too.
        with nogil:
            usleep(50)
        PyErr_CheckSignals()
    if state[0] == CLOSED:
        return 0
    check_process(process, verb)
    if children[0]:
        raise_verbs_error(
            EBUSY,
            verb,
            f"{what} is in use by {children[0]} "
            + (
                "work requests in flight"
                if verb == "ibv_dereg_mr"
                else "open children or calls"
            ),
            "Wait for them, or close them first",
        )
    state[0] = CLOSING
    return 1


cdef int check_port(Context context, object n) except -1:
    cdef uint64_t port
    if parse_u64(n, "port", &port) or not 1 <= port <= context.limits.phys_port_cnt:
        raise ValueError(
            f"{context.name} has ports 1 to {context.limits.phys_port_cnt}, "
            f"not {number_text(n)}"
        )
    check_open(context, "Context")
    return <int>port


cdef int read_limits(Context context) except -1:
    cdef ibv_device_attr limits
    cdef int error
    check_open(context, "Context")
    context.children += 1
    with nogil:
        error = failure(
            context.library.verbs.query_device(context.handle, &limits)
        )
    context.children -= 1
    if error:
        raise_verbs_error(error, "ibv_query_device", context.name)
    # In one piece, with the GIL: other threads check their arguments against it.
    context.limits = limits
    return 0


cdef int read_port(Context context, uint8_t port, ibv_port_attr *attributes) except -1:
    cdef int error
    check_open(context, "Context")
    memset(attributes, 0, sizeof(attributes[0]))
    context.children += 1
    with nogil:
        error = failure(
            context.library.verbs.query_port(
                context.handle, port, <_compat_ibv_port_attr *>attributes
            )
        )
    context.children -= 1
    if error:
        raise_verbs_error(error, "ibv_query_port", f"{context.name} port {port}")
    return 0


cdef int parse_access(object access) except -1:
    cdef uint64_t bits
    if isinstance(access, bool) or not isinstance(access, int):
        raise TypeError(
            f"access is an rdmaview.Access, not {type(access).__name__}: {access!r}"
        )
    # As a plain integer: the operators of an IntFlag are slow.
    if parse_u64(access, "access", &bits) or bits & ~<uint64_t>KNOWN_RIGHTS:
        raise ValueError(f"access {int(access):#x} has bits that are no rights")
    return <int>bits


cdef str rights_text(int rights):
    return "|".join([right.name for right in Access if rights & right]) or "none"


cdef int raise_registration_error(
    ProtectionDomain pd, HostMemory memory, uint64_t rdma_addr, int rights, int error
) except -1:
    cdef Context context = pd.context
    cdef Library library = context.library
    cdef bint fork_support = (
        library.verbs.is_fork_initialized != NULL
        and library.verbs.is_fork_initialized() == IBV_FORK_ENABLED
    )
    if error == EOPNOTSUPP and library.verbs.reg_mr_iova2 == NULL and (
        library.verbs.reg_mr_iova == NULL and rdma_addr != memory.address
    ):
        raise_verbs_error(
            error,
            "ibv_reg_mr_iova2",
            f"{library.path} lacks it and ibv_reg_mr_iova, so iova can't be "
            f"{rdma_addr:#x}",
            "They came with rdma-core 28 and 26",
        )
    detail, hint = _host.explain_registration(
        max(error, 0),
        context.name,
        memory.address,
        memory.size,
        memory.is_device,
        rights_text(rights),
        context.mr_count,
        context.mr_bytes,
        context.limits.max_mr,
        fork_support,
    )
    return raise_verbs_error(error, "ibv_reg_mr", detail, hint)
