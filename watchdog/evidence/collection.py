"""Collect evidence about ranks before any of them is terminated.

    stacks/       rankN.txt (faulthandler)  rankN.native.txt (py-spy)  folded.txt
    collectives/  rankN.json (Flight Recorder)  rankN.notes.json (collective log)
    memory/       rankN.status  phases.json  node.txt  gpu.json
    proc/         rankN.stat  .wchan  .limits  .io  .children
    events.jsonl  the last lines of the journal

Called by the incident investigation between a fault and the termination of the ranks. Bounded in time and
size; files have mode 0600, directories 0700. Does not interpret, and does not ask ranks for their
collectives: the caller passes them in.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence import stack_capture
from grpo_run.watchdog.evidence._node_memory import BackgroundCall, read_gpu_memory, read_node_memory
from grpo_run.watchdog.evidence.incident_files import MAX_FILE_BYTES, write_private
from grpo_run.watchdog.evidence.stacks import Stack, format_stack_groups, group_by_stack

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
    table = processes.read_processes()
    for rank, pid in pids.items():
        for name, folder in (("status", memory), *((name, proc) for name in PROC_FILES)):
            content = processes.read_file(f"/proc/{pid}/{name}")
            if content is None:
                missing.append(f"rank {rank}: /proc/{pid}/{name} could not be read")
            else:
                write_private(folder / f"rank{rank}.{name}", content)
        children = [one.pid for one in table.values() if one.session == pid != one.pid][:MAX_CHILDREN]
        write_private(proc / f"rank{rank}.children", "".join(map(_child_line, children)).encode())


def _child_line(pid: int) -> str:
    thread = processes.read_main_thread(pid)
    if thread is None:
        return f"{pid} gone\n"
    command = processes.read_arguments(pid)[:MAX_COMMAND_CHARACTERS].strip()
    wchan = processes.read_wchan(pid) or "-"
    return f"{pid} {thread.state} cpu={thread.cpu_seconds:.2f}s wchan={wchan} {command}\n"


DEADLINE_SECONDS = 5.0
"""For everything together."""
GPU_SECONDS = 0.9
GROUPING_SECONDS = 0.1
"""Reserved before the deadline for parsing and grouping the stacks that have arrived."""
MAX_COLLECTIVES_BYTES = 256 * 1024
MAX_EVENTS = 200


@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of `collect`.

    `missing` holds one sentence for each piece of evidence that could not be collected. `stacks` are the
    threads of each rank that answered, or that wrote them when it crashed.
    """

    missing: list[str]
    stacks: dict[int, tuple[Stack, ...]]


def collect(
    incident: Path,
    pids: Mapping[int, int],
    stack_files: Mapping[int, Path],
    *,
    interpreter_stuck: Collection[int] = (),
    recordings: Mapping[int, bytes] | None = None,
    collective_logs: Mapping[int, object] | None = None,
    rank_memory: Mapping[int, object] | None = None,
    events: Sequence[str] = (),
) -> Collected:
    """Ask running ranks for their stacks, copy what arrives, and read /proc and the GPU driver.

    Takes some ten milliseconds if every rank answers, plus the time of the GPU driver.

    Args:
        incident: the incident's directory; the directories above are created in it.
        pids: running ranks.
        stack_files: where each rank's faulthandler writes, including ranks that have exited.
        interpreter_stuck: ranks whose native frames are needed too.
        recordings: Flight Recorder JSON by rank, as the rank's worker server sent it.
        collective_logs: the last entries of each rank's collective log, as plain JSON values.
        rank_memory: what each rank has measured of its memory by phase, as plain JSON values.
        events: last lines of the journal.

    Raises:
        OSError: the incident's directory cannot be written.
    """
    deadline = time.monotonic() + DEADLINE_SECONDS
    missing: list[str] = []
    folders = {name: incident / name for name in ("stacks", "collectives", "memory", "proc")}
    for path in folders.values():
        path.mkdir(mode=0o700, exist_ok=True)
    gpu = BackgroundCall(read_gpu_memory)
    capture = stack_capture.StackCapture(folders["stacks"], pids, stack_files)
    capture.request()
    _write_collectives(folders["collectives"], recordings or {}, collective_logs or {}, missing)
    write_process_files(folders["memory"], folders["proc"], pids, missing)
    write_private(folders["memory"] / "node.txt", read_node_memory(next(iter(pids.values()), os.getpid())))
    phases = json.dumps({str(rank): memory for rank, memory in (rank_memory or {}).items()}, indent=2)
    write_private(folders["memory"] / "phases.json", phases.encode() + b"\n")
    write_private(incident / "events.jsonl", _last_lines(events))
    stacks = capture.finish(interpreter_stuck, deadline, deadline - GROUPING_SECONDS)
    missing.extend(capture.missing)
    folded = format_stack_groups(group_by_stack(stacks))
    write_private(folders["stacks"] / "folded.txt", folded.encode(errors="backslashreplace"))
    gpu.join(min(gpu.started + GPU_SECONDS, deadline))
    if gpu.result is None:
        missing.append(f"GPU memory: the driver did not answer within {GPU_SECONDS} s")
    elif "error" in gpu.result:
        missing.append(f"GPU memory: {gpu.result['error']}")
    else:
        write_private(folders["memory"] / "gpu.json", json.dumps(gpu.result, indent=2).encode() + b"\n")
    return Collected(missing=missing, stacks=stacks)


def _write_collectives(
    folder: Path, recordings: Mapping[int, bytes], logs: Mapping[int, object], missing: list[str]
) -> None:
    for rank, content in recordings.items():
        kept = _last_entries(content)
        if kept is None:
            missing.append(
                f"rank {rank}: its Flight Recorder entries are not readable ({len(content)} bytes)"
            )
        else:
            write_private(folder / f"rank{rank}.json", kept)
    for rank, log in logs.items():
        text = json.dumps(log, default=str).encode()
        if len(text) > MAX_COLLECTIVES_BYTES:
            missing.append(f"rank {rank}: its collective log is too long ({len(text)} bytes)")
        else:
            write_private(folder / f"rank{rank}.notes.json", text + b"\n")


def _last_entries(content: bytes) -> bytes | None:
    """Drop the oldest entries until the recording fits; None if it is not Flight Recorder JSON."""
    try:
        value: Any = json.loads(content)
    except ValueError:
        return None
    if len(content) <= MAX_COLLECTIVES_BYTES:
        return content
    if not isinstance(value, dict) or not isinstance(value.get("entries"), list):
        return None
    while len(content) > MAX_COLLECTIVES_BYTES and value["entries"]:
        entries = value["entries"]
        value = {**value, "entries": entries[len(entries) // 2 + 1 :], "truncated": True}
        content = json.dumps(value, separators=(",", ":")).encode()
    return content if len(content) <= MAX_COLLECTIVES_BYTES else None


def _last_lines(events: Sequence[str]) -> bytes:
    lines = [line.rstrip("\n").encode(errors="backslashreplace") + b"\n" for line in events[-MAX_EVENTS:]]
    while sum(map(len, lines)) > MAX_FILE_BYTES:
        del lines[0]
    return b"".join(lines)
