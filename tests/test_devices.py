"""Which devices there are, which one is taken, and why one can't be used."""

import errno
import ipaddress
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest
from helpers import run_python

import rdmaview as rv
from rdmaview import _host

FAKE_SOURCE = Path(__file__).parent / "c" / "fake_verbs.c"
LACKS = {
    "all": "",
    "no iova2": "REG_MR_IOVA2",
    "no iova": "REG_MR_IOVA2 REG_MR_IOVA",
    "no gid table": "GID_TABLE",
    "no fork status": "FORK_STATUS",
    "no reg_mr": "REG_MR",
}


@pytest.fixture(scope="session")
def fakes(tmp_path_factory):
    """Compile a libibverbs that lacks some symbols; give its path."""
    folder = tmp_path_factory.mktemp("fakes")
    compiler = shutil.which("cc") or sysconfig.get_config_var("CC").split()[0]
    built = {}

    def build(kind):
        if kind not in built:
            path = folder / f"libfake{len(built)}.so.1"
            subprocess.run(
                [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
                + [f"-DLACKS_{symbol}" for symbol in LACKS[kind].split()]
                + ["-o", path, FAKE_SOURCE],
                check=True,
            )
            built[kind] = path
        return built[kind]

    return build


@pytest.fixture
def with_fake(fakes, tmp_path):
    """Run a program on a fake libibverbs, and on a sysfs that has these devices."""

    def run(code, kind="all", sysfs=(), library=None, **environment):
        for name in sysfs:
            (tmp_path / "class" / "infiniband" / name).mkdir(parents=True)
        environment = {"RDMAVIEW_DEVICE": ""} | {
            name: str(value) for name, value in environment.items()
        }
        done = run_python(
            code,
            RDMAVIEW_LIBIBVERBS=str(library or fakes(kind)),
            SYSFS_PATH=str(tmp_path),
            **environment,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout.strip()

    return run


SAY_ERROR = """
    import rdmaview as rv
    try:
        {call}
    except OSError as error:
        print(type(error).__name__, error)
    else:
        print("no error")
"""
OPEN_ANY = SAY_ERROR.format(call="rv.open()")
LIST = """
    import rdmaview as rv
    for device in rv.devices():
        print(device.name, device.kind, device.openable, device.reason)
"""


# ---- the device under test ----


def test_the_device_is_listed_with_its_kind(device_name, is_soft):
    (device,) = [device for device in rv.devices() if device.name == device_name]
    assert device.kind == ("soft" if is_soft else "kernel")
    assert device.openable
    assert device.reason == ""
    assert device_name in repr(device)
    assert device.kind in repr(device)


def test_the_built_in_devices_are_listed_last(device_name):
    kinds = [device.kind for device in rv.devices()]
    assert kinds == sorted(kinds)
    assert [d.name for d in rv.devices() if d.kind == "soft"] == ["soft0", "soft1"]


@pytest.mark.soft_only(reason="counts calls")
def test_listing_opens_no_device(counters):
    rv.devices()
    assert set(counters()) == {"get_device_list"}


def test_an_open_device_says_what_it_is(ctx, device_name, is_soft):
    assert ctx.name == device_name
    assert ctx.kind == ("soft" if is_soft else "kernel")
    assert device_name in repr(ctx) and ctx.kind in repr(ctx)


def test_a_device_may_be_opened_twice(device_name):
    with rv.open(device_name) as first, rv.open(device_name) as second:
        assert first is not second
        with first.alloc_pd() as pd, pd.reg_mr(bytearray(64)):
            assert (first.mr_count, second.mr_count) == (1, 0)


def test_attributes_are_named_as_in_the_manual(ctx, is_soft):
    attributes = ctx.attributes
    for name in "max_mr", "max_mr_size", "max_qp", "max_qp_wr", "max_cq", "max_cqe":
        assert getattr(attributes, name) > 0
    assert attributes.phys_port_cnt >= 1
    assert attributes.node_guid != 0
    assert attributes.max_mr_size >= 1 << 30
    assert isinstance(attributes.fw_ver, str)
    assert not is_soft or "soft" in attributes.fw_ver


@pytest.mark.soft_only(reason="sets limits")
def test_attributes_are_asked_for_anew(ctx):
    rv.softverbs.configure(max_mr=77, max_qp_wr=99)
    assert (ctx.attributes.max_mr, ctx.attributes.max_qp_wr) == (77, 99)
    rv.softverbs.reset()
    assert ctx.attributes.max_mr != 77


def test_a_port_is_active_and_moves_something(ctx):
    port = ctx.port(1)
    assert port == ctx.port()
    assert port.state == "ACTIVE"
    assert port.link_layer == "Ethernet"
    assert port.max_msg_sz >= 1 << 20
    assert 256 <= port.active_mtu <= port.max_mtu <= 4096
    assert port.gid_tbl_len > 0


def test_gids_are_read_with_index_type_and_address(ctx):
    table = ctx.gids()
    assert table
    assert [entry.index for entry in table] == sorted({e.index for e in table})
    for entry in table:
        assert entry.type in ("IB", "RoCE v1", "RoCE v2")
        assert len(entry.raw) == 16 and any(entry.raw)
        assert ipaddress.IPv6Address(entry.address).packed == entry.raw


def test_the_gid_that_is_chosen_can_be_routed(ctx, pd, cq):
    with pd.create_qp(cq) as qp:
        assert qp.gid in ctx.gids()
        assert qp.gid.type == "RoCE v2"
        assert not ipaddress.IPv6Address(qp.gid.address).is_link_local
        assert qp.info.gid == qp.gid.raw


def test_another_gid_is_taken_where_it_is_asked_for(ctx, pd, cq):
    for entry in ctx.gids():
        with pd.create_qp(cq, gid_index=entry.index) as qp:
            assert qp.gid == entry


def test_an_unknown_name_is_told_with_those_that_there_are(device_name):
    with pytest.raises(rv.DeviceNotFoundError) as refusal:
        rv.open("no_such_device")
    assert refusal.value.errno == errno.ENODEV
    for value in ("'no_such_device'", device_name, "soft0", "soft1"):
        assert value in str(refusal.value)


def test_the_environment_names_the_default(device_name, monkeypatch):
    monkeypatch.setenv("RDMAVIEW_DEVICE", device_name)
    with rv.open() as ctx:
        assert ctx.name == device_name
    monkeypatch.setenv("RDMAVIEW_DEVICE", "no_such_device")
    with pytest.raises(rv.DeviceNotFoundError, match="no_such_device"):
        rv.open()


def test_the_built_in_device_is_not_taken_unasked(is_soft, monkeypatch):
    monkeypatch.delenv("RDMAVIEW_DEVICE", raising=False)
    if not is_soft:
        with rv.open() as ctx:
            assert ctx.kind == "kernel"
        return
    if any(device.kind == "kernel" for device in rv.devices()):
        pytest.skip("this machine has an RDMA device")
    with pytest.raises(rv.DeviceNotFoundError) as refusal:
        rv.open()
    for value in ('open("soft0")', "RDMAVIEW_DEVICE=soft0", "rdma link add rxe0"):
        assert value in str(refusal.value)


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("error", [errno.EACCES, errno.ENODEV])
def test_a_device_that_cannot_be_opened_is_listed_with_the_reason(error, device_name):
    rv.softverbs.fail("open_device", error)
    (device,) = [device for device in rv.devices() if device.name == device_name]
    assert not device.openable
    for value in ("ibv_open_device", os.strerror(error), device_name):
        assert value in device.reason
    # It is asked once: the list is what it was at that time.
    assert not device.openable
    rv.open(device_name).close()


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("error", [errno.EACCES, errno.ENODEV])
def test_opening_by_name_says_why_it_failed(error, device_name):
    rv.softverbs.fail("open_device", error)
    with pytest.raises(rv.VerbsError) as refusal:
        rv.open(device_name)
    assert refusal.value.errno == error
    assert device_name in str(refusal.value)


# ---- libibverbs: missing, foreign, old ----


MISSING = "/nonexistent/libibverbs.so.1"


@pytest.mark.no_device
def test_without_libibverbs_everything_but_kernel_devices_works(with_fake):
    assert (
        with_fake(
            """
    import pickle
    import rdmaview as rv

    print(*[device.name for device in rv.devices()])
    view = rv.MemoryRegionView(1, 4096, 0, 64, 5, 6)
    assert pickle.loads(pickle.dumps(view[8:16])) == view[8:16]
    assert rv.RemoteView.from_bytes(view.remote().to_bytes()) == view.remote()
    with rv.open("soft0") as ctx, ctx.alloc_pd() as pd, pd.reg_mr(bytearray(8)) as mr:
        print(mr[:].size)
            """,
            library=MISSING,
        )
        == "soft0 soft1\n8"
    )


@pytest.mark.no_device
@pytest.mark.parametrize("name", ["", "'rxe0'"], ids=["any", "by name"])
def test_without_libibverbs_an_error_names_it_and_its_package(name, with_fake):
    text = with_fake(SAY_ERROR.format(call=f"rv.open({name})"), library=MISSING)
    assert text.startswith("DeviceNotFoundError")
    for value in (MISSING, "libibverbs1", "ibverbs-providers"):
        assert value in text


@pytest.mark.no_device
def test_a_library_that_is_no_libibverbs_is_told_by_what_it_lacks(with_fake):
    text = with_fake(OPEN_ANY, kind="no reg_mr")
    assert re.search(r"libfake\d+\.so\.1 lacks ibv_reg_mr: it is no libibverbs", text)


@pytest.mark.no_device
def test_a_file_that_is_no_library_is_told(with_fake, tmp_path):
    path = tmp_path / "libibverbs.so.1"
    path.write_text("not a library")
    text = with_fake(OPEN_ANY, library=path)
    assert str(path) in text
    assert text.startswith("DeviceNotFoundError")


REGISTER = """
    import mmap
    import rdmaview as rv
    from helpers import mapping

    ALL = rv.Access.LOCAL_WRITE | rv.Access.REMOTE_READ | rv.Access.RELAXED_ORDERING
    CALLS = {1: "reg_mr", 2: "reg_mr_iova", 3: "reg_mr_iova2"}

    with mapping(4096) as address, rv.open("fake0") as ctx, ctx.alloc_pd() as pd:
        for iova in None, 0:
            try:
                with pd.reg_mr_address(address, 4096, ALL, iova=iova) as mr:
                    print(CALLS[mr.lkey], hex(mr.rkey), hex(mr.access))
            except rv.VerbsError as error:
                print(error.errno, error)
"""


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("all", ["reg_mr_iova2 0x100005 0x100005", "reg_mr_iova2 0x100005 0x100005"]),
        # What these do not know is an optional right, which they may be spared.
        ("no iova2", ["reg_mr 0x5 0x100005", "reg_mr_iova 0x5 0x100005"]),
    ],
)
def test_the_newest_call_that_a_library_has_registers(kind, calls, with_fake):
    assert with_fake(REGISTER, kind=kind).splitlines() == calls


@pytest.mark.no_device
def test_an_old_library_registers_what_it_can_and_says_what_it_lacks(with_fake):
    first, second = with_fake(REGISTER, kind="no iova").splitlines()
    assert first == "reg_mr 0x5 0x100005"
    assert second.startswith(f"{errno.EOPNOTSUPP} ")
    for value in ("ibv_reg_mr_iova2", "ibv_reg_mr_iova,", "rdma-core 28", "libfake"):
        assert value in second


@pytest.mark.no_device
def test_a_library_without_gid_tables_is_told_when_one_is_asked_for(with_fake):
    text = with_fake(
        SAY_ERROR.format(call="rv.open('fake0').__enter__().gids()"),
        kind="no gid table",
    )
    assert text.startswith("VerbsError")
    for value in ("ibv_query_gid_table", "rdma-core 32"):
        assert value in text


# ---- P40: some devices can't be opened ----


@pytest.mark.no_device
def test_the_default_is_the_first_device_that_can_be_opened(with_fake):
    code = """
    import rdmaview as rv
    with rv.open() as ctx:
        print(ctx.name)
    """
    assert with_fake(code, FAKE_OPEN="13,19,0") == "fake2"
    assert with_fake(code, FAKE_STATES="1,2,4") == "fake2"
    assert with_fake(code) == "fake0"


@pytest.mark.no_device
def test_each_device_is_listed_with_why_it_cannot_be_opened(with_fake):
    lines = with_fake(LIST, FAKE_OPEN="13,19,0").splitlines()
    assert [line.split()[:3] for line in lines] == [
        ["fake0", "kernel", "False"],
        ["fake1", "kernel", "False"],
        ["fake2", "kernel", "True"],
        ["soft0", "soft", "True"],
        ["soft1", "soft", "True"],
    ]
    assert "Permission denied" in lines[0]
    assert "No such device" in lines[1]
    assert "/dev/infiniband/uverbs91 is missing" in lines[1]


@pytest.mark.no_device
def test_a_bad_device_by_name_says_errno_and_the_missing_node(with_fake):
    text = with_fake(SAY_ERROR.format(call="rv.open('fake0')"), FAKE_OPEN="2")
    assert text.startswith("VerbsError [Errno 2] ibv_open_device")
    assert "fake0" in text
    assert "/dev/infiniband/uverbs90 is missing" in text
    assert "ib_uverbs" in text and "--device=" in text


@pytest.mark.no_device
def test_if_none_can_be_used_each_says_why(with_fake):
    text = with_fake(OPEN_ANY, FAKE_OPEN="13,0,0", FAKE_STATES="4,1,1")
    assert text.startswith("DeviceNotFoundError")
    assert re.search("fake0: .*Permission denied", text)
    assert "fake1: no port is active" in text
    assert "fake2: no port is active" in text


@pytest.mark.no_device
def test_a_missing_node_and_one_without_permission_are_told_apart(tmp_path):
    node = tmp_path / "uverbs0"
    missing = _host.node_trouble(str(node), errno.ENOENT)
    assert f"{node} is missing" in missing
    assert f"--device={node}" in missing
    node.touch(0o600)
    assert _host.node_trouble(str(node)) == ""
    denied = _host.node_trouble(str(node), errno.EACCES)
    assert f"No permission for {node} (-rw-------)" in denied
    assert "group" in denied and "udev" in denied
    assert "is missing" not in denied
    assert _host.node_trouble(str(node), errno.EPERM) == denied


# ---- P42: the kernel has devices and verbs has none ----


@pytest.mark.no_device
def test_a_missing_provider_is_told_by_the_devices_that_it_would_show(with_fake):
    text = with_fake(OPEN_ANY, FAKE_DEVICES=0, sysfs=["rxe0", "mlx5_0"])
    assert text.startswith("DeviceNotFoundError")
    assert "mlx5_0, rxe0" in text
    for value in ("provider", "ABI", "ibverbs-providers"):
        assert value in text
    assert "modprobe rdma_rxe" not in text


@pytest.mark.no_device
def test_a_provider_that_is_missing_for_one_device_is_told(with_fake):
    text = with_fake(
        SAY_ERROR.format(call="rv.open('mlx5_0')"), sysfs=["mlx5_0", "fake0"]
    )
    assert "The kernel has mlx5_0 " in text
    assert "fake0" in text


@pytest.mark.no_device
@pytest.mark.parametrize("environment", [{"FAKE_DEVICES": 0}, {"FAKE_DEVICES": -1}])
def test_a_kernel_without_devices_is_told_with_how_to_make_one(environment, with_fake):
    text = with_fake(OPEN_ANY, **environment)
    assert text.startswith("DeviceNotFoundError")
    assert "The kernel has no RDMA device" in text
    assert "modprobe rdma_rxe" in text
    assert "provider package" not in text


@pytest.mark.no_device
def test_a_list_that_fails_for_another_reason_says_it(with_fake):
    text = with_fake(OPEN_ANY, FAKE_DEVICES=-1, FAKE_LIST=errno.EPERM, sysfs=["rxe0"])
    assert text.startswith("DeviceNotFoundError")
    assert "rxe0" in text


# ---- P15: fork support ----


FORK_INIT = SAY_ERROR.format(call="rv.fork_init()")
FORK_INIT_LATE = (
    """
    import rdmaview as rv
    with rv.open("fake0") as ctx, ctx.alloc_pd() as pd, pd.reg_mr(bytearray(8)):
        pass
"""
    + FORK_INIT
)


@pytest.mark.no_device
@pytest.mark.parametrize("status", [1, 2], ids=["on", "unneeded"])
def test_fork_support_is_not_asked_for_where_it_is_on_or_unneeded(status, with_fake):
    late = with_fake(FORK_INIT_LATE, FAKE_FORK=status, FAKE_FORK_INIT=22)
    assert late == "no error"


@pytest.mark.no_device
def test_fork_support_is_asked_for_in_time(with_fake):
    assert with_fake(FORK_INIT, FAKE_FORK=0) == "no error"
    assert with_fake(FORK_INIT, FAKE_FORK=0, kind="no fork status") == "no error"


@pytest.mark.no_device
@pytest.mark.parametrize("kind", ["all", "no fork status"])
def test_fork_support_that_comes_too_late_says_so(kind, with_fake):
    text = with_fake(FORK_INIT_LATE, FAKE_FORK=0, kind=kind)
    assert text.startswith("VerbsError [Errno 22] ibv_fork_init")
    assert "too late" in text
    assert "before the first registration" in text


@pytest.mark.no_device
def test_fork_support_that_another_library_made_impossible_says_so(with_fake):
    text = with_fake(FORK_INIT, FAKE_FORK=0, FAKE_FORK_INIT=22)
    assert text.startswith("VerbsError [Errno 22] ibv_fork_init")
    assert "Another library" in text


@pytest.mark.no_device
@pytest.mark.parametrize(
    ("error", "fork", "said"),
    [
        (errno.EINVAL, 1, "huge pages"),
        (errno.ENOMEM, 1, "vm.max_map_count"),
        (errno.ENOMEM, 2, "other processes"),
    ],
)
def test_what_fork_support_does_to_a_registration_is_told(error, fork, said, with_fake):
    text = with_fake(
        """
    import rdmaview as rv
    with rv.open("fake0") as ctx, ctx.alloc_pd() as pd:
        try:
            pd.reg_mr(bytearray(8))
        except rv.VerbsError as error:
            print(error.errno, error.hint)
        """,
        FAKE_REG=error,
        FAKE_FORK=fork,
    )
    assert text.startswith(f"{error} ")
    assert said in text


# ---- P44: which GID ----

V1, V2 = 1, 2
LINK_LOCAL = "fe80::1234:5678"
TABLES = {
    "IPv4 before all else": (
        [
            (V1, LINK_LOCAL),
            (V2, LINK_LOCAL),
            (V1, "::ffff:10.0.0.1"),
            (V2, "::ffff:10.0.0.1"),
        ],
        3,
    ),
    "IPv6 where there is no IPv4": ([(V2, LINK_LOCAL), (V2, "fd00::1")], 1),
    "IPv4 that comes after IPv6": ([(V2, "fd00::1"), (V2, "::ffff:10.0.0.1")], 1),
    "the first of two": ([(V2, "fd00::1"), (V2, "fd00::2")], 0),
    "none that is all zero": ([(V2, "::"), (V2, "::")], None),
    "none of version 1": ([(V1, "fd00::1"), (V1, "::ffff:10.0.0.1")], None),
    "none that is link-local": ([(V2, LINK_LOCAL), (V2, "febf::1")], None),
    "one that only looks link-local": ([(V2, "fec0::1")], 0),
    "none of none": ([], None),
}


@pytest.mark.no_device
@pytest.mark.parametrize("name", TABLES)
def test_the_routable_gid_is_chosen_from_the_table(name, with_fake):
    table, chosen = TABLES[name]
    text = with_fake(
        """
    import rdmaview as rv
    with rv.open("fake0") as ctx, ctx.alloc_pd() as pd, ctx.create_cq(8) as cq:
        table = [f"{gid.index}={gid.type}={gid.address}" for gid in ctx.gids()]
        print(*table, sep="; ")
        try:
            with pd.create_qp(cq) as qp:
                print(qp.gid.index)
        except rv.VerbsError as error:
            print(error.errno, error)
        """,
        FAKE_GIDS=",".join(
            f"{kind}:{ipaddress.IPv6Address(address).packed.hex()}"
            for kind, address in table
        ),
    )
    listed, _, answer = text.partition("\n") if table else ("", "", text)
    assert listed == "; ".join(
        f"{i}=RoCE v{kind}={_host.gid_text(ipaddress.IPv6Address(address).packed)}"
        for i, (kind, address) in enumerate(table)
    )
    if chosen is not None:
        assert answer == str(chosen)
    else:
        assert answer.startswith(f"{errno.EADDRNOTAVAIL} ")
        assert "gid_index=" in answer
        for i, (kind, _) in enumerate(table):
            assert f"GID {i} (RoCE v{kind}, " in answer
