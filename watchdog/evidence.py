"""Evidence of what ranks were doing, put on disk before any of them is killed.

Called by the supervisor between a fault and the kill. Stacks come from `faulthandler`, which each rank has
registered on a real-time signal: the C handler writes every thread's Python stack without the interpreter's
help, in about a millisecond. Memory comes from `/proc`. Bounded in time and size. Does not interpret.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Mapping
from pathlib import Path

STACK_SIGNAL = signal.SIGRTMIN + 11
"""Free of meaning in libc, Python, torch and SLURM."""
STACK_DEADLINE_SECONDS = 0.15
MAX_FILE_BYTES = 1024 * 1024
PROC_FILES = ("status", "wchan", "limits")


def collect(incident: Path, pids: Mapping[int, int], stack_files: Mapping[int, Path]) -> list[str]:
    """Ask the living ranks for their stacks, copy what arrives, and read what /proc tells.

    Args:
        incident: the incident's directory; `stacks/` and `memory/` are made in it.
        pids: living ranks.
        stack_files: where each rank's faulthandler writes, dead ranks included.

    Returns:
        What could not be had, a line each: a missing witness is named, not passed over.
    """
    missing = []
    stacks, memory = incident / "stacks", incident / "memory"
    for folder in (stacks, memory):
        folder.mkdir(mode=0o700, exist_ok=True)
    before = {rank: _size(stack_files[rank]) for rank in pids if rank in stack_files}
    for rank, pid in pids.items():
        try:
            if not _catches_stack_signal(pid):
                # the signal's default action would end the process, and it would be taken for the culprit
                missing.append(f"rank {rank}: not yet ready to write stacks")
                before.pop(rank, None)
                continue
            os.kill(pid, STACK_SIGNAL)
        except (ProcessLookupError, FileNotFoundError):
            missing.append(f"rank {rank}: gone before its stack was asked for")
            before.pop(rank, None)
    for rank, pid in pids.items():
        for name in PROC_FILES:
            try:
                text = Path(f"/proc/{pid}/{name}").read_bytes()[:MAX_FILE_BYTES]
            except OSError as error:
                missing.append(f"rank {rank}: /proc/{pid}/{name}: {error.strerror}")
                continue
            _write(memory / f"rank{rank}.{name}", text)
    deadline = time.monotonic() + STACK_DEADLINE_SECONDS
    waiting, last = set(before), dict(before)
    while waiting and time.monotonic() < deadline:
        time.sleep(0.002)
        now = {rank: _size(stack_files[rank]) for rank in waiting}
        # written when something has come and nothing more came since the last look
        waiting = {rank for rank in waiting if now[rank] == before[rank] or now[rank] != last[rank]}
        last.update(now)
    missing += [f"rank {rank}: no stack within {STACK_DEADLINE_SECONDS} s" for rank in sorted(waiting)]
    for rank, file in stack_files.items():
        if _size(file):
            with open(file, "rb") as source:
                source.seek(max(0, _size(file) - MAX_FILE_BYTES))
                _write(stacks / f"rank{rank}.txt", source.read(MAX_FILE_BYTES))
    return missing


def _catches_stack_signal(pid: int) -> bool:
    """Whether the process has a handler for the stack signal: bit N-1 of SigCgt in /proc/PID/status, proc(5)."""
    for line in Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines():
        if line.startswith("SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _write(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
