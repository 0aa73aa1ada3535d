"""Stacks of threads: read from what `faulthandler` and py-spy write, reduced to the user's line, folded over ranks.

Called by `collection.py` (which asks for the dumps) and by the report. Pure. Does not ask anybody for a stack and
does not judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.watchdog.evidence.source import BOOTSTRAP, LIBRARIES, STANDARD_LIBRARY, is_telling, is_users
from grpo_run.watchdog.verdict import Location

NATIVE_SUFFIX = re.compile(r"\.(?:so[.\d]*|c|cc|cpp|cxx|cu|h|hpp|rs|S)$")

_HEADER = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)$')
_SPY_PROCESS = re.compile(r"Process (\d+):")
_SPY_HEADER = re.compile(r'Thread (\w+) \([^)]*\)(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"    (.+) \((.*?)(?::(\d+))?\)$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. `line` is 0 where none is known, as in native code; `file` is then a shared library, or ""."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's calls, innermost first. `thread` is its name where known, else its identifier."""

    thread: str
    frames: tuple[Frame, ...]
    main: bool


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """The last dump in what `faulthandler` has appended to a file.

    A dump begins with a thread that no blank line comes before, or with a fatal error. Lines cut off at the
    text's beginning, and what a C stack or a list of extension modules adds after a crash, are passed over.
    """
    dumps: list[list[tuple[str, list[Frame]]]] = [[]]
    frames: list[Frame] | None = None
    previous = "start"
    for line in text.splitlines():
        if line.startswith("Fatal Python error"):
            dumps.append([])
            frames = None
        elif header := _HEADER.match(line):
            if previous:
                dumps.append([])
            frames = []
            dumps[-1].append((header[2] or header[1], frames))
        elif frames is not None and (frame := _FRAME.match(line)):
            number = int(frame[2]) if frame[2].isdigit() else 0
            frames.append(Frame(frame[1] or "", number, frame[3]))
        elif line and not line.startswith("  "):
            frames = None  # a C stack, or words of a crash
        previous = line
    # a heading that was cut off has an empty dump of its own; so has a fatal error without threads
    return _stacks(next((dump for dump in reversed(dumps) if dump), []))


def parse_py_spy(text: str) -> tuple[Stack, ...]:
    """The dump of one process that `py-spy dump --full-filenames` prints, native frames included.

    Its main thread is the one named so, or, while `threading` is not yet imported, the one whose identifier is the
    process's.
    """
    process = _SPY_PROCESS.match(text)
    threads: list[tuple[str, list[Frame]]] = []
    main = -1
    for line in text.splitlines():
        if header := _SPY_HEADER.match(line):
            if header[2] == "MainThread" or (process is not None and header[1] == process[1]):
                main = len(threads)
            threads.append((header[2] or header[1], []))
        elif threads and (frame := _SPY_FRAME.match(line)):
            threads[-1][1].append(Frame(frame[2], int(frame[3] or 0), frame[1]))
    return _stacks(threads, main)


def main_stack(stacks: Sequence[Stack]) -> Stack | None:
    """The main thread's."""
    return next((stack for stack in stacks if stack.main), None)


def user_location(stack: Stack) -> Location | None:
    """The line of the user's code that a thread is in.

    That is the innermost frame outside installed packages, the standard library and this project; failing that
    (a recipe has no script) the innermost one outside torch, accelerate, this project and the standard library, as
    `trl/trainer/grpo_trainer.py`. None where neither is found.
    """
    for belongs in (is_users, is_telling):
        for frame in stack.frames:
            if _is_source(frame) and belongs(frame.file):
                return Location(file=frame.file, line=frame.line, function=frame.function)
    return None


def fold(stacks_by_rank: Mapping[int, Sequence[Stack]]) -> list[tuple[tuple[int, ...], Stack]]:
    """Ranks whose main threads stand at the same calls, together; the biggest group first, then by lowest rank."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    example: dict[tuple[Frame, ...], Stack] = {}
    for rank in sorted(stacks_by_rank):
        stack = main_stack(stacks_by_rank[rank])
        if stack is not None:
            groups.setdefault(stack.frames, []).append(rank)
            example.setdefault(stack.frames, stack)
    ordered = sorted(groups, key=lambda frames: (-len(groups[frames]), groups[frames]))
    return [(tuple(groups[frames]), example[frames]) for frames in ordered]


def folded_text(groups: Sequence[tuple[Sequence[int], Stack]]) -> str:
    """The folded stacks to read, the innermost call first; `>` marks the user's line."""
    parts = []
    for ranks, stack in groups:
        location = user_location(stack)
        lines = [f"{ranks_text(ranks)}:"]
        marked = False
        for frame in stack.frames:
            here = location == Location(file=frame.file, line=frame.line, function=frame.function)
            mark = ">" if here and not marked else " "
            marked = marked or here
            lines.append(f"{mark} {frame.function} ({_place(frame)})")
        if not stack.frames:
            lines.append("  <no Python frame>")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def ranks_text(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0, 2, 3`."""
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def short_file(file: str) -> str:
    """A file's path without the folder of installed packages or of the standard library; the user's stays whole."""
    for folder in (*LIBRARIES, *STANDARD_LIBRARY):
        _, found, rest = file.rpartition(folder)
        if found:
            return rest
    return file


def _stacks(threads: Sequence[tuple[str, Sequence[Frame]]], main: int = -1) -> tuple[Stack, ...]:
    if main < 0 and threads:
        booted = (
            place
            for place, (_, frames) in enumerate(threads)
            if any(frame.file == BOOTSTRAP and frame.function == "main" for frame in frames)
        )
        # the interpreter lists its newest thread first
        main = next(booted, len(threads) - 1)
    return tuple(
        Stack(thread, tuple(frames), place == main) for place, (thread, frames) in enumerate(threads)
    )


def _is_source(frame: Frame) -> bool:
    return frame.line > 0 and bool(frame.file) and not NATIVE_SUFFIX.search(frame.file)


def _place(frame: Frame) -> str:
    if not frame.line:
        return Path(frame.file).name or "?"
    return f"{short_file(frame.file)}:{frame.line}"
