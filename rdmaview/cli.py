"""The ``rdmaview`` command: which devices are there, what ails them, and a demo."""

import argparse
import hashlib
import json
import os
import socket
import struct
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np

from . import _host
from ._errors import DeviceNotFoundError
from ._library import kernel_path, open_library
from ._queue import QueuePairInfo
from ._verbs import Access, Device, list_devices
from ._verbs import devices as all_devices
from ._verbs import open as open_device
from ._view import RemoteView

OK, PROBLEM, FAILED = 0, 1, 2
INTERRUPTED = 130

KIB, MIB = 1 << 10, 1 << 20
SUFFIXES = {"": 1, "K": KIB, "M": MIB, "G": 1 << 30}

FALLBACK = "soft0"
PEER_RIGHTS = Access.LOCAL_WRITE | Access.REMOTE_WRITE | Access.REMOTE_READ
DEFAULT_SIZE = 8 * MIB
CHUNK = 1 * MIB
# The demo moves its segment once, and then again while this many seconds aren't over.
TIME_BUDGET = 1.0
MAX_PASSES = 16
# How long either side of the demo waits for the other.
PATIENCE = 120.0
SEED = "rdmaview demo"
WRITTEN, READ = 0, 1

# ibv_query_gid_table came with IBVERBS_1.11.
NEEDED_LEVEL = 11


class VerificationError(Exception):
    """Bytes arrived that nobody sent."""


class Parser(argparse.ArgumentParser):
    """Reports a wrong command line in one line."""

    def error(self, message):
        """Print the message, and exit."""
        self.exit(FAILED, f"{self.prog}: {message} (see {self.prog} --help)\n")


class ShowVersion(argparse.Action):
    """Asked of the installation, and only if wanted: it takes a while."""

    def __call__(self, parser, namespace, values, option_string=None):
        """Print the version, and exit."""
        from importlib.metadata import version

        print(version("rdmaview"))
        parser.exit()


def main(argv=None):
    """Run the command.

    Parameters
    ----------
    argv : list of str, optional
        Arguments. Default: those of the process.

    Returns
    -------
    int
        Exit status: 0 if all is well, 1 if the doctor found no usable kernel device
        or the demo wrong bytes, 2 for an error, told in one line on stderr.
    """
    arguments = make_parser().parse_args(argv)
    try:
        return arguments.run(arguments)
    except VerificationError as error:
        print(f"rdmaview: NOT VERIFIED: {error}", file=sys.stderr)
        return PROBLEM
    except (OSError, ValueError, MemoryError) as error:
        print(f"rdmaview: {error_text(error)}", file=sys.stderr)
        return FAILED
    except KeyboardInterrupt:
        print("rdmaview: interrupted", file=sys.stderr)
        return INTERRUPTED


def make_parser():
    """Describe the command line."""
    parser = Parser(
        prog="rdmaview",
        description="Register memory once, slice it in nanoseconds, move it by RDMA.",
    )
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="print it")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser(
        "devices",
        help="list the RDMA devices",
        description="List the RDMA devices, with a row for each port.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run_devices)

    command = commands.add_parser(
        "doctor",
        help="check what a kernel device needs, and say what to do",
        description="Check what a kernel device needs, and say what to do.",
        epilog="Exit status: 0 if some kernel device is usable (it opens, and has an "
        "active port with an address), else 1. The built-in device does not count.",
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.set_defaults(run=run_doctor)

    command = commands.add_parser(
        "demo",
        help="move bytes between two threads, and verify each",
        description="Register a NumPy segment, cut views from it, and let a second "
        "thread's queue pair write and read through remote views that it got as bytes. "
        "Every byte is verified on both sides.",
        epilog="Exit status: 0 if all bytes were verified, 1 if some were wrong, 2 for "
        "an error.",
    )
    command.add_argument(
        "--device",
        metavar="NAME",
        help="default: $RDMAVIEW_DEVICE, else the first kernel device with an active "
        f"port, else the built-in {FALLBACK}",
    )
    command.add_argument(
        "--size",
        metavar="BYTES",
        type=parse_size,
        help="of the segment; K, M, G may follow (default: 8M, or what may be pinned)",
    )
    command.set_defaults(run=run_demo)
    return parser


def parse_size(text):
    """Read a number of bytes, as ``"8M"``."""
    number = text.upper().rstrip("KMG")
    unit = SUFFIXES.get(text.upper()[len(number) :])
    if unit is None or not (number.isascii() and number.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of bytes, as 8M is")
    size = int(number) * unit
    if size < KIB:
        raise argparse.ArgumentTypeError(f"{text} bytes are too few: take 1K or more")
    return size


def error_text(error):
    """Write an exception in one line."""
    text = getattr(error, "strerror", None) or str(error) or type(error).__name__
    return " ".join(text.split())


def size_text(size):
    """Write a number of bytes, as ``"8 MiB"``."""
    unit = "B"
    for larger in ("KiB", "MiB", "GiB"):
        if size < KIB:
            break
        size, unit = size / KIB, larger
    return f"{size:.4g} {unit}"


def format_table(rows, right=()):
    """Align rows of text in columns; the columns named by number to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


# rdmaview devices


def run_devices(arguments):
    """Print the devices."""
    found = [describe_device(device) for device in all_devices()]
    if arguments.json:
        print(json.dumps(found, indent=2))
        return OK
    rows = [("NAME", "KIND", "PORT", "STATE", "ROUTABLE GID", "OPENABLE")]
    for device in found:
        openable = "yes" if device["openable"] else f"no: {device['reason']}"
        rows += [
            (device["name"], device["kind"], *port_cells(port), openable)
            for port in device["ports"] or [None]
        ]
    print(format_table(rows))
    if not any(device["kind"] == "kernel" for device in found):
        print("no kernel RDMA device: rdmaview doctor says why", file=sys.stderr)
    return OK


def port_cells(port):
    """Write what the table says of a port."""
    if port is None:
        return "-", "-", "-"
    gid = port["gid"]
    address = "none" if gid is None else f"{gid['address']} (index {gid['index']})"
    if port["link_layer"] == "InfiniBand":
        address = "not needed"
    return str(port["port"]), port["state"], address


def describe_device(device):
    """Ask a device for what the table shows.

    Parameters
    ----------
    device : Device

    Returns
    -------
    dict of str to object
        Its name, kind, node; whether it can be opened, or the reason why not; and
        its ports.
    """
    told = {
        "name": device.name,
        "kind": device.kind,
        "node": device.node,
        "openable": True,
        "reason": "",
        "ports": [],
    }
    try:
        with open_device(device.name) as ctx:
            count = ctx.attributes.phys_port_cnt
            told["ports"] = [describe_port(ctx, n + 1) for n in range(count)]
    except OSError as error:
        told.update(openable=False, reason=error_text(error))
    return told


def describe_port(ctx, n):
    """Ask a port for its state, and for the GID to send from."""
    port = ctx.port(n)
    try:
        gid = _host.routable_gid(ctx.gids(n))
    except OSError:
        gid = None
    return {
        "port": n,
        "state": port.state,
        "link_layer": port.link_layer,
        "gid": gid and {"index": gid.index, "type": gid.type, "address": gid.address},
    }


def is_usable(device):
    """Say whether a queue pair of a described device could be connected."""
    return any(port_trouble(port) == "" for port in device["ports"])


def port_trouble(port):
    """Say what is wrong with a described port; empty if nothing is."""
    if port["state"] != "ACTIVE":
        return (
            f"port {port['port']} is {port['state']}: bring its network interface up "
            "(ip link set IFACE up), or look at the cable and the subnet manager"
        )
    if port["gid"] is None and port["link_layer"] == "Ethernet":
        return (
            f"port {port['port']} has no routable RoCE v2 GID: give its network "
            "interface an IP address (ip addr add ADDRESS/24 dev IFACE)"
        )
    return ""


# rdmaview doctor


def run_doctor(arguments):
    """Print what was checked."""
    kernel, trouble = list_devices("kernel")
    described = [describe_device(device) for device in kernel]
    checks = [
        check_uverbs(),
        check_rxe(),
        check_sysfs(),
        check_nodes(),
        check_library(),
        check_provider([device.name for device in kernel], trouble),
        check_memlock(),
        *(check_ports(device) for device in described),
        check_soft(),
    ]
    usable = [device["name"] for device in described if is_usable(device)]
    if arguments.json:
        print(json.dumps({"usable": usable, "checks": checks}, indent=2))
    else:
        print_checks(checks, usable)
    return OK if usable else PROBLEM


def print_checks(checks, usable):
    """Print the checks as text, and what they come to."""
    words = {True: "ok", False: "PROBLEM", None: "skipped"}
    rows = [(words[check["ok"]], check["check"], check["found"]) for check in checks]
    for check, line in zip(checks, format_table(rows).split("\n"), strict=True):
        print(line)
        if check["advice"]:
            print(f"    what to do: {check['advice']}")
    print()
    if usable:
        print(f"usable: {', '.join(usable)}")
    else:
        print(
            "usable: no kernel device. Programs that open the built-in one by name run "
            f"anyway: RDMAVIEW_DEVICE={FALLBACK}"
        )


def verdict(check, ok, found, advice=""):
    """Make one check's result; `ok` is None where there was nothing to check."""
    return {"check": check, "ok": ok, "found": found, "advice": advice}


def check_uverbs():
    """Check the module that every kernel device needs."""
    state = _host.module_state("ib_uverbs")
    found = f"ib_uverbs is {state}"
    if state in ("loaded", "built in"):
        return verdict("verbs module", True, found)
    return verdict("verbs module", False, found, loading_advice("ib_uverbs", state))


def check_rxe():
    """Check the module that makes a device of any network interface."""
    state = _host.module_state("rdma_rxe")
    present = _host.sysfs_devices()
    found = f"rdma_rxe (soft-RoCE) is {state}"
    if state in ("loaded", "built in"):
        return verdict("driver module", True, found)
    if present:
        return verdict(
            "driver module", True, f"{found}, not needed: {', '.join(present)} is there"
        )
    return verdict(
        "driver module",
        False,
        found,
        f"with an RDMA card, load its driver; else {loading_advice('rdma_rxe', state)}",
    )


def loading_advice(name, state):
    """Say how to get a module into the kernel."""
    advice = f"modprobe {name}, as root; in a container, on its host"
    if state == "missing":
        release = os.uname().release
        advice += (
            f". Kernel {release} has no such module in /lib/modules, as far as is seen "
            "from here: the distribution's full kernel has it (Debian: "
            "linux-image-amd64, not the cloud one)"
        )
    return advice


def check_sysfs():
    """Check the kernel's own list of devices."""
    present = _host.sysfs_devices()
    if present:
        return verdict("kernel devices", True, ", ".join(present))
    return verdict(
        "kernel devices",
        False,
        "none in /sys/class/infiniband",
        "rdma link add rxe0 type rxe netdev IFACE, as root, makes one of the network "
        "interface IFACE (rdma is in Debian's iproute2)",
    )


def check_nodes():
    """Check the files that a process opens to use a device."""
    nodes = [
        (device, f"/dev/infiniband/{node}") for device, node in _host.device_nodes()
    ]
    if not nodes:
        return verdict("device nodes", None, "no device has one")
    found = ", ".join(f"{path} ({device})" for device, path in nodes)
    troubles = [_host.node_trouble(path) for _, path in nodes]
    advice = "; ".join(trouble for trouble in troubles if trouble)
    return verdict("device nodes", not advice, found, advice)


def check_library():
    """Check that libibverbs is there, and is not too old."""
    try:
        open_library("kernel")
    except OSError as error:
        return verdict(
            "libibverbs",
            False,
            f"{kernel_path()} can't be opened",
            error_text(error),
        )
    path = _host.library_file(kernel_path()) or kernel_path()
    level, release = _host.library_versions(path)
    found = f"{path}, symbol versions up to IBVERBS_1.{level}"
    if release:
        found += f", of rdma-core {release}"
    if level < NEEDED_LEVEL:
        return verdict(
            "libibverbs",
            False,
            found,
            f"GID tables need IBVERBS_1.{NEEDED_LEVEL}: install rdma-core 32 or newer",
        )
    return verdict("libibverbs", True, found)


def check_provider(listed, trouble):
    """Check that libibverbs lists what the kernel has."""
    present = _host.sysfs_devices()
    lost = [name for name in present if name not in listed]
    if lost:
        return verdict("provider", False, f"{', '.join(lost)} isn't listed", trouble)
    if not present:
        return verdict("provider", None, "the kernel has no device to list")
    return verdict("provider", True, f"libibverbs lists {', '.join(listed)}")


def check_memlock():
    """Check how much memory may be registered."""
    soft, hard, exempt = _host.memlock()
    found = f"soft {limit_text(soft)}, hard {limit_text(hard)}"
    if exempt:
        found += ", lifted by CAP_IPC_LOCK"
    if exempt or soft is None:
        return verdict("memlock", True, found)
    return verdict(
        "memlock",
        False,
        found,
        f"registering more than {size_text(soft)} in all fails: raise it by ulimit -l, "
        "limits.conf and a new login, LimitMEMLOCK= of the service, or --ulimit "
        "memlock of the container",
    )


def limit_text(limit):
    """Write a resource limit."""
    return "unlimited" if limit is None else size_text(limit)


def check_ports(device):
    """Check that a described device opens, and has an active port and an address."""
    check = f"device {device['name']}"
    if not device["openable"]:
        return verdict(check, False, "can't be opened", device["reason"])
    ports = device["ports"]
    found = "; ".join(
        f"port {n} {state}, GID {gid}" for n, state, gid in map(port_cells, ports)
    )
    if is_usable(device):
        return verdict(check, True, found)
    return verdict(check, False, found, "; ".join(map(port_trouble, ports)))


def check_soft():
    """Check the built-in device."""
    device = describe_device(Device(FALLBACK, "soft", FALLBACK))
    if device["openable"]:
        return verdict("built-in device", True, f"{FALLBACK} opens")
    return verdict("built-in device", False, "can't be opened", device["reason"])


# rdmaview demo


def run_demo(arguments):
    """Move bytes between two threads, and print what they came to."""
    with open_demo_device(arguments.device) as ctx:
        plan = make_plan(ctx, arguments.size or default_size())
        print(
            f"device {ctx.name} ({kind_text(ctx.kind)}), {size_text(plan.size)} segment"
        )
        print()
        with Progress() as progress:
            done = play(ctx, plan, progress)
        print()
        print(closing_line(ctx, plan, done))
    return OK


def open_demo_device(name):
    """Open what the user asked for; without a kernel device, the built-in one."""
    try:
        return open_device(name)
    except DeviceNotFoundError:
        if name or os.environ.get("RDMAVIEW_DEVICE"):
            raise
    print(f"no kernel RDMA device: running on the built-in {FALLBACK}")
    return open_device(FALLBACK)


def kind_text(kind):
    """Write a device's kind."""
    return "built-in device" if kind == "soft" else "kernel device"


def default_size():
    """Choose a segment that this process may pin, with room for the peer's chunk."""
    soft, _, exempt = _host.memlock()
    if exempt or soft is None:
        return DEFAULT_SIZE
    half = 1 << max(soft // 2, 2).bit_length() - 1
    return max(min(DEFAULT_SIZE, half), 4 * KIB)


def make_plan(ctx, size):
    """Divide a segment: a half for the peer to write, a half to read, by chunks."""
    half = size // 2
    return SimpleNamespace(
        device=ctx.name,
        size=size,
        half=half,
        chunk=min(CHUNK, half // 2, ctx.port().max_msg_sz),
    )


def chunks(plan):
    """Walk through a half: offset and size of each chunk."""
    for offset in range(0, plan.half, plan.chunk):
        yield offset, min(plan.chunk, plan.half - offset)


def pattern(way, number, offset, size):
    """Make the bytes of a chunk anew, the same on both sides.

    Parameters
    ----------
    way : int
        WRITTEN or READ.
    number : int
        Of the pass.
    offset, size : int
        Of the chunk in its half.

    Returns
    -------
    numpy.ndarray
    """
    seed = f"{SEED} {way} {number} {offset}".encode()
    return np.frombuffer(hashlib.shake_128(seed).digest(size), np.uint8)


def verify(array, expected, what, offset):
    """Compare each byte.

    Raises
    ------
    VerificationError
        One is wrong.
    """
    wrong = np.flatnonzero(array != expected)
    if wrong.size:
        first = int(wrong[0])
        raise VerificationError(
            f"{wrong.size} of {array.size} bytes are wrong: byte {offset + first} of "
            f"{what} is {array[first]:#04x}, not {expected[first]:#04x}"
        )


def play(ctx, plan, progress):
    """Own a segment that a peer, in a second thread, writes and reads.

    Returns
    -------
    SimpleNamespace
        What the peer counted.
    """
    segment = np.zeros(plan.size, np.uint8)
    ours, theirs = socket.socketpair()
    with (
        ours,
        theirs,
        ctx.alloc_pd() as pd,
        ctx.create_cq(16) as cq,
        pd.reg_mr(segment, PEER_RIGHTS) as mr,
        pd.create_qp(cq) as qp,
        ThreadPoolExecutor(1) as threads,
    ):
        print_views(segment, mr, plan)
        ours.settimeout(PATIENCE)
        peer = threads.submit(run_peer, theirs, plan, progress)
        try:
            serve(ours, qp, mr, plan, progress)
        except ConnectionError:
            # The peer left early: what it raised says why.
            peer.result()
            raise
        finally:
            ours.close()
        return peer.result()


def print_views(segment, mr, plan):
    """Print a table of views, each with its value."""
    inbox, outbox = mr[: plan.half], mr[plan.half :]
    quarter = plan.half // 2
    named = [
        ("segment", mr.view()),
        ("inbox = segment[:half]", inbox),
        ("outbox = segment[half:]", outbox),
        ("inbox[quarter:]", inbox[quarter:]),
        ("outbox.subview(64, 256)", outbox.subview(64, 256)),
        ("view_of(array[:half])", mr.view_of(segment[: plan.half])),
    ]
    head = (
        "VIEW",
        "OFFSET",
        "SIZE",
        "VIRTUAL_ADDR",
        "RDMA_ADDR",
        "LKEY",
        "RKEY",
        "HASH",
    )
    rows = [
        (
            name,
            str(view.virtual_addr - mr.addr),
            str(view.size),
            f"{view.virtual_addr:#x}",
            f"{view.rdma_addr:#x}",
            f"{view.lkey:#x}",
            f"{view.rkey:#x}",
            f"{hash(view) & (1 << 64) - 1:016x}",
        )
        for name, view in named
    ]
    print(format_table([head, *rows], right=range(1, len(head) - 1)), flush=True)


def serve(wire, qp, mr, plan, progress):
    """Be the owner: fill the outbox, hand out views, verify each pass.

    Parameters
    ----------
    wire : socket.socket
        To the peer; only bytes pass.
    qp : QueuePair
    mr : MemoryRegion
    plan : SimpleNamespace
    progress : Progress
    """
    inbox, outbox = mr[: plan.half], mr[plan.half : 2 * plan.half]
    for offset, size in chunks(plan):
        outbox.subview(offset, size).array()[:] = pattern(READ, 0, offset, size)
        progress.show("filled", offset + size, plan.half)
    wire.sendall(qp.info.to_bytes())
    wire.sendall(inbox.remote().to_bytes() + outbox.remote().to_bytes())
    qp.connect(QueuePairInfo.from_bytes(receive(wire, 34)))
    # The peer may start once both ends are connected.
    wire.sendall(b"!")
    while number := receive_pass(wire):
        for offset, size in chunks(plan):
            verify(
                inbox.subview(offset, size).array(),
                pattern(WRITTEN, number, offset, size),
                "what was written",
                offset,
            )
        wire.sendall(b"!")


def receive_pass(wire):
    """Wait for the number of the pass that was written; 0 is the end."""
    return struct.unpack("!Q", receive(wire, 8))[0]


def run_peer(wire, plan, progress):
    """Be the peer, with a device, protection domain and queue pair of its own.

    Returns
    -------
    SimpleNamespace
        Passes, and seconds in which bytes moved.
    """
    staging = np.zeros(plan.chunk, np.uint8)
    with (
        wire,
        open_device(plan.device) as ctx,
        ctx.alloc_pd() as pd,
        ctx.create_cq(16) as cq,
        pd.reg_mr(staging) as mr,
        pd.create_qp(cq) as qp,
    ):
        wire.settimeout(PATIENCE)
        qp.connect(QueuePairInfo.from_bytes(receive(wire, 34)))
        inbox = RemoteView.from_bytes(receive(wire, 32))
        outbox = RemoteView.from_bytes(receive(wire, 32))
        wire.sendall(qp.info.to_bytes())
        receive(wire, 1)
        end = SimpleNamespace(qp=qp, mr=mr, plan=plan, progress=progress)
        done = SimpleNamespace(passes=0, write_seconds=0.0, read_seconds=0.0)
        start = time.monotonic()
        while done.passes == 0 or (
            done.passes < MAX_PASSES and time.monotonic() < start + TIME_BUDGET
        ):
            done.passes += 1
            done.write_seconds += write_inbox(end, inbox, done.passes)
            wire.sendall(struct.pack("!Q", done.passes))
            receive(wire, 1)
            done.read_seconds += read_outbox(end, outbox, done.passes)
        wire.sendall(struct.pack("!Q", 0))
    return done


def write_inbox(end, inbox, number):
    """Write each chunk; return the seconds that the writes took."""
    seconds = 0.0
    for offset, size in chunks(end.plan):
        local = end.mr[:size]
        local.array()[:] = pattern(WRITTEN, number, offset, size)
        seconds += timed(end.qp.write, local, inbox.subview(offset, size))
        end.progress.show(f"pass {number}: wrote", offset + size, end.plan.half)
    return seconds


def read_outbox(end, outbox, number):
    """Read and verify each chunk; return the seconds that the reads took."""
    seconds = 0.0
    for offset, size in chunks(end.plan):
        local = end.mr[:size]
        seconds += timed(end.qp.read, local, outbox.subview(offset, size))
        verify(local.array(), pattern(READ, 0, offset, size), "what was read", offset)
        end.progress.show(f"pass {number}: read", offset + size, end.plan.half)
    return seconds


def timed(move, local, remote):
    """Write or read; return the seconds that it took."""
    start = time.perf_counter()
    move(local, remote)
    return time.perf_counter() - start


def receive(wire, size):
    """Receive exactly so many bytes of the other side."""
    data = b""
    while len(data) < size:
        part = wire.recv(size - len(data))
        if not part:
            raise ConnectionError("the other side of the demo left")
        data += part
    return data


def closing_line(ctx, plan, done):
    """Say in one line what was moved, how fast, and that it was verified."""
    moved = plan.half * done.passes
    written = move_text(moved, done.write_seconds)
    read = move_text(moved, done.read_seconds)
    return (
        f"{ctx.name} ({kind_text(ctx.kind)}): wrote {written}, read {read}, in chunks "
        f"of {size_text(plan.chunk)}; all {2 * moved} bytes were verified"
    )


def move_text(size, seconds):
    """Write how much was moved, and how fast."""
    rate = size / max(seconds, 1e-9)
    return f"{size_text(size)} in {seconds:.3f} s ({size_text(rate)}/s)"


class Progress:
    """Tells on stderr how far work is that takes over a second.

    On a terminal one line is written over and over; elsewhere there is a line every
    five seconds.
    """

    def __init__(self):
        self.terminal = sys.stderr.isatty()
        self.next = time.monotonic() + 1.0
        self.width = 0

    def __enter__(self):
        """Nothing was told yet."""
        return self

    def __exit__(self, kind, error, traceback):
        """Clear the line."""
        if self.width:
            print(f"\r{'':{self.width}}\r", end="", file=sys.stderr, flush=True)

    def show(self, what, done, total):
        """Tell it, if it is time to."""
        now = time.monotonic()
        if now < self.next:
            return
        line = f"{what} {size_text(done)} of {size_text(total)}"
        if self.terminal:
            self.next = now + 0.1
            print(f"\r{line:{self.width}}", end="", file=sys.stderr, flush=True)
            self.width = len(line)
        else:
            self.next = now + 5.0
            print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
