"""Time what moves bytes on a device: ours, C's and other libraries', each in a process."""

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from report import Row

import rdmaview as rv

HERE = Path(__file__).parent
SYSTEM_PYTHON = "/usr/bin/python3"  # Debian's pyverbs is for this one


@dataclass
class Measure:
    """One operation; `per` of it are timed as one."""

    what: str
    operation: str
    size: int
    limit: float
    others: tuple
    per: int = 1


REGISTER = Measure(
    "register", "register + deregister 4 KiB", 4096, 1.25, ("ibverbs", "pyverbs")
)
WRITE = Measure("write", "8 B qp.write", 8, 1.5, ("ibverbs",))
CHAIN = Measure(
    "chain", "64 writes of 8 B by qp.writes, each", 8, 1.1, ("ibverbs",), per=64
)


def in_turn(measures, turns):
    """Call each measure in turn; the least of each, or None if it can't be taken."""
    samples = [[] for _ in measures]
    for _ in range(turns):
        for taken, measure in zip(samples, measures, strict=True):
            taken.append(measure())
    return [None if None in taken else min(taken) for taken in samples]


class Bench:
    """Runs C programs and other libraries on a device, each in its own process."""

    def __init__(self, device, rounds, library_dir):
        self.device = device
        self.has_limits = library_dir is None
        self.rounds = rounds
        self.troubles = {}
        self.environment = dict(os.environ)
        if library_dir:
            self.environment["LD_LIBRARY_PATH"] = library_dir
        with rv.open(device) as ctx, ctx.alloc_pd() as pd, ctx.create_cq(4) as cq:
            with pd.create_qp(cq) as qp:
                self.gid_index = qp.gid.index if qp.gid else 0

    def rows(self, measures, turns):
        """The rows of each operation."""
        return [row for measure in measures for row in self.compare(measure, turns)]

    def compare(self, measure, turns):
        """Ours beside C, and beside what other libraries there are."""
        self.troubles.clear()
        what, size = measure.what, measure.size
        ours, c, *others = in_turn(
            [
                lambda: self.peer(sys.executable, "rdmaview", what, size),
                lambda: self.c_program(what, size),
                lambda: self.peer(sys.executable, "ibverbs", what, size),
                lambda: self.peer(SYSTEM_PYTHON, "pyverbs", what, size),
            ][: 2 + len(measure.others)],
            turns,
        )
        operation = f"{measure.operation} on {self.device}"
        if ours is None:
            raise SystemExit(f"{operation}: {self.troubles['rdmaview']}")
        ours, c, *others = (
            ns if ns is None else ns / measure.per for ns in (ours, c, *others)
        )
        # Where registering is a table entry and no system call, a limit says little.
        limit = measure.limit if self.has_limits else None
        rows = [Row(operation, ours, "C", c, limit, note=self.troubles.get("C", ""))]
        for library, theirs in zip(measure.others, others, strict=True):
            note = self.troubles.get(library, "")
            rows.append(Row(operation, ours, library, theirs, note=note))
        return rows

    def peer(self, python, library, what, size):
        """Time another library; see peers.py."""
        numbers = (size, self.gid_index, self.rounds)
        script = (python, HERE / "peers.py")
        return self.run(library, *script, library, what, self.device, *numbers)

    def c_program(self, what, size):
        """Time a program of benchmarks/c."""
        programs = HERE / "c" / "bin"
        if what == "register":
            numbers = (size, self.rounds)
            return self.run("C", programs / "reg_mr", self.device, *numbers)
        numbers = (self.gid_index, self.rounds, size)
        way = 2 if what == "chain" else 0
        each = self.run("C", programs / "rdma_write", self.device, *numbers, line=way)
        return each * CHAIN.per if each and way else each

    def run(self, name, *command, line=0):
        """Return a median that a command prints, or None, and keep what it said."""
        done = subprocess.run(
            [str(part) for part in command],
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return json.loads(done.stdout.splitlines()[line])["median_ns"]
        said = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        if "No module named" in said[-1]:
            said = ["not installed"]
        self.troubles[name] = f"{name}: {said[-1]}"
        return None


def device_rows(device, measures, is_quick):
    """Run on a device; the built-in one takes the place of libibverbs for programs."""
    rounds, turns = (200, 3) if is_quick else (1000, 7)
    subprocess.run(["make", "-s", "-C", HERE / "c"], check=True)
    kinds = {found.name: found.kind for found in rv.devices()}
    if kinds.get(device) != "soft":
        return Bench(device, rounds, None).rows(measures, turns)
    with tempfile.TemporaryDirectory() as directory:
        os.symlink(rv.softverbs.path(), Path(directory, "libibverbs.so.1"))
        return Bench(device, rounds, directory).rows(measures, turns)


def usable_device():
    """The kernel device that rdmaview would open by itself, or None."""
    try:
        with rv.open() as ctx:
            return ctx.name
    except OSError:
        return None
