"""The `rdmaview` command."""

import errno
import json
import os
import re
import resource
import subprocess
import sys
from types import SimpleNamespace

import pytest

import rdmaview as rv
from rdmaview import _host, cli

# Its own queue pair, in a thread of its own, is at work in each demo.
DEMO_SIZE = "64K"


@pytest.fixture(autouse=True)
def no_device_asked_for(monkeypatch):
    monkeypatch.delenv("RDMAVIEW_DEVICE", raising=False)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(cli, "TIME_BUDGET", 0.0)


@pytest.fixture
def no_kernel_device(monkeypatch, tmp_path):
    """As on a machine without RDMA: libibverbs and the doctor look into sysfs."""
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path))
    monkeypatch.setattr(cli, "list_devices", lambda kind: ([], "The kernel has none."))
    devices = [device for device in rv.devices() if device.kind == "soft"]
    monkeypatch.setattr(cli, "all_devices", lambda: devices)


def only_line(text):
    (line,) = text.splitlines()
    return line


# The command line


@pytest.mark.no_device
@pytest.mark.parametrize("module", ["rdmaview", "rdmaview.cli"])
def test_it_runs_as_a_module(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == rv.__version__


@pytest.mark.no_device
@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["frobnicate"],
        ["devices", "soft0"],
        ["demo", "--size", "many"],
        ["demo", "--size", "-1"],
        ["demo", "--size", "K"],
        ["demo", "--size", "8KM"],
        ["demo", "--size", "1023"],
    ],
)
def test_a_wrong_command_line_is_told_in_one_line(argv, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert only_line(err).startswith("rdmaview")


@pytest.mark.no_device
@pytest.mark.parametrize("command", ["doctor", "demo"])
def test_help_tells_the_exit_status(command, capsys):
    with pytest.raises(SystemExit) as left:
        cli.main([command, "--help"])
    assert left.value.code == 0
    assert "Exit status: 0 if" in capsys.readouterr().out


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("text", "size"),
    [("1024", 1024), ("4k", 4096), ("8M", 8 << 20), ("2G", 2 << 30)],
)
def test_sizes_are_read(text, size):
    assert cli.parse_size(text) == size


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 << 19, "1.5 MiB")],
)
def test_sizes_are_written(size, text):
    assert cli.size_text(size) == text


# rdmaview devices


def test_devices_has_a_row_for_each_device(device_name, capsys):
    assert cli.main(["devices"]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:4] == ["NAME", "KIND", "PORT", "STATE"]
    (row,) = [row for row in rows if row.split()[0] == device_name]
    assert "ACTIVE" in row
    assert row.endswith("yes")
    with rv.open(device_name) as ctx:
        assert _host.routable_gid(ctx.gids()).address in row


def test_devices_gives_json(device_name, capsys):
    assert cli.main(["devices", "--json"]) == 0
    found = {told["name"]: told for told in json.loads(capsys.readouterr().out)}
    assert [*found] == [device.name for device in rv.devices()]
    told = found[device_name]
    assert (told["openable"], told["reason"]) == (True, "")
    (port,) = told["ports"]
    with rv.open(device_name) as ctx:
        assert told["kind"] == ctx.kind
        assert port["state"] == ctx.port().state
        assert port["gid"]["address"] == _host.routable_gid(ctx.gids()).address


@pytest.mark.soft_only("a failure is injected")
def test_devices_says_why_one_cannot_be_opened(device_name, capsys, monkeypatch):
    device = SimpleNamespace(name=device_name, kind="soft", node="")
    monkeypatch.setattr(cli, "all_devices", lambda: [device])
    rv.softverbs.fail("open_device", errno.EACCES)
    assert cli.main(["devices"]) == 0
    assert re.search(r"no: ibv_open_device: Permission denied", capsys.readouterr().out)


def test_devices_points_to_the_doctor(device_name, no_kernel_device, capsys):
    assert cli.main(["devices"]) == 0
    assert "doctor" in only_line(capsys.readouterr().err)


# rdmaview doctor


def doctor(capsys):
    """Run it; return its exit status, the usable devices, and the checks by name."""
    status = cli.main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    return status, told["usable"], {check["check"]: check for check in told["checks"]}


def test_doctor_finds_the_device_usable(device_name, is_soft, capsys):
    status, usable, checks = doctor(capsys)
    assert status == (0 if usable else 1)
    assert checks["built-in device"]["ok"]
    if not is_soft:
        assert device_name in usable
        assert checks[f"device {device_name}"]["ok"]
        assert checks["verbs module"]["ok"]
        assert device_name in checks["kernel devices"]["found"]
        assert device_name in checks["device nodes"]["found"]
        assert device_name in checks["provider"]["found"]
        assert "/libibverbs.so" in checks["libibverbs"]["found"]


def test_doctor_says_what_to_do_about_each_problem(
    device_name, no_kernel_device, capsys
):
    status, usable, checks = doctor(capsys)
    assert (status, usable) == (1, [])
    assert not checks["kernel devices"]["ok"]
    assert "rdma link add" in checks["kernel devices"]["advice"]
    assert checks["device nodes"]["ok"] is None
    assert checks["provider"]["ok"] is None
    for check in checks.values():
        assert (check["ok"] is False) == bool(check["advice"])


def test_doctor_prints_text(device_name, no_kernel_device, capsys):
    assert cli.main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"^PROBLEM +kernel devices .*\n +what to do: ", out, re.MULTILINE)
    assert out.splitlines()[-1].startswith("usable: no kernel device")


@pytest.mark.no_device
@pytest.mark.parametrize("state", ["loaded", "built in", "available", "missing"])
def test_doctor_tells_the_states_of_a_module_apart(state, monkeypatch):
    monkeypatch.setattr(_host, "module_state", lambda name: state)
    check = cli.check_uverbs()
    assert state in check["found"]
    assert check["ok"] == (state in ("loaded", "built in"))
    assert ("modprobe ib_uverbs" in check["advice"]) == (not check["ok"])
    assert ("linux-image-amd64" in check["advice"]) == (state == "missing")


@pytest.mark.no_device
def test_doctor_asks_for_no_rxe_beside_another_device(monkeypatch):
    monkeypatch.setattr(_host, "module_state", lambda name: "missing")
    monkeypatch.setattr(_host, "sysfs_devices", lambda: ["mlx5_0"])
    assert cli.check_rxe()["ok"]
    monkeypatch.setattr(_host, "sysfs_devices", lambda: [])
    assert "modprobe rdma_rxe" in cli.check_rxe()["advice"]


@pytest.mark.no_device
def test_doctor_names_a_missing_node(monkeypatch):
    monkeypatch.setattr(_host, "device_nodes", lambda: [("mlx5_0", "uverbs77")])
    check = cli.check_nodes()
    assert check["ok"] is False
    assert "/dev/infiniband/uverbs77 is missing" in check["advice"]


@pytest.mark.no_device
def test_a_node_without_permission_is_told_with_its_mode(tmp_path):
    node = tmp_path / "uverbs0"
    node.touch(0o600)
    assert _host.node_trouble(str(node)) == ""
    trouble = _host.node_trouble(str(node), errno.EACCES)
    assert "-rw-------" in trouble


@pytest.mark.no_device
def test_nodes_are_found_in_sysfs(monkeypatch, tmp_path):
    folder = tmp_path / "class" / "infiniband_verbs"
    (folder / "uverbs0").mkdir(parents=True)
    (folder / "uverbs0" / "ibdev").write_text("rxe0\n")
    (folder / "abi_version").write_text("6\n")
    monkeypatch.setenv("SYSFS_PATH", str(tmp_path))
    assert _host.device_nodes() == [("rxe0", "uverbs0")]


@pytest.mark.no_device
def test_doctor_names_a_missing_libibverbs(monkeypatch, tmp_path):
    missing = str(tmp_path / "libibverbs.so.1")
    monkeypatch.setenv("RDMAVIEW_LIBIBVERBS", missing)
    check = cli.check_library()
    assert check["ok"] is False
    assert missing in check["found"]
    assert "libibverbs1" in check["advice"]


@pytest.mark.no_device
def test_doctor_tells_an_old_libibverbs(monkeypatch):
    monkeypatch.setattr(cli, "open_library", lambda kind: None)
    monkeypatch.setattr(_host, "library_versions", lambda path: (9, "28.0"))
    check = cli.check_library()
    assert check["ok"] is False
    assert "IBVERBS_1.9, of rdma-core 28.0" in check["found"]


@pytest.mark.no_device
def test_versions_are_read_from_the_library(tmp_path):
    library = tmp_path / "libibverbs.so.1.14.44.0"
    library.write_bytes(
        b"\0IBVERBS_1.0\0IBVERBS_1.14\0IBVERBS_1.8\0IBVERBS_PRIVATE_34\0"
    )
    assert _host.library_versions(str(library)) == (14, "44.0")
    assert _host.library_versions(str(tmp_path / "none.so")) == (0, "")


def test_the_file_of_a_loaded_library_is_found(ctx):
    assert _host.library_file(rv.softverbs.path()) == os.path.realpath(
        rv.softverbs.path()
    )
    assert _host.library_file("libnowhere.so.1") == ""


@pytest.mark.no_device
def test_doctor_names_a_missing_provider(monkeypatch):
    monkeypatch.setattr(_host, "sysfs_devices", lambda: ["mlx5_0", "rxe0"])
    check = cli.check_provider(["rxe0"], _host.kernel_trouble(["rxe0"], 0))
    assert check["ok"] is False
    assert "mlx5_0" in check["found"]
    assert "ibverbs-providers" in check["advice"]


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("memlock", "ok"),
    [
        ((8 << 20, None, False), False),
        ((8 << 20, None, True), True),
        ((None, None, False), True),
    ],
)
def test_doctor_tells_a_memlock_limit(memlock, ok, monkeypatch):
    monkeypatch.setattr(_host, "memlock", lambda: memlock)
    check = cli.check_memlock()
    assert check["ok"] == ok
    assert ("8 MiB" in check["advice"]) == (not ok)


def describe(state="ACTIVE", gid="::ffff:10.0.0.1", link_layer="Ethernet"):
    port = {
        "port": 1,
        "state": state,
        "link_layer": link_layer,
        "gid": gid and {"index": 1, "type": "RoCE v2", "address": gid},
    }
    return {"name": "rxe7", "openable": True, "reason": "", "ports": [port]}


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("device", "advice"),
    [
        (describe(), ""),
        (describe(link_layer="InfiniBand", gid=None), ""),
        (describe(state="DOWN"), "ip link set"),
        (describe(gid=None), "ip addr add"),
        (
            {"name": "rxe7", "openable": False, "reason": "not today", "ports": []},
            "not today",
        ),
    ],
)
def test_doctor_looks_at_ports_and_addresses(device, advice):
    check = cli.check_ports(device)
    assert check["ok"] == cli.is_usable(device) == (not advice)
    assert advice in check["advice"]


# rdmaview demo


def run_demo(capsys, *argv):
    """Run it; return its exit status and what it printed."""
    status = cli.main(["demo", *argv])
    return status, *capsys.readouterr()


def test_demo_moves_and_verifies_bytes(device_name, is_soft, quick, capsys):
    status, out, _ = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 0
    *_, last = out.splitlines()
    kind = "built-in" if is_soft else "kernel"
    assert last.startswith(f"{device_name} ({kind} device): wrote 32 KiB in ")
    assert last.endswith("all 65536 bytes were verified")


def test_demo_shows_views_with_their_values(device_name, quick, capsys):
    _, out, _ = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    rows = {
        name: fields.split()
        for name, fields in re.findall(r"^(\w+.*?)  +(\d+  .*)$", out, re.MULTILINE)
    }
    assert len(rows) == 6
    segment, outbox = rows["segment"], rows["outbox = segment[half:]"]
    assert segment[:2] == ["0", "65536"]
    assert outbox[:2] == ["32768", "32768"]
    assert int(outbox[2], 16) - int(segment[2], 16) == 32768
    assert int(outbox[3], 16) - int(segment[3], 16) == 32768
    assert {tuple(row[4:6]) for row in rows.values()} == {tuple(segment[4:6])}
    same = rows["inbox = segment[:half]"]
    assert rows["view_of(array[:half])"] == same
    assert len({row[6] for row in rows.values()}) == 5


@pytest.mark.parametrize("size", ["1024", "1025", "100001"])
def test_demo_takes_sizes_that_do_not_divide(device_name, quick, capsys, size):
    status, out, _ = run_demo(capsys, "--device", device_name, "--size", size)
    assert status == 0
    assert f"all {int(size) // 2 * 2} bytes were verified" in out


def test_demo_makes_passes_while_there_is_time(device_name, capsys, monkeypatch):
    monkeypatch.setattr(cli, "TIME_BUDGET", 60.0)
    monkeypatch.setattr(cli, "MAX_PASSES", 3)
    status, out, _ = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 0
    assert f"all {3 * 65536} bytes were verified" in out


@pytest.mark.parametrize(("verb", "told"), [("write", "written"), ("read", "read")])
def test_demo_notices_a_wrong_byte(device_name, quick, capsys, monkeypatch, verb, told):
    timed = cli.timed

    def corrupt(move, local, remote):
        if move.__name__ == verb == "write":
            local.array()[7] ^= 0x40
        seconds = timed(move, local, remote)
        if move.__name__ == verb == "read":
            local.array()[7] ^= 0x40
        return seconds

    monkeypatch.setattr(cli, "timed", corrupt)
    status, out, err = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 1
    assert "verified" not in out
    assert re.match(
        rf"rdmaview: NOT VERIFIED: 1 of \d+ bytes are wrong: byte 7 of what was {told}",
        only_line(err),
    )


def test_demo_notices_a_chunk_that_never_came(device_name, quick, capsys, monkeypatch):
    monkeypatch.setattr(cli, "timed", lambda move, local, remote: 0.0)
    status, _, err = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 1
    assert "NOT VERIFIED" in err


@pytest.mark.soft_only("a failure is injected")
@pytest.mark.parametrize("verb", ["reg_mr", "create_qp", "modify_qp", "post_send"])
@pytest.mark.parametrize("times", [1, 100])
def test_demo_tells_what_failed_on_either_side(
    device_name, quick, capsys, counters, verb, times
):
    rv.softverbs.fail(verb, errno.ENOMEM, times)
    status, _, err = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 2
    assert f"ibv_{verb}: Cannot allocate memory" in only_line(err)
    assert not [name for name in counters() if name.startswith("live_")]


def test_demo_tells_why_the_peer_left(device_name, quick, capsys, monkeypatch):
    opened = []

    def open_once(name=None):
        opened.append(name)
        if len(opened) > 1:
            raise OSError(errno.EMFILE, "no more contexts")
        return rv.open(name)

    monkeypatch.setattr(cli, "open_device", open_once)
    status, _, err = run_demo(capsys, "--device", device_name, "--size", DEMO_SIZE)
    assert status == 2
    assert only_line(err) == "rdmaview: no more contexts"


@pytest.mark.no_device
def test_demo_of_an_unknown_device_is_an_error(capsys):
    status, out, err = run_demo(capsys, "--device", "nowhere7")
    assert (status, out) == (2, "")
    assert "no device is named 'nowhere7'" in only_line(err)


@pytest.mark.no_device
def test_demo_never_leaves_the_device_that_the_environment_names(capsys, monkeypatch):
    monkeypatch.setenv("RDMAVIEW_DEVICE", "nowhere7")
    status, _, err = run_demo(capsys)
    assert status == 2
    assert "nowhere7" in only_line(err)


def test_demo_says_that_it_falls_to_the_soft_device(
    device_name, no_kernel_device, quick, capsys, monkeypatch
):
    def open_device(name=None):
        if name is None:
            raise rv.DeviceNotFoundError("none")
        return rv.open(name)

    monkeypatch.setattr(cli, "open_device", open_device)
    status, out, _ = run_demo(capsys, "--size", DEMO_SIZE)
    assert status == 0
    assert out.startswith("no kernel RDMA device: running on the built-in soft0\n")


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("memlock", "size"),
    [
        ((64 << 10, None, True), cli.DEFAULT_SIZE),
        ((None, None, False), cli.DEFAULT_SIZE),
        ((8 << 20, None, False), 4 << 20),
        ((64 << 10, None, False), 32 << 10),
        ((0, None, False), 4 << 10),
    ],
)
def test_the_default_size_fits_the_memlock_limit(memlock, size, monkeypatch):
    monkeypatch.setattr(_host, "memlock", lambda: memlock)
    assert cli.default_size() == size


def test_demo_runs_under_a_memlock_limit(device_name):
    """Without CAP_IPC_LOCK: as any user but root."""
    limit = 1 << 20
    script = (
        "import ctypes, os, sys; from rdmaview import cli\n"
        "libc = ctypes.CDLL(None)\n"
        # Of version 3; 14 is CAP_IPC_LOCK.
        "header = (ctypes.c_uint32 * 2)(0x20080522, 0)\n"
        "caps = (ctypes.c_uint32 * 6)()\n"
        "assert libc.capget(header, caps) == 0\n"
        "caps[0] &= ~(1 << 14)\n"
        "assert libc.capset(header, caps) == 0\n"
        f"sys.exit(cli.main(['demo', '--device', {device_name!r}]))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(
            resource.RLIMIT_MEMLOCK,
            (limit, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]),
        ),
    )
    assert done.returncode == 0, done.stderr
    assert "bytes were verified" in done.stdout


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still until it is set."""
    clock = SimpleNamespace(now=1000.0)
    monkeypatch.setattr(cli.time, "monotonic", lambda: clock.now)
    return clock


@pytest.mark.no_device
def test_progress_is_silent_for_a_second(clock, capsys):
    with cli.Progress() as progress:
        clock.now += 0.9
        progress.show("wrote", 1, 2)
    assert capsys.readouterr().err == ""


@pytest.mark.no_device
def test_progress_is_a_line_now_and_then_without_a_terminal(clock, capsys):
    with cli.Progress() as progress:
        for number in range(100):
            clock.now += 0.1
            progress.show("wrote", number, 100)
    lines = capsys.readouterr().err.splitlines()
    assert 2 <= len(lines) <= 3
    assert re.fullmatch(r"wrote \d+ B of 100 B", lines[0])


@pytest.mark.no_device
def test_progress_on_a_terminal_is_one_line_that_goes(clock, capsys, monkeypatch):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with cli.Progress() as progress:
        for number in range(100):
            clock.now += 0.1
            progress.show("wrote", number, 100)
    err = capsys.readouterr().err
    assert "\n" not in err
    assert err.endswith(" \r")
    assert "\rwrote 99 B of 100 B" in err
