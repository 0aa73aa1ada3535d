"""Copies of /proc files of the ranks, and a list of their child processes.

Called by `collection.py`; does not judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence.files import write_private

PROC_FILES = ("stat", "wchan", "limits", "io")
MAX_CHILDREN = 256
MAX_COMMAND_CHARACTERS = 500


def write_process_files(memory: Path, proc: Path, pids: Mapping[int, int], missing: list[str]) -> None:
    """Write the files of every rank; append a sentence to `missing` for each that could not be read.

    Args:
        memory: directory for `rankN.status`.
        proc: directory for all other files.
        pids: running ranks.
    """
    sessions = processes.members_by_session(list(pids.values()))
    for rank, pid in pids.items():
        for name, folder in (("status", memory), *((name, proc) for name in PROC_FILES)):
            content = processes.read_file(f"/proc/{pid}/{name}")
            if content is None:
                missing.append(f"rank {rank}: /proc/{pid}/{name} could not be read")
            else:
                write_private(folder / f"rank{rank}.{name}", content)
        children = [child for child in sessions[pid] if child != pid][:MAX_CHILDREN]
        write_private(proc / f"rank{rank}.children", "".join(map(_child_line, children)).encode())


def _child_line(pid: int) -> str:
    thread = processes.read_main_thread(pid)
    if thread is None:
        return f"{pid} gone\n"
    content = processes.read_file(f"/proc/{pid}/cmdline") or b""
    command = content.replace(b"\0", b" ").decode(errors="replace")[:MAX_COMMAND_CHARACTERS].strip()
    wchan = processes.read_wchan(pid) or "-"
    return f"{pid} {thread.state} cpu={thread.cpu_seconds:.2f}s wchan={wchan} {command}\n"
