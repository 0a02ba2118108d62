"""The device that the suite runs on, and what tests build on it."""

import os
import traceback
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, settings

import rdmaview as rv

TESTS = Path(__file__).parent

DEVICE = pytest.StashKey()
RAN_ON_DEVICE = pytest.StashKey()
RAN_NOTHING = pytest.StashKey()

settings.register_profile(
    "soft", max_examples=200, deadline=None, database=None, print_blob=True
)
settings.register_profile(
    "vm",
    settings.get_profile("soft"),
    max_examples=10,
    suppress_health_check=[HealthCheck.too_slow],
)


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        metavar="NAME",
        default=os.environ.get("RDMAVIEW_TEST_DEVICE") or "soft0",
        help="RDMA device to run on (default: $RDMAVIEW_TEST_DEVICE, or soft0)",
    )


def pytest_configure(config):
    config.addinivalue_line(
        "markers",
        "soft_only(reason): needs the faults, limits or counters of the built-in "
        "device; not run on a kernel device",
    )
    config.addinivalue_line(
        "markers", "no_device: never touches a device; not run on a kernel device"
    )
    config.stash[DEVICE] = find_device(config.getoption("--device"))
    config.stash[RAN_ON_DEVICE] = 0
    settings.load_profile("soft" if runs_on_soft(config) else "vm")


def find_device(name):
    found = {device.name: device for device in rv.devices()}
    if name not in found:
        raise pytest.UsageError(
            f"no RDMA device {name!r} to test on; there are: {', '.join(found)}"
        )
    if not found[name].openable:
        raise pytest.UsageError(f"{name} can't be tested on: {found[name].reason}")
    return found[name]


def runs_on_soft(config):
    return config.stash[DEVICE].kind == "soft"


def pytest_report_header(config):
    device = config.stash[DEVICE]
    return f"rdmaview: {rv.__file__}, on {device.name} ({device_kind(device)})"


def device_kind(device):
    return "built-in device" if device.kind == "soft" else "kernel device"


def pytest_collection_modifyitems(config, items):
    if runs_on_soft(config):
        return
    elsewhere = [item for item in items if belongs_on_soft(item)]
    config.hook.pytest_deselected(items=elsewhere)
    items[:] = [item for item in items if not belongs_on_soft(item)]


def belongs_on_soft(item):
    return item.get_closest_marker("soft_only") or item.get_closest_marker("no_device")


def uses_device(item):
    return "device_name" in item.fixturenames


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    reset_soft_device(item.config)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item):
    # Before the fixtures end: a fault that is left must not hit their close().
    reset_soft_device(item.config)


def reset_soft_device(config):
    """Let no limit, fault, delay or count of one test reach another."""
    if runs_on_soft(config):
        rv.softverbs.reset()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "call" and uses_device(item) and not report.skipped:
        item.config.stash[RAN_ON_DEVICE] += 1
    if report.failed and call.excinfo and not item.config.getoption("usepdb"):
        drop_locals(call.excinfo.tb)
    return report


def drop_locals(tb):
    """Let go of what a failed test registered, or its fixtures couldn't close."""
    traceback.clear_frames(tb)
    for frame, _ in traceback.walk_tb(tb):
        # Before Python 3.13 a frame keeps a copy of them until it is asked again.
        frame.f_locals  # noqa: B018


def pytest_sessionfinish(session, exitstatus):
    config = session.config
    ran_nothing = (
        config.stash[RAN_ON_DEVICE] == 0
        and not config.option.collectonly
        and not (runs_on_soft(config) and is_selection(config))
    )
    config.stash[RAN_NOTHING] = ran_nothing
    if ran_nothing and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_selection(config):
    """Tell whether only some of the tests were asked for."""
    start = config.invocation_params.dir
    return bool(
        config.option.keyword
        or config.option.markexpr
        or config.getoption("lf", default=False)
        or not any(TESTS.is_relative_to((start / arg).resolve()) for arg in config.args)
    )


def pytest_terminal_summary(terminalreporter, config):
    device = config.stash[DEVICE]
    terminalreporter.write_line(
        f"{config.stash[RAN_ON_DEVICE]} tests ran on {device.name} "
        f"({device_kind(device)})"
    )
    if config.stash[RAN_NOTHING]:
        terminalreporter.write_line(
            f"ERROR: nothing ran on {device.name}: the run proves nothing of it",
            red=True,
        )


@pytest.fixture
def is_soft(pytestconfig):
    return runs_on_soft(pytestconfig)


@pytest.fixture(scope="session")
def device_name(pytestconfig):
    return pytestconfig.stash[DEVICE].name


@pytest.fixture
def ctx(device_name):
    with rv.open(device_name) as ctx:
        yield ctx


@pytest.fixture
def pd(ctx):
    with ctx.alloc_pd() as pd:
        yield pd


@pytest.fixture
def cq(ctx):
    with ctx.create_cq(64) as cq:
        yield cq


@pytest.fixture
def pair(pd, cq):
    """Two connected queue pairs, ``.a`` and ``.b``, of one ``.pd`` and one ``.cq``."""
    with (
        pd.create_qp(cq, max_send_wr=16) as a,
        pd.create_qp(cq, max_send_wr=16) as b,
    ):
        a.connect(b.info)
        b.connect(a.info)
        yield SimpleNamespace(a=a, b=b, pd=pd, cq=cq)


class CallCounters:
    """What the built-in device counted since a moment."""

    def __init__(self):
        self.restart()

    def restart(self):
        """Count from here on."""
        self.start = rv.softverbs.counters()

    def __call__(self):
        """Differences by name, as ``{"reg_mr": 1, "live_mr": 1}``; zeros left out."""
        differences = {
            name: count - self.start.get(name, 0)
            for name, count in rv.softverbs.counters().items()
        }
        return {name: count for name, count in differences.items() if count}


@pytest.fixture
def counters(device_name, is_soft):
    """Ask for it after the fixtures whose calls aren't to be counted, or restart()."""
    if not is_soft:
        pytest.fail(f"{device_name} counts nothing: mark this test soft_only")
    return CallCounters()
