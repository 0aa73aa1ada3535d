"""Capture the stacks of all threads of the ranks: with faulthandler, else with py-spy.

Each rank registers `faulthandler` on a real-time signal: the C handler writes every thread's Python stack
in about 1 ms, without the interpreter. py-spy reads the memory of a rank that no signal reaches (a stopped
rank, one without the handler) or whose Python stack is not enough (a stuck interpreter). It needs the right
to trace: the same user, and under Yama's `ptrace_scope` 1 the traced process must have named this process
or its parent with PR_SET_PTRACER. Called by `collection.py`. Does not interpret stacks; `stacks.py` parses
them.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence._node_memory import BackgroundCall
from grpo_run.watchdog.evidence.incident_files import MAX_FILE_BYTES, file_size, read_end, write_private
from grpo_run.watchdog.evidence.stacks import Stack, parse_faulthandler, parse_py_spy

MAX_DUMP_BYTES = 1024 * 1024


def dump(pid: int, file: Path, native: bool, timeout_seconds: float) -> str | None:
    """Run `py-spy dump` on one process and write its output to a file. Return what went wrong, or None.

    With `native`, py-spy pauses the process while it reads; without, it does not.
    """
    program = find_py_spy()
    if program is None:
        return "py-spy is not installed"
    command = [program, "dump", "--full-filenames", "--pid", str(pid)]
    try:
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as output:
            ran = subprocess.run(
                [*command, "--native" if native else "--nonblocking"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.PIPE,
                timeout=timeout_seconds,
                check=False,
            )
        if file.stat().st_size > MAX_DUMP_BYTES:
            os.truncate(file, MAX_DUMP_BYTES)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_seconds:.1f} s"
    except OSError as error:
        return str(error)
    if ran.returncode:
        message = ran.stderr.decode(errors="replace").strip() or file.read_text(errors="replace")
        lines = [line.strip() for line in message.splitlines() if line.strip()]
        return (lines[0] if lines else f"exit code {ran.returncode}")[:200]
    return None


def find_py_spy() -> str | None:
    """Return the program beside this interpreter or on PATH, or None."""
    beside = Path(sys.executable).with_name("py-spy")
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("py-spy")


STACK_SIGNAL = signal.SIGRTMIN + 11
"""Not used by libc, Python, torch or SLURM."""
STACK_DEADLINE_SECONDS = 0.15
POLL_SECONDS = 0.002
QUIET_POLLS = 10
"""A dump without the end of a main thread counts as complete after this number of polls without growth."""
NATIVE_SECONDS = 2.5
"""py-spy reads every library's symbols for native frames: 0.4 s the first time with torch, more on a busy
disk."""
STOPPED_STATES = ("T", "t")
UNINTERRUPTIBLE = "D"
GONE_STATES = (None, "Z", "X")


class StackCapture:
    """Capture of the stacks of one incident. Call `request`, do other work, then `finish`.

    Args:
        folder: where the stacks are copied to.
        pids: running ranks.
        stack_files: where each rank's faulthandler writes, including ranks that have exited.
    """

    def __init__(self, folder: Path, pids: Mapping[int, int], stack_files: Mapping[int, Path]) -> None:
        self._folder = folder
        self._pids = pids
        self._files = stack_files
        self._sizes = {rank: file_size(file) for rank, file in stack_files.items()}
        self._signalled: list[int] = []
        self._silent: dict[int, str] = {}
        self.missing: list[str] = []

    def request(self) -> None:
        """Send the stack signal to every rank that can handle it; note the reason for the others."""
        for rank, pid in self._pids.items():
            state = processes.read_state(pid)
            if state in GONE_STATES:
                self.missing.append(f"rank {rank}: exited before its stack was requested")
            elif state in STOPPED_STATES:
                self._silent[rank] = f"stopped (state {state}), so no signal reaches it"
            elif rank not in self._sizes:
                self._silent[rank] = "no file for its stacks"
            elif not _handles_stack_signal(pid):
                # the signal's default action would kill the process, which would then look like the culprit
                self._silent[rank] = "not ready to write stacks"
            else:
                self._signal(rank, pid)

    def finish(
        self, interpreter_stuck: Collection[int], deadline: float, spy_deadline: float
    ) -> dict[int, tuple[Stack, ...]]:
        """Wait for the stacks, run py-spy where needed, and return the stacks by rank.

        Args:
            interpreter_stuck: ranks whose native frames are needed too.
            deadline: for faulthandler, in monotonic seconds.
            spy_deadline: for py-spy.
        """
        for rank in self._wait(min(time.monotonic() + STACK_DEADLINE_SECONDS, deadline)):
            self._silent[rank] = f"no stack within {STACK_DEADLINE_SECONDS} s"
        stacks = self._copy()
        spied = self._run_spy({*self._silent, *(set(interpreter_stuck) & set(self._pids))}, spy_deadline)
        for rank, result in sorted(spied.items()):
            if isinstance(result, str):
                reason = (
                    f"{self._silent[rank]}, and py-spy: "
                    if rank in self._silent
                    else "no native stack: py-spy: "
                )
                self.missing.append(f"rank {rank}: {reason}{result}")
            elif rank not in stacks:
                stacks[rank] = result
        return dict(sorted(stacks.items()))

    def _signal(self, rank: int, pid: int) -> None:
        try:
            os.kill(pid, STACK_SIGNAL)
            self._signalled.append(rank)
        except ProcessLookupError:
            self.missing.append(f"rank {rank}: exited before its stack was requested")
        except PermissionError:
            self._silent[rank] = "process of another user, which may not be signalled"

    def _wait(self, deadline: float) -> list[int]:
        """Wait for a complete dump in each file; return the ranks whose file has not grown at all."""
        last = {rank: self._sizes[rank] for rank in self._signalled}
        quiet = dict.fromkeys(self._signalled, 0)
        waiting = set(self._signalled)
        while waiting and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
            for rank in sorted(waiting):
                size = file_size(self._files[rank])
                quiet[rank] = quiet[rank] + 1 if size == last[rank] and size > self._sizes[rank] else 0
                last[rank] = size
                # a handler that was descheduled half-way has written other threads only: the main thread
                # comes last
                if quiet[rank] >= QUIET_POLLS or (quiet[rank] and _ends_as_main_thread(self._files[rank])):
                    waiting.discard(rank)
        return [rank for rank in self._signalled if last[rank] == self._sizes[rank]]

    def _copy(self) -> dict[int, tuple[Stack, ...]]:
        """Copy the end of every rank's file.

        Return new dumps of running ranks and last dumps of exited ones.
        """
        stacks = {}
        for rank, file in self._files.items():
            size = file_size(file)
            if not size:
                continue
            content = read_end(file, MAX_FILE_BYTES)
            write_private(self._folder / f"rank{rank}.txt", content)
            before = self._sizes[rank] if rank in self._pids else 0
            fresh = content[-min(len(content), size - before) :] if size > before else b""
            if parsed := parse_faulthandler(fresh.decode(errors="replace")):
                stacks[rank] = parsed
        return stacks

    def _run_spy(self, ranks: Collection[int], deadline: float) -> dict[int, tuple[Stack, ...] | str]:
        """Run py-spy on all given ranks in parallel; returns its stacks, or the reason why there are none."""
        calls = {rank: BackgroundCall(self._spy_on, rank, self._pids[rank], deadline) for rank in ranks}
        results: dict[int, tuple[Stack, ...] | str] = {}
        for rank, call in calls.items():
            call.join(deadline)
            results[rank] = call.result if call.result is not None else "no answer in time"
        return results

    def _spy_on(self, rank: int, pid: int, deadline: float) -> tuple[Stack, ...] | str:
        file = self._folder / f"rank{rank}.native.txt"
        # py-spy pauses a process to unwind native frames, which fails for a stopped process and in
        # uninterruptible sleep
        pausable = processes.read_state(pid) not in (*STOPPED_STATES, UNINTERRUPTIBLE)
        problem: str | None = None
        for native in (True, False) if pausable else (False,):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return problem or "no time was left"
            problem = dump(pid, file, native, min(remaining, NATIVE_SECONDS) if native else remaining)
            if problem is None:
                try:
                    return parse_py_spy(read_end(file, MAX_DUMP_BYTES).decode(errors="replace"))
                except OSError as error:  # too late: the incident's directory has been renamed
                    return str(error)
        file.unlink(missing_ok=True)
        return problem or "nothing was tried"


def _handles_stack_signal(pid: int) -> bool:
    """Whether the process handles the stack signal: bit N-1 of SigCgt in /proc/PID/status, proc(5)."""
    for line in (processes.read_file(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _ends_as_main_thread(file: Path) -> bool:
    return read_end(file, 64).endswith((b" in <module>\n", b"\n  ...\n"))
