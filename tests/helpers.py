"""Raw memory, tensors, what the kernel says of this process, processes of a test's own."""

import contextlib
import ctypes
import errno
import gc
import mmap
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import SimpleNamespace

PAGE = mmap.PAGESIZE
MAP_NORESERVE = 0x4000
MAP_FIXED_NOREPLACE = 0x100000
PROT_RW = mmap.PROT_READ | mmap.PROT_WRITE

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


@contextlib.contextmanager
def mapping(size, address=None, flags=0, protection=PROT_RW, file=-1):
    """Map anonymous memory or a file, at the address if one is given; give that."""
    flags |= mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if file < 0 else mmap.MAP_SHARED
    flags |= MAP_FIXED_NOREPLACE if address else 0
    mapped = libc.mmap(address, size, protection, flags, file, 0)
    if mapped == ctypes.c_void_p(-1).value:
        error = ctypes.get_errno()
        raise OSError(error, f"mmap: {errno.errorcode[error]}")
    try:
        yield mapped
    finally:
        libc.munmap(mapped, size)


def unmap(address, size):
    assert libc.munmap(address, size) == 0


def address_of(buffer):
    """Address of a writable buffer, which is not held."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    gc.collect()
    return address


def pinned_bytes():
    """VmPin of this process: what the kernel holds for devices."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmPin:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("/proc/self/status has no VmPin")


def open_files():
    return len(os.listdir("/proc/self/fd"))


def eventually(condition, seconds=10.0):
    """Wait until it holds; tell whether it does."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.002)
    return True


def run_python(code, *args, options=(), timeout=120, loader=False, **environment):
    """Run a program; its exit status, stdout and stderr are the caller's to judge."""
    program = [sys.executable, *options, "-c", textwrap.dedent(code), *map(str, args)]
    return subprocess.run(
        [dynamic_loader(), *program] if loader else program,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)} | environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def dynamic_loader():
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = os.path.basename(line.split()[-1])
        if name.startswith(("ld-linux", "ld64", "ld-musl", "ld.so")):
            return line.split()[-1]
    raise AssertionError("/proc/self/maps has no dynamic loader")


def assert_silent(done):
    """The program ended well and said nothing."""
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class CapabilityHeader(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class CapabilityWord(ctypes.Structure):
    _fields_ = [
        ("effective", ctypes.c_uint32),
        ("permitted", ctypes.c_uint32),
        ("inherited", ctypes.c_uint32),
    ]


def drop_capability(number):
    """Give up a capability of this process, below 32; see capset(2)."""
    header = CapabilityHeader(0x20080522, 0)
    words = (CapabilityWord * 2)()
    assert libc.capget(ctypes.byref(header), words) == 0
    words[0].effective &= ~(1 << number)
    words[0].permitted &= ~(1 << number)
    assert libc.capset(ctypes.byref(header), words) == 0


class Tensor:
    """What torch's tensors of the CPU show of themselves; bfloat16 if `items` is u2."""

    def __init__(self, items, device="cpu", storage=None):
        self.items = items
        self.device = SimpleNamespace(type=device.split(":")[0])
        self.device.__str__ = lambda: device
        self.is_cuda = device.startswith("cuda")
        self.shape = items.shape
        self.storage = storage or SimpleNamespace(data=items)

    def data_ptr(self):
        return self.items.__array_interface__["data"][0]

    def untyped_storage(self):
        return self.storage

    def is_contiguous(self):
        return self.items.flags.c_contiguous

    def numel(self):
        return self.items.size

    def element_size(self):
        return self.items.itemsize

    def dim(self):
        return self.items.ndim

    def stride(self):
        return tuple(step // self.items.itemsize for step in self.items.strides)
