"""Evidence of what ranks were doing, put on disk before any of them is killed.

    stacks/       rankN.txt (faulthandler)  rankN.native.txt (py-spy)  folded.txt
    collectives/  rankN.json (Flight Recorder)  rankN.notes.json
    memory/       rankN.status  node.txt  gpu.json
    proc/         rankN.stat  .wchan  .limits  .io  .children
    events.jsonl  the journal's last lines

Called by the supervisor between a fault and the kill. Stacks come from `faulthandler`, which each rank has
registered on a real-time signal: the C handler writes every thread's Python stack without the interpreter's
help, in about a millisecond. Where no signal can help (a stopped rank, one without the handler) or Python's
stack is not enough (a stuck interpreter) py-spy reads the rank's memory. Bounded in time and size; files are
0600, folders 0700. Does not interpret, and does not ask ranks for collectives: the caller brings them.
"""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.watchdog import processes
from grpo_run.watchdog.evidence.node_memory import read_gpus, read_node
from grpo_run.watchdog.evidence.py_spy import MAX_DUMP_BYTES, dump
from grpo_run.watchdog.evidence.stacks import Stack, fold, folded_text, parse_faulthandler, parse_py_spy

STACK_SIGNAL = signal.SIGRTMIN + 11
"""Free of meaning in libc, Python, torch and SLURM."""
DEADLINE_SECONDS = 5.0
STACK_DEADLINE_SECONDS = 0.15
QUIET_LOOKS, LOOK_SECONDS = 10, 0.002
"""A dump that does not end as a main thread's does is taken as whole after so many looks without growth."""
NATIVE_SECONDS = 2.5
"""py-spy with native frames reads every library's symbols: 0.4 s the first time with torch, more on a busy disk."""
GPU_SECONDS = 0.9
FOLDING_SECONDS = 0.1
"""Kept back from the deadline for parsing and folding what has come."""
MAX_FILE_BYTES = 1024 * 1024
MAX_COLLECTIVES_BYTES = 256 * 1024
MAX_EVENTS = 200
PROC_FILES = ("stat", "wchan", "limits", "io")
MAX_CHILDREN = 256
STOPPED_STATES = ("T", "t")
UNINTERRUPTIBLE = "D"
GONE_STATES = (None, "Z", "X")

Spy = Callable[[int, Path, bool, float], str | None]
"""Writes the stacks of (a pid) to (a file), (with native frames), within (seconds); returns what went wrong."""


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What `collect` could have.

    `missing` holds a sentence for what it could not. `stacks` are the threads of each rank that answered, or that
    wrote them as it crashed. `complete_at` is monotonic time.
    """

    missing: list[str]
    stacks: dict[int, tuple[Stack, ...]]
    complete_at: float


def collect(
    incident: Path,
    pids: Mapping[int, int],
    stack_files: Mapping[int, Path],
    *,
    interpreter_stuck: Collection[int] = (),
    recorder: Mapping[int, bytes] | None = None,
    notes: Mapping[int, object] | None = None,
    events: Sequence[str] = (),
    deadline_seconds: float = DEADLINE_SECONDS,
    spy: Spy | None = None,
) -> Evidence:
    """Ask the living ranks for their stacks, copy what arrives, and read what /proc and the driver tell.

    With every rank answering it takes some ten milliseconds, and what the GPU's driver takes.

    Args:
        incident: the incident's directory; the folders above are made in it.
        pids: living ranks.
        stack_files: where each rank's faulthandler writes, dead ranks included.
        interpreter_stuck: ranks whose native frames matter too.
        recorder: Flight Recorder JSON a rank, as the rank's worker server gave it.
        notes: the last collectives each rank noted, plain JSON values.
        events: the journal's last lines.
        deadline_seconds: for everything together.
        spy: py-spy, replaceable in tests.

    Raises:
        OSError: the incident's directory cannot be written.
    """
    deadline = time.monotonic() + deadline_seconds
    missing: list[str] = []
    folder = {name: incident / name for name in ("stacks", "collectives", "memory", "proc")}
    for path in folder.values():
        path.mkdir(mode=0o700, exist_ok=True)
    gpu = _Background(read_gpus)
    before = {rank: _size(file) for rank, file in stack_files.items()}
    asked, silent = _ask_for_stacks(pids, before, missing)
    _write_collectives(folder["collectives"], recorder or {}, notes or {}, missing)
    _write_processes(folder["memory"], folder["proc"], pids, missing)
    _write(folder["memory"] / "node.txt", read_node(next(iter(pids.values()), os.getpid())))
    _write(incident / "events.jsonl", _last_lines(events))
    late = _await_stacks(
        {rank: (stack_files[rank], before[rank]) for rank in asked},
        min(time.monotonic() + STACK_DEADLINE_SECONDS, deadline),
    )
    silent.update(dict.fromkeys(late, f"no stack within {STACK_DEADLINE_SECONDS} s"))
    answers = _copy_stacks(folder["stacks"], stack_files, {rank: before.get(rank, 0) for rank in pids})
    spied = _spy_on(
        {rank: pids[rank] for rank in {*silent, *(set(interpreter_stuck) & set(pids))}},
        folder["stacks"],
        spy or dump,
        deadline - FOLDING_SECONDS,
    )
    for rank, outcome in sorted(spied.items()):
        if isinstance(outcome, str):
            reason = f"{silent[rank]}, and py-spy: " if rank in silent else "no native stack: py-spy: "
            missing.append(f"rank {rank}: {reason}{outcome}")
        elif rank not in answers:
            answers[rank] = outcome
    stacks = dict(sorted(answers.items()))
    _write(folder["stacks"] / "folded.txt", folded_text(fold(stacks)).encode(errors="backslashreplace"))
    gpu.join(min(gpu.started + GPU_SECONDS, deadline))
    if gpu.result is None:
        missing.append(f"GPU memory: the driver did not answer within {GPU_SECONDS} s")
    elif "error" in gpu.result:
        missing.append(f"GPU memory: {gpu.result['error']}")
    else:
        _write(folder["memory"] / "gpu.json", json.dumps(gpu.result, indent=2).encode() + b"\n")
    return Evidence(missing=missing, stacks=stacks, complete_at=time.monotonic())


# stacks


def _ask_for_stacks(
    pids: Mapping[int, int], before: Mapping[int, int], missing: list[str]
) -> tuple[list[int], dict[int, str]]:
    """Signal who can answer; returns those ranks, and the living others with the reason."""
    asked, silent = [], {}
    for rank, pid in pids.items():
        state = processes.read_state(pid)
        if state in GONE_STATES:
            missing.append(f"rank {rank}: gone before its stack was asked for")
        elif state in STOPPED_STATES:
            silent[rank] = f"stopped (state {state}), so no signal reaches it"
        elif rank not in before:
            silent[rank] = "no file for its stacks"
        elif not _catches_stack_signal(pid):
            # the signal's default action would end the process, and it would be taken for the culprit
            silent[rank] = "not ready to write stacks"
        else:
            try:
                os.kill(pid, STACK_SIGNAL)
                asked.append(rank)
            except ProcessLookupError:
                missing.append(f"rank {rank}: gone before its stack was asked for")
            except PermissionError:
                silent[rank] = "another user's process, which may not be signalled"
    return asked, silent


def _await_stacks(files: Mapping[int, tuple[Path, int]], deadline: float) -> list[int]:
    """Wait until each file has grown by a whole dump; returns the ranks whose file has not grown at all."""
    last = {rank: size for rank, (_, size) in files.items()}
    quiet = dict.fromkeys(files, 0)
    waiting = set(files)
    while waiting and time.monotonic() < deadline:
        time.sleep(LOOK_SECONDS)
        for rank in sorted(waiting):
            file, before = files[rank]
            size = _size(file)
            quiet[rank] = quiet[rank] + 1 if size == last[rank] and size > before else 0
            last[rank] = size
            # a handler that lost its processor half-way has written other threads only: the main one comes last
            if quiet[rank] >= QUIET_LOOKS or (quiet[rank] and _ends_as_main_thread(file)):
                waiting.discard(rank)
    return [rank for rank, (_, before) in files.items() if last[rank] == before]


def _ends_as_main_thread(file: Path) -> bool:
    return _tail(file, 64).endswith((b" in <module>\n", b"\n  ...\n"))


def _copy_stacks(
    folder: Path, files: Mapping[int, Path], before: Mapping[int, int]
) -> dict[int, tuple[Stack, ...]]:
    """Keep the end of every rank's file; returns the dumps that living ranks have just written, and dead ones' last."""
    answers = {}
    for rank, file in files.items():
        size = _size(file)
        if not size:
            continue
        content = _tail(file, MAX_FILE_BYTES)
        _write(folder / f"rank{rank}.txt", content)
        fresh = (
            content[-min(len(content), size - before.get(rank, 0)) :] if size > before.get(rank, 0) else b""
        )
        if stacks := parse_faulthandler(fresh.decode(errors="replace")):
            answers[rank] = stacks
    return answers


def _catches_stack_signal(pid: int) -> bool:
    """Whether the process has a handler for the stack signal: bit N-1 of SigCgt in /proc/PID/status, proc(5)."""
    for line in (processes.read_file(f"/proc/{pid}/status") or b"").splitlines():
        if line.startswith(b"SigCgt:"):
            return bool(int(line.split()[1], 16) >> (STACK_SIGNAL - 1) & 1)
    return False


def _spy_on(
    pids: Mapping[int, int], folder: Path, spy: Spy, deadline: float
) -> dict[int, tuple[Stack, ...] | str]:
    """py-spy on all given ranks at once; its stacks, or why there are none, a rank."""

    def look(rank: int, pid: int) -> tuple[Stack, ...] | str:
        file = folder / f"rank{rank}.native.txt"
        # py-spy stops a process to unwind its native frames; one that is stopped, or deep in the kernel, cannot be
        pausable = processes.read_state(pid) not in (*STOPPED_STATES, UNINTERRUPTIBLE)
        trouble: str | None = None
        for native in (True, False) if pausable else (False,):
            left = deadline - time.monotonic()
            if left <= 0:
                return trouble or "no time was left"
            trouble = spy(pid, file, native, min(left, NATIVE_SECONDS) if native else left)
            if trouble is None:
                try:
                    return parse_py_spy(_tail(file, MAX_DUMP_BYTES).decode(errors="replace"))
                except OSError as error:  # it came too late: the incident has its name, and the folder moved
                    return str(error)
        file.unlink(missing_ok=True)
        return trouble or "nothing was tried"

    workers = {rank: _Background(look, rank, pid) for rank, pid in pids.items()}
    outcomes: dict[int, tuple[Stack, ...] | str] = {}
    for rank, worker in workers.items():
        worker.join(deadline)
        outcomes[rank] = worker.result if worker.result is not None else "no answer in time"
    return outcomes


# collectives, memory, processes, events


def _write_collectives(
    folder: Path, recorder: Mapping[int, bytes], notes: Mapping[int, object], missing: list[str]
) -> None:
    for rank, content in recorder.items():
        kept = _last_entries(content)
        if kept is None:
            missing.append(f"rank {rank}: its collective records are not readable ({len(content)} bytes)")
        else:
            _write(folder / f"rank{rank}.json", kept)
    for rank, note in notes.items():
        text = json.dumps(note, default=str).encode()
        if len(text) > MAX_COLLECTIVES_BYTES:
            missing.append(f"rank {rank}: its notes of collectives are too long ({len(text)} bytes)")
        else:
            _write(folder / f"rank{rank}.notes.json", text + b"\n")


def _last_entries(content: bytes) -> bytes | None:
    """The records cut to the bound by leaving out the oldest; None when they are no Flight Recorder JSON."""
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


def _write_processes(memory: Path, proc: Path, pids: Mapping[int, int], missing: list[str]) -> None:
    sessions = processes.members_by_session(list(pids.values()))
    for rank, pid in pids.items():
        for name, target in (("status", memory), *((name, proc) for name in PROC_FILES)):
            content = processes.read_file(f"/proc/{pid}/{name}")
            if content is None:
                missing.append(f"rank {rank}: /proc/{pid}/{name} could not be read")
            else:
                _write(target / f"rank{rank}.{name}", content)
        children = [child for child in sessions[pid] if child != pid][:MAX_CHILDREN]
        _write(proc / f"rank{rank}.children", "".join(map(_child_line, children)).encode())


def _child_line(pid: int) -> str:
    thread = processes.read_main_thread(pid)
    if thread is None:
        return f"{pid} gone\n"
    command = (
        (processes.read_file(f"/proc/{pid}/cmdline") or b"").replace(b"\0", b" ").decode(errors="replace")
    )
    wchan = processes.read_wchan(pid) or "-"
    return f"{pid} {thread.state} cpu={thread.cpu_seconds:.2f}s wchan={wchan} {command[:500].strip()}\n"


def _last_lines(events: Sequence[str]) -> bytes:
    lines = [line.rstrip("\n").encode(errors="backslashreplace") + b"\n" for line in events[-MAX_EVENTS:]]
    while sum(map(len, lines)) > MAX_FILE_BYTES:
        del lines[0]
    return b"".join(lines)


# files and threads


class _Background:
    """A function under way in a thread that nobody has to wait for. `result` is None until it has come back."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result = function(*arguments)

    def join(self, deadline: float) -> None:
        self._thread.join(max(0.0, deadline - time.monotonic()))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _tail(path: Path, count: int) -> bytes:
    with open(path, "rb") as file:
        file.seek(max(0, _size(path) - count))
        return file.read(count)


def _open(path: Path) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)


def _write(path: Path, content: bytes) -> None:
    with open(_open(path), "wb") as file:
        file.write(content)
