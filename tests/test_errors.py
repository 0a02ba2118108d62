"""What a failure says: errno, verb, the values, and what to do."""

import errno
import os
import pickle

import numpy as np
import pytest
from helpers import PAGE, mapping, run_python

import rdmaview as rv
from rdmaview import Access, _host

DROP_THE_RIGHT_TO_PIN = """
    import os, resource, sys
    import rdmaview as rv
    from helpers import PAGE, drop_capability, mapping, pinned_bytes
    from rdmaview import _host

    ctx = rv.open(sys.argv[1]).__enter__()
    pd = ctx.alloc_pd()
    drop_capability(_host.CAP_IPC_LOCK)
    soft = int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, 2 * soft))
"""


class TestTheLimitOfPinnedMemory:
    LIMIT = 16 * PAGE

    def test_is_told_with_its_figures(self, device_name):
        done = run_python(
            DROP_THE_RIGHT_TO_PIN
            + """
    with mapping(32 * PAGE) as address:
        held = pd.reg_mr_address(address, 8 * PAGE)
        try:
            pd.reg_mr_address(address + 100, 16 * PAGE)
        except rv.VerbsError as error:
            print(error.errno, error.verb)
            print(error)
        print(ctx.mr_count, ctx.mr_bytes)
        # The next smaller one works.
        pd.reg_mr_address(address + 8 * PAGE, 4 * PAGE).close()
        held.close()
        pd.reg_mr_address(address, 16 * PAGE).close()
            """,
            device_name,
            self.LIMIT,
        )
        assert (done.returncode, done.stderr) == (0, "")
        first, text, counts = done.stdout.splitlines()
        assert first == f"{errno.ENOMEM} ibv_reg_mr"
        for value in (
            f"{16 * PAGE} bytes (17 pages)",
            "access LOCAL_WRITE",
            f"on {device_name}",
            f"memlock soft {self.LIMIT}, hard {2 * self.LIMIT};",
            f"1 regions, {8 * PAGE} bytes",
            "limit of pinned memory is reached",
            "ulimit -l",
        ):
            assert value in text
        assert "CAP_IPC_LOCK" not in text
        assert counts == f"1 {8 * PAGE}"

    def test_counts_what_a_process_has_in_all(self, device_name):
        done = run_python(
            DROP_THE_RIGHT_TO_PIN
            + """
    with mapping(20 * PAGE) as address:
        first = pd.reg_mr_address(address, 10 * PAGE)
        try:
            pd.reg_mr_address(address + 10 * PAGE, 10 * PAGE)
        except rv.VerbsError as error:
            print(error.errno)
        first.close()
        pd.reg_mr_address(address + 10 * PAGE, 10 * PAGE).close()
            """,
            device_name,
            self.LIMIT,
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "12\n", "")

    def test_leaves_the_buffer_free_when_it_is_met(self, device_name):
        done = run_python(
            DROP_THE_RIGHT_TO_PIN
            + """
    buffer = bytearray(32 * PAGE)
    for _ in range(3):
        try:
            pd.reg_mr(buffer)
        except rv.VerbsError as error:
            print(error.errno)
    buffer.append(0)
    print(pinned_bytes(), ctx.mr_count)
            """,
            device_name,
            self.LIMIT,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.split() == ["12", "12", "12", "0", "0"]

    def test_does_not_hold_for_the_privileged(self, device_name):
        done = run_python(
            """
    import resource, sys
    import rdmaview as rv

    resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 4096))
    with rv.open(sys.argv[1]) as ctx, ctx.alloc_pd() as pd:
        pd.reg_mr(bytearray(1 << 20)).close()
            """,
            device_name,
        )
        if not _host.memlock()[2]:
            pytest.skip("these tests run without CAP_IPC_LOCK")
        assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.soft_only(reason="sets a limit")
class TestAFullTableOfRegions:
    def test_is_told_apart_from_the_limit_of_pinned_memory(self, pd, device_name):
        rv.softverbs.configure(max_mr=8)
        regions = [pd.reg_mr(np.zeros(4096, "u1")) for _ in range(8)]
        fresh = bytearray(4096)
        with pytest.raises(rv.VerbsError) as refusal:
            pd.reg_mr(fresh)
        assert refusal.value.errno == errno.ENOMEM
        for value in ("table is full", "max_mr is 8", f"8 regions, {8 * 4096} bytes"):
            assert value in str(refusal.value)
        assert "ulimit" not in refusal.value.hint
        fresh.append(0)
        regions.pop().close()
        regions.append(pd.reg_mr(fresh))
        for mr in regions:
            mr.close()

    def test_is_never_reached_by_views(self, pd):
        rv.softverbs.configure(max_mr=1)
        with pd.reg_mr(bytearray(4096)) as mr:
            views = [mr[i : i + 1] for i in range(4096)]
            assert len(set(views)) == 4096
            assert pd.context.mr_count == 1


@pytest.mark.soft_only(reason="injects failures")
class TestARegistrationThatFailed:
    @pytest.mark.parametrize(
        "error",
        [
            0,
            errno.EPERM,
            errno.EAGAIN,
            errno.ENOMEM,
            errno.EFAULT,
            errno.EINVAL,
            errno.EOPNOTSUPP,
        ],
    )
    def test_says_errno_and_every_value(self, error, pd, device_name):
        fresh = bytearray(5000)
        rv.softverbs.fail("reg_mr", error)
        with pytest.raises(OSError) as refusal:
            pd.reg_mr(fresh, Access.LOCAL_WRITE | Access.REMOTE_READ)
        failure = refusal.value
        assert type(failure) is rv.VerbsError
        assert (failure.errno, failure.verb) == (error, "ibv_reg_mr")
        fresh.append(0)
        for value in (
            "5000 bytes",
            " at 0x",
            "LOCAL_WRITE|REMOTE_READ",
            device_name,
            "memlock soft",
            "0 regions, 0 bytes",
        ):
            assert value in str(failure)
        assert ("unspecified" in str(failure)) == (error == 0)
        assert (pd.context.mr_count, pd.context.mr_bytes) == (0, 0)
        pd.reg_mr(fresh).close()

    def test_does_not_tell_an_older_errno(self, pd):
        with pytest.raises(FileNotFoundError):
            os.stat("/nonexistent")
        rv.softverbs.fail("reg_mr", 0)
        with pytest.raises(rv.VerbsError) as refusal:
            pd.reg_mr(bytearray(8))
        assert refusal.value.errno == 0

    def test_is_no_child_of_its_domain(self, ctx):
        pd = ctx.alloc_pd()
        rv.softverbs.fail("reg_mr", errno.ENOMEM)
        with pytest.raises(rv.VerbsError):
            pd.reg_mr(bytearray(8))
        pd.close()

    def test_fails_so_often_and_then_works(self, pd, counters):
        rv.softverbs.fail("reg_mr", errno.EAGAIN, times=3)
        for _ in range(3):
            with pytest.raises(rv.VerbsError):
                pd.reg_mr(bytearray(8))
        pd.reg_mr(bytearray(8)).close()
        assert counters() == {"reg_mr": 4, "dereg_mr": 1}


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("error", [errno.ENOMEM, -errno.ENOMEM])
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("query_device", lambda ctx, pd, cq: ctx.attributes),
        ("query_port", lambda ctx, pd, cq: ctx.port(1)),
        ("modify_qp", lambda ctx, pd, cq: pd.create_qp(cq)),
    ],
)
def test_both_ways_to_return_an_errno_are_read(verb, call, error, ctx, pd, cq):
    rv.softverbs.fail(verb, error)
    with pytest.raises(rv.VerbsError) as refusal:
        call(ctx, pd, cq)
    assert (refusal.value.errno, refusal.value.verb) == (errno.ENOMEM, f"ibv_{verb}")


@pytest.mark.soft_only(reason="injects failures")
@pytest.mark.parametrize("error", [0, errno.ENOMEM])
@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("get_device_list", lambda ctx, pd, cq: rv.open(ctx.name)),
        ("open_device", lambda ctx, pd, cq: rv.open(ctx.name)),
        ("alloc_pd", lambda ctx, pd, cq: ctx.alloc_pd()),
        ("create_cq", lambda ctx, pd, cq: ctx.create_cq(8)),
        ("create_qp", lambda ctx, pd, cq: pd.create_qp(cq)),
    ],
)
def test_a_null_is_an_error_whatever_errno_says(verb, call, error, ctx, pd, cq):
    # The first look at the list only finds the device's name.
    rv.softverbs.fail(verb, error, times=1)
    if verb == "get_device_list":
        with pytest.raises(OSError):
            call(ctx, pd, cq)
        return
    with pytest.raises(rv.VerbsError) as refusal:
        call(ctx, pd, cq)
    assert (refusal.value.errno, refusal.value.verb) == (error, f"ibv_{verb}")
    assert ("unspecified" in str(refusal.value)) == (error == 0)


@pytest.mark.soft_only(reason="injects a failure")
def test_a_context_whose_limits_cannot_be_read_is_not_opened(device_name, counters):
    rv.softverbs.fail("query_device", errno.EIO)
    with pytest.raises(rv.VerbsError, match="ibv_query_device"):
        rv.open(device_name)
    assert "live_context" not in counters()


class TestAHint:
    """Each is checked where it is made, since no one machine shows them all."""

    def explain(self, error, address, size, fork=False, mr_count=0, mr_bytes=0):
        return _host.explain_registration(
            error,
            "dev0",
            address,
            size,
            False,
            "LOCAL_WRITE",
            mr_count,
            mr_bytes,
            100,
            fork,
        )

    @pytest.mark.parametrize(
        "error", [errno.EFAULT, errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get
    )
    def test_names_the_file_whose_pages_were_refused(self, error, tmp_path):
        path = tmp_path / "da ta"
        path.write_bytes(bytes(PAGE))
        array = np.memmap(path, "u1", "r+")
        _, hint = self.explain(error, array.ctypes.data, PAGE)
        assert str(path) in hint
        for advice in ("anonymous", "/dev/shm", "memfd", "without a write right"):
            assert advice in hint

    def test_names_no_file_that_is_kept_in_memory(self):
        from multiprocessing import shared_memory

        memory = shared_memory.SharedMemory(create=True, size=PAGE)
        try:
            array = np.frombuffer(memory.buf, "u1")
            _, hint = self.explain(errno.EFAULT, array.ctypes.data, PAGE)
            assert memory.name not in hint
            del array
        finally:
            memory.close()
            memory.unlink()

    def test_tells_of_fork_support_and_huge_pages(self):
        with mapping(PAGE) as address:
            _, hint = self.explain(errno.EINVAL, address, PAGE, fork=True)
            assert "huge pages" in hint and "ibv_fork_init" in hint
            _, hint = self.explain(errno.EINVAL, address, PAGE)
            assert hint == ""

    def test_tells_of_fork_support_and_the_number_of_mappings(self):
        with mapping(PAGE) as address:
            _, hint = self.explain(errno.ENOMEM, address, PAGE, fork=True)
            assert "vm.max_map_count" in hint
            _, hint = self.explain(errno.ENOMEM, address, PAGE)
            assert "vm.max_map_count" not in hint
            assert "other processes" in hint

    @pytest.mark.parametrize("error", [errno.ENOMEM, errno.EAGAIN, errno.EIO])
    def test_tells_of_a_full_table_for_each_errno_of_it(self, error):
        with mapping(PAGE) as address:
            _, hint = self.explain(error, address, PAGE, mr_count=100)
            assert "max_mr is 100" in hint

    def test_counts_the_pages_that_a_range_touches(self):
        with mapping(2 * PAGE) as address:
            for offset, size, pages in (0, 1, 1), (PAGE - 1, 2, 2), (0, 2 * PAGE, 2):
                detail, _ = self.explain(errno.ENOMEM, address + offset, size)
                assert f"{size} bytes ({pages} pages)" in detail


ERRORS = [
    rv.VerbsError(errno.ENOMEM, "ibv_reg_mr", "64 bytes", "Register less"),
    rv.VerbsError(0, "ibv_open_device"),
    rv.DeviceNotFoundError("no device is named 'x'"),
    rv.StaleViewError("stale"),
    rv.DetachedViewError("detached"),
]


@pytest.mark.no_device
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_pass_through_pickle_whole(error, protocol):
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is type(error)
    assert str(back) == str(error)
    assert back.args == error.args
    for name in "errno", "verb", "detail", "hint", "strerror":
        assert getattr(back, name, None) == getattr(error, name, None)


@pytest.mark.no_device
def test_errors_are_of_the_families_that_callers_catch():
    assert issubclass(rv.VerbsError, OSError)
    assert issubclass(rv.DeviceNotFoundError, OSError)
    assert issubclass(rv.WorkCompletionError, OSError)
    assert issubclass(rv.StaleViewError, ValueError)
    assert issubclass(rv.DetachedViewError, ValueError)
    assert rv.DeviceNotFoundError("x").errno == errno.ENODEV


@pytest.mark.no_device
def test_an_error_says_verb_reason_values_and_advice():
    error = rv.VerbsError(errno.ENOMEM, "ibv_reg_mr", "64 bytes", "Register less")
    assert str(error) == (
        "[Errno 12] ibv_reg_mr: Cannot allocate memory: 64 bytes. Register less"
    )
    assert (error.verb, error.detail, error.hint) == (
        "ibv_reg_mr",
        "64 bytes",
        "Register less",
    )


@pytest.mark.soft_only(reason="the built-in device needs no fork support")
def test_fork_support_that_is_not_needed_is_not_turned_on(pd, counters):
    with pd.reg_mr(bytearray(64)):
        rv.fork_init()
    assert counters().get("fork_init") is None
