"""All processes of the machine at one moment: their parents, sessions and CPU time, from /proc/PID/stat.

A helper that leaves its parent's session remains its child. Used by `ownership.py`, `remaining.py` and those
who look at the descendants of ranks. A process that has exited meanwhile is absent: never an exception. Reads
/proc; judges nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from grpo_run.watchdog.processes import ProcessStat, list_processes, read_file, read_stat


def read_processes() -> dict[int, ProcessStat]:
    """Return all processes by pid (about 15 µs per process).

    Raises:
        OSError: /proc cannot be listed, for example because no file descriptor is left.
    """
    found = map(read_stat, list_processes())
    return {process.pid: process for process in found if process is not None}


def children_by_parent(processes: Mapping[int, ProcessStat]) -> dict[int, list[int]]:
    """Return the pids of the children of every process that has any."""
    children: dict[int, list[int]] = {}
    for process in processes.values():
        children.setdefault(process.parent, []).append(process.pid)
    return children


def descendants(processes: Mapping[int, ProcessStat], roots: Iterable[int]) -> set[int]:
    """Return the pids of `roots` that exist and of all their descendants, in any session."""
    children = children_by_parent(processes)
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


MAX_ENVIRONMENT_BYTES = 1024 * 1024


def read_environment(pid: int) -> bytes:
    """Return the environment that a process's program was started with; empty if it may not be read.

    Only a program started by `exec` has an environment of its own in /proc; a fork shows that of its parent.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            return file.read(MAX_ENVIRONMENT_BYTES)
    except OSError:
        return b""
