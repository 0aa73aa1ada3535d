"""The host's memory is read from /proc, of real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from grpo_run.watchdog.memory import host_reading

HOLD = (
    "import mmap,sys; a = b'x' * (64 << 20); m = mmap.mmap(-1, 32 << 20); m[:] = b'y' * len(m);"
    " print(flush=True); sys.stdin.read()"
)


def test_memory_is_told_apart_by_kind() -> None:
    """64 MiB of its own and 32 MiB of shared memory are found in the right fields."""
    with subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as held:
        assert held.stdout is not None
        held.stdout.readline()
        memory = host_reading.read_process(held.pid)
        anonymous = host_reading.anonymous_bytes([held.pid])
        held.kill()
    assert memory is not None
    assert 64 << 20 <= memory.anonymous_bytes < 160 << 20
    assert 32 << 20 <= memory.shared_bytes < 64 << 20
    assert abs(anonymous - memory.anonymous_bytes) < 4 << 20


def test_a_process_with_a_pending_kill_is_dying_and_a_stopped_one_is_not() -> None:
    """SIGKILL is seen before the process is gone, and other signals are no death."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(b"runs\n")
        process.stdin.flush()
        process.stdout.readline()  # a process that is being started has no memory for a moment
        assert not host_reading.is_dying(process.pid)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)  # until then it may take the next signal first
        process.send_signal(signal.SIGTERM)  # pending until it continues
        assert not host_reading.is_dying(process.pid)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert host_reading.is_dying(process.pid)
    assert host_reading.is_dying(process.pid)


@pytest.mark.parametrize(
    ("line", "dying"),
    [
        ("SigPnd:\t0000000000000100", True),
        ("ShdPnd:\t0000000000004100", True),
        ("ShdPnd:\t0000000000004000", False),
        ("ShdPnd:\t0000000000000200", False),
        ("SigBlk:\t0000000000000100", False),
    ],
)
def test_a_pending_sigkill_is_bit_eight(line: str, dying: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signal 9 in the mask of the thread or of the process; a blocked one is not pending."""
    status = f"Name:\tx\nVmRSS:\t  5 kB\n{line}\nShdPnd:\t0000000000000000\n".encode()
    monkeypatch.setattr(host_reading, "read_file", lambda path: status)
    assert host_reading.is_dying(1) is dying


def test_the_machine_is_judged_by_what_is_available() -> None:
    """Page cache that can be freed is no use."""
    use = host_reading.machine_use(b"MemTotal: 1000 kB\nMemFree: 50 kB\nMemAvailable: 600 kB\n")
    assert use is not None
    assert (use.limit_bytes, use.working_set_bytes) == (1000 * 1024, 400 * 1024)
    assert host_reading.machine_use(b"MemTotal: 1000 kB\nMemFree: 50 kB\n") is None
