"""The examples run, on the device that is tested."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def run_example(name, *args):
    return subprocess.run(
        [sys.executable, EXAMPLES / name, *args],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_blocks_of_a_cache_are_pulled_by_a_thread(device_name):
    done = run_example(
        "kv_cache.py", "--device", device_name, "--size", "33554432", "--blocks", "1000"
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert f"on {device_name}: all verified" in done.stdout
    assert done.stdout.startswith("1000 blocks")


def test_blocks_of_a_cache_are_pulled_by_another_process(device_name, is_soft):
    done = run_example(
        "kv_cache.py",
        "--processes",
        *("--device", device_name, "--size", "16777216", "--blocks", "500"),
    )
    if is_soft:
        # It connects no processes: the failure is told, and nobody waits.
        assert done.returncode == 1
        assert "WorkCompletionError" in done.stderr or "VerbsError" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert f"on {device_name}: all verified" in done.stdout


@pytest.mark.no_device
def test_a_cache_without_blocks_is_refused():
    done = run_example("kv_cache.py", "--size", "100")
    assert done.returncode == 2
    assert "65536 bytes or more" in done.stderr
