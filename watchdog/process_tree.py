"""All processes of the machine at one moment: their parents, sessions and CPU time, from /proc/PID/stat.

A helper that leaves its parent's session remains its child; one whose parent has exited is adopted by init
and is found by the environment it inherited. Used by `remaining.py`. A process that has exited meanwhile is
absent: never an exception. Reads /proc; judges nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from grpo_run.watchdog.processes import TICKS_PER_SECOND, read_file

# positions in /proc/PID/stat after the command name, see proc(5)
_STATE, _PARENT, _SESSION, _USER_TICKS, _SYSTEM_TICKS, _STARTED = 0, 1, 3, 11, 12, 19


@dataclass(frozen=True, kw_only=True, slots=True)
class Process:
    """One process. A pid may be used again, so (`pid`, `started_ticks`) identifies it."""

    pid: int
    parent: int
    session: int
    state: str
    name: str
    cpu_seconds: float
    started_ticks: int

    @property
    def key(self) -> tuple[int, int]:
        """Pid and start time."""
        return self.pid, self.started_ticks

    @property
    def is_alive(self) -> bool:
        """Whether it can still do anything: a zombie cannot."""
        return self.state not in ("Z", "X", "x")


def read_processes() -> dict[int, Process]:
    """Return all processes by pid (about 15 µs per process).

    Raises:
        OSError: /proc cannot be listed, for example because no file descriptor is left.
    """
    found = (_read_process(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {process.pid: process for process in found if process is not None}


def descendants(processes: Mapping[int, Process], roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` that exist and of all their descendants, in any session."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    found: set[int] = set()
    waiting = [pid for pid in roots if pid in processes]
    while waiting:
        pid = waiting.pop()
        if pid not in found:
            found.add(pid)
            waiting.extend(children.get(pid, ()))
    return found


def read_arguments(pid: int) -> str:
    """Return the command line of a process; "" if it is unknown."""
    content = read_file(f"/proc/{pid}/cmdline") or b""
    return content.replace(b"\0", b" ").decode(errors="replace").strip()


def inherited(pid: int, texts: Iterable[bytes]) -> bool:
    """Return whether the environment that a process was started with contains one of these texts.

    False if it may not be read. Only a program started by `exec` has an environment of its own in /proc.
    """
    environment = _read_whole(f"/proc/{pid}/environ")
    return any(text in environment for text in texts)


MAX_ENVIRONMENT_BYTES = 1024 * 1024


def _read_whole(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_ENVIRONMENT_BYTES)
    except OSError:
        return b""


def _read_process(pid: int) -> Process | None:
    content = read_file(f"/proc/{pid}/stat")
    if content is None:
        return None
    name_end = content.rfind(b")")
    fields = content[name_end + 2 :].split()
    if len(fields) <= _STARTED:
        return None
    return Process(
        pid=pid,
        parent=int(fields[_PARENT]),
        session=int(fields[_SESSION]),
        state=fields[_STATE].decode(),
        name=content[content.find(b"(") + 1 : name_end].decode(errors="replace"),
        cpu_seconds=(int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS])) / TICKS_PER_SECOND,
        started_ticks=int(fields[_STARTED]),
    )
