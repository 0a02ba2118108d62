"""What this machine says about its devices and its memory, in words.

Nothing here touches a device: it reads /proc, /sys and /dev to explain what a verb
refused, and what to do.
"""

import errno
import os
import resource
import stat
from _socket import AF_INET6, inet_ntop

PAGE_SIZE = os.sysconf("SC_PAGESIZE")
CAP_IPC_LOCK = 14
LINK_LOCAL = b"\xfe\x80"
IPV4_MAPPED = bytes(10) + b"\xff\xff"


def sysfs_devices():
    """Name the devices that the kernel has.

    ``$SYSFS_PATH`` moves the root of sysfs, as it does for libibverbs.

    Returns
    -------
    list of str
    """
    return sysfs_names("infiniband")


def sysfs_names(kind):
    """List a folder of /sys/class."""
    try:
        return sorted(os.listdir(sysfs_path(kind)))
    except OSError:
        return []


def sysfs_path(*names):
    """Where something of /sys/class is."""
    return os.path.join(os.environ.get("SYSFS_PATH") or "/sys", "class", *names)


def device_nodes():
    """Find what must be opened to use each device of the kernel.

    Returns
    -------
    list of (str, str)
        The device's name, and its node's as ``"uverbs0"``.
    """
    found = []
    for node in sysfs_names("infiniband_verbs"):
        name = read_line(sysfs_path("infiniband_verbs", node, "ibdev"))
        if name:
            found.append((name, node))
    return found


def read_line(path):
    """Read the first line of a file; empty if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return lines.readline().strip()
    except OSError:
        return ""


def module_state(name):
    """Say whether a module is in the kernel.

    Parameters
    ----------
    name : str
        With underscores, as ``"ib_uverbs"``.

    Returns
    -------
    {"loaded", "built in", "available", "missing"}
        Available: it can be loaded; missing: this kernel has none of that name, as
        far as /lib/modules tells.
    """
    folder = f"/lib/modules/{os.uname().release}"
    if has_line("/proc/modules", lambda line: line.startswith(f"{name} ")):
        return "loaded"
    file_name = f"/{name}.ko"
    if has_line(f"{folder}/modules.builtin", lambda line: file_name in line):
        return "built in"
    if has_line(
        f"{folder}/modules.dep", lambda line: file_name in line.partition(":")[0]
    ):
        return "available"
    return "missing"


def has_line(path, is_wanted):
    """Say whether a file has a line that is wanted."""
    try:
        with open(path, encoding="utf-8", errors="replace") as lines:
            return any(is_wanted(line) for line in lines)
    except OSError:
        return False


def library_file(path):
    """Find the file that a library was loaded from into this process.

    Parameters
    ----------
    path : str
        What was handed to dlopen.

    Returns
    -------
    str
        Empty if it is not loaded.
    """
    stem = os.path.basename(path).partition(".so")[0]
    for _, _, line in mappings(0, 1 << 64):
        mapped = mapped_file(line)
        if os.path.basename(mapped).partition(".so")[0] == stem:
            return mapped
    return ""


def library_versions(path):
    """Read which libibverbs a file is.

    Parameters
    ----------
    path : str
        As `library_file` gave it.

    Returns
    -------
    level : int
        N of the newest symbol version IBVERBS_1.N; 0 if it has none.
    release : str
        rdma-core's version, as in the file's name; empty if it isn't there.
    """
    try:
        with open(path, "rb") as file:
            names = file.read().split(b"\0")
    except OSError:
        names = []
    levels = [name[10:] for name in names if name.startswith(b"IBVERBS_1.")]
    numbers = os.path.basename(path).partition(".so.")[2].split(".")
    return (
        max((int(level) for level in levels if level.isdigit()), default=0),
        ".".join(numbers[2:]),
    )


def kernel_trouble(found, error):
    """Say why libibverbs lists fewer devices than there could be.

    Parameters
    ----------
    found : list of str
        The devices that it lists.
    error : int
        errno of ibv_get_device_list, 0 if it worked.

    Returns
    -------
    str
        Empty if nothing is wrong.
    """
    present = sysfs_devices()
    lost = [name for name in present if name not in found]
    if lost:
        return (
            f"The kernel has {', '.join(lost)} (/sys/class/infiniband), but libibverbs "
            "lists none of that name: the provider package is missing or does not fit "
            "the kernel's ABI. Install ibverbs-providers (Debian, Ubuntu) or rdma-core "
            "(Fedora, RHEL) of libibverbs' own version."
        )
    if found:
        return ""
    if error == errno.ENOSYS or not present:
        return (
            "The kernel has no RDMA device (nothing in /sys/class/infiniband): load "
            "its driver, or make one of a network interface by modprobe rdma_rxe and "
            "rdma link add rxe0 type rxe netdev IFACE."
        )
    return f"ibv_get_device_list failed: {os.strerror(error)}."


def open_hint(error, kind, node):
    """Say what to do about a device that can't be opened."""
    if kind != "kernel":
        return ""
    path = f"/dev/infiniband/{node}"
    return node_trouble(path, error) or (
        f"{path} is there: look at dmesg for the driver's own word"
    )


def node_trouble(path, error=0):
    """Say why a device node can't be opened.

    Parameters
    ----------
    path : str
    error : int, default 0
        errno of a try to open it.

    Returns
    -------
    str
        Empty if it could be opened.
    """
    if not os.path.exists(path):
        return (
            f"{path} is missing: load ib_uverbs, or hand the node to the container "
            f"(--device={path})"
        )
    if error in (errno.EACCES, errno.EPERM) or not os.access(path, os.R_OK | os.W_OK):
        mode = stat.filemode(os.stat(path).st_mode)
        return (
            f"No permission for {path} ({mode}): join its group, or add a udev rule "
            "that opens it"
        )
    return ""


def gid_text(raw):
    """Write the 16 bytes of a GID as an address.

    Parameters
    ----------
    raw : bytes

    Returns
    -------
    str
    """
    return inet_ntop(AF_INET6, bytes(raw))


def routable_gid(table):
    """Choose the entry to send from: RoCE v2, IPv4 before IPv6, never link-local.

    Parameters
    ----------
    table : list of GID

    Returns
    -------
    GID or None
    """
    usable = [
        entry
        for entry in table
        if entry.type == "RoCE v2"
        and any(entry.raw)
        and not (entry.raw[:1] == b"\xfe" and entry.raw[1] & 0xC0 == 0x80)
    ]
    usable.sort(key=lambda entry: not entry.raw.startswith(IPV4_MAPPED))
    return usable[0] if usable else None


DLPACK_HOST = (1, 3, 11)  # kDLCPU, kDLCUDAHost, kDLROCMHost


def device_of(thing):
    """Name the device that an object's memory is on; None for host memory."""
    if hasattr(thing, "__cuda_array_interface__") or getattr(thing, "is_cuda", False):
        return str(getattr(thing, "device", "CUDA"))
    kind = getattr(getattr(thing, "device", None), "type", None)
    if isinstance(kind, str) and kind != "cpu":
        return str(thing.device)
    if hasattr(thing, "__dlpack_device__") and not isinstance(thing, type):
        kind, number = thing.__dlpack_device__()
        if int(kind) not in DLPACK_HOST:
            return f"DLPack device {int(kind)}:{number}"
    return None


def no_buffer_text(thing):
    """Say why an object can't be registered."""
    text = f"a {type(thing).__name__} has no buffer to register"
    device = device_of(thing)
    if device is not None:
        return (
            f"{text}: it is device memory ({device}), and this registers host memory "
            "only. Export it as a dma-buf and use ProtectionDomain.reg_dmabuf_mr"
        )
    if isinstance(thing, int):
        return f"{text}: an address is registered by reg_mr_address(addr, length)"
    return text


def memlock():
    """How much memory this process may pin.

    Returns
    -------
    soft, hard : int or None
        Bytes; None is unlimited.
    exempt : bool
        CAP_IPC_LOCK lifts the limit.
    """
    soft, hard = (
        None if limit == resource.RLIM_INFINITY else limit
        for limit in resource.getrlimit(resource.RLIMIT_MEMLOCK)
    )
    return soft, hard, bool(int(process_status("CapEff", "0"), 16) >> CAP_IPC_LOCK & 1)


def process_status(field, default=""):
    """Read a field of /proc/self/status."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as lines:
            for line in lines:
                name, _, value = line.partition(":")
                if name == field:
                    return value.strip()
    except OSError:
        pass
    return default


def mappings(address, size):
    """Find what is mapped in a range.

    Parameters
    ----------
    address, size : int

    Returns
    -------
    list of (int, int, str)
        First address, address after the last, and the line of /proc/self/maps.
    """
    found = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as lines:
            for line in lines:
                first, _, last = line.partition(" ")[0].partition("-")
                start, end = int(first, 16), int(last, 16)
                if start < address + size and end > address:
                    found.append((start, end, " ".join(line.split())))
    except OSError:
        pass
    return found


def mapping_text(address, size):
    """Say how a range is mapped."""
    found = mappings(address, size)
    if not found:
        return f"nothing is mapped at {address:#x}"
    covered = address
    for start, end, _ in found:
        if start > covered:
            break
        covered = end
    text = "mapped: " + "; ".join(line for _, _, line in found[:3])
    if len(found) > 3:
        text += f"; and {len(found) - 3} more"
    if covered < address + size:
        text += f"; nothing is mapped at {covered:#x}"
    return text


def mapped_file(line):
    """Name the file of a line of `mappings`; empty if it has none."""
    return line.split(" ", 5)[5] if line.count(" ") >= 5 else ""


def file_behind(address, size):
    """Name the file whose pages a range is made of, if it is not kept in memory."""
    for _, _, line in mappings(address, size):
        path = mapped_file(line)
        if path.startswith("/") and not path.startswith(("/dev/shm/", "/memfd:")):
            return path
    return ""


def explain_registration(
    error,
    device,
    address,
    size,
    is_device,
    rights,
    mr_count,
    mr_bytes,
    max_mr,
    fork_support,
):
    """Put a failed registration into words.

    Returns
    -------
    detail, hint : str
    """
    pages = (address % PAGE_SIZE + size + PAGE_SIZE - 1) // PAGE_SIZE
    soft, hard, exempt = memlock()
    detail = (
        f"{size} bytes ({pages} pages) at {address:#x}, access {rights}, on {device}; "
        f"memlock soft {limit_text(soft)}, hard {limit_text(hard)}"
        f"{', lifted by CAP_IPC_LOCK' if exempt else ''}; registered here: {mr_count} "
        f"regions, {mr_bytes} bytes"
    )
    if is_device:
        return detail, (
            "The address of device memory can be registered only if the module "
            "nvidia-peermem is loaded, the memory is cudaMalloc's (PyTorch: without "
            "expandable_segments in PYTORCH_CUDA_ALLOC_CONF), and the GPU's BAR has room "
            "for it. Where that isn't so, export it as a dma-buf and use reg_dmabuf_mr"
        )
    if error == errno.EFAULT:
        detail += f"; {mapping_text(address, size)}"
    return detail, registration_hint(
        error, address, size, mr_count, mr_bytes, max_mr, fork_support
    )


def registration_hint(error, address, size, mr_count, mr_bytes, max_mr, fork_support):
    """Say what to do about a failed registration."""
    soft, _, exempt = memlock()
    path = file_behind(address, size)
    if path and error in (errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP):
        return (
            f"The memory is of the file {path}, whose pages most file systems let no "
            "device write: use anonymous memory, /dev/shm or memfd, or register "
            "without a write right; where the kernel refuses that too, map the file "
            'privately (mode "c" of numpy.memmap)'
        )
    if error == errno.EINVAL and fork_support:
        return (
            "Fork support is on (ibv_fork_init), and it can't split huge pages: "
            "register whole ones"
        )
    if error == errno.EFAULT:
        return "The whole range must be mapped, and writable for a write right"
    if error not in (errno.ENOMEM, errno.EAGAIN, errno.EIO):
        return ""
    if mr_count >= max_mr:
        return (
            f"The device's table is full: max_mr is {max_mr}. Register few large "
            "segments and cut views from them, which costs no region"
        )
    if not exempt and soft is not None and mr_bytes + size > soft:
        return (
            "The limit of pinned memory is reached. Raise it: ulimit -l, limits.conf "
            "and a new login, LimitMEMLOCK= of the service, or --ulimit memlock of the "
            "container"
        )
    if fork_support:
        return (
            "Fork support is on (ibv_fork_init), and splits a mapping for each "
            "registration: vm.max_map_count may be reached"
        )
    return (
        f"Neither memlock nor max_mr ({max_mr}) explains it from this process alone: "
        "other processes' regions fill the same table"
    )


def limit_text(limit):
    """Write a resource limit."""
    return "unlimited" if limit is None else str(limit)


STATUS_HINTS = {
    "LOC_LEN_ERR": "The request is longer than the device takes",
    "LOC_PROT_ERR": (
        "The lkey, the local range or its rights were refused: was its region closed?"
    ),
    "REM_ACCESS_ERR": (
        "The peer refused the rkey, the range or the right: is its region still "
        "registered, with REMOTE_WRITE for a write or REMOTE_READ for a read?"
    ),
    "WR_FLUSH_ERR": "An earlier error broke the queue pair: make a new one",
    "RETRY_EXC_ERR": (
        "The peer did not answer: is its queue pair connected to this one, and its "
        "address reachable?"
    ),
    "RNR_RETRY_EXC_ERR": "The peer had no receive posted",
}


def status_hint(status, opcode, gid):
    """Say what to look at for a bad status.

    Parameters
    ----------
    status : str
        As ``"RETRY_EXC_ERR"``.
    opcode : str
    gid : str
        What the queue pair sends from, in words.

    Returns
    -------
    str
    """
    hint = STATUS_HINTS.get(status, "")
    if status == "RETRY_EXC_ERR":
        return f"{hint} Sent from {gid}"
    return hint


def meminfo(name):
    """Read a number of /proc/meminfo; None if it isn't there."""
    try:
        with open("/proc/meminfo", encoding="ascii") as lines:
            for line in lines:
                found, _, rest = line.partition(":")
                if found == name:
                    return int(rest.split()[0])
    except OSError:
        pass
    return None


def explain_dmabuf(error, device):
    """Say what to do about a dma-buf that could not be registered."""
    if error in (errno.EOPNOTSUPP, errno.ENOSYS):
        return (
            f"{device} or its driver takes no dma-bufs (Linux 5.12 or newer and mlx5, "
            "irdma or efa do). Copy the bytes through host memory"
        )
    if error == errno.EBADF:
        return "The descriptor is not open"
    if error == errno.EINVAL:
        return (
            "Is the descriptor one of a dma-buf, and offset plus length inside it? "
            "Export the whole allocation, page-aligned, and give the part by offset"
        )
    return "See dmesg"


def huge_page_size():
    """Bytes of a huge page of the default size."""
    return (meminfo("Hugepagesize") or 2048) * 1024


def huge_page_text():
    """Say how many huge pages there are, and how to get more."""
    free, total = meminfo("HugePages_Free"), meminfo("HugePages_Total")
    return (
        f"{free} of {total} huge pages of {huge_page_size()} bytes are free. Reserve "
        "more (as root: sysctl vm.nr_hugepages=N), or use huge_pages=False"
    )


def numa_nodes():
    """List the NUMA nodes of this machine."""
    try:
        names = os.listdir("/sys/devices/system/node")
    except OSError:
        return []
    return sorted(
        int(name[4:]) for name in names if name[:4] == "node" and name[4:].isdigit()
    )


def no_node_text(node):
    """Say which NUMA nodes there are instead."""
    return f"this machine has no NUMA node {node}: it has {numa_nodes() or 'none'}"
