"""Stacks of threads: parsed from `faulthandler` and py-spy, reduced to the user's line, grouped over ranks.

Called by `stack_capture.py` (which captures the dumps), `collection.py` and the report. Pure; does not judge.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.watchdog.evidence.source import (
    BOOTSTRAP,
    LIBRARIES,
    STANDARD_LIBRARY,
    is_outside_frameworks,
    is_user_file,
)
from grpo_run.watchdog.text import rank_names
from grpo_run.watchdog.verdict import Location

NATIVE_SUFFIX = re.compile(r"\.(?:so[.\d]*|c|cc|cpp|cxx|cu|h|hpp|rs|S)$")

_HEADER = re.compile(r"(?:Current thread|Thread) (0x[0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'  File (?:"(.*)"|\?\?\?), line (\d+|\?\?\?) in (.*)$')
_SPY_PROCESS = re.compile(r"Process (\d+):")
_SPY_HEADER = re.compile(r'Thread (\w+) \([^)]*\)(?:: "(.*)")?$')
_SPY_FRAME = re.compile(r"    (.+) \((.*?)(?::(\d+))?\)$")


@dataclass(frozen=True, slots=True)
class Frame:
    """One call. `line` is 0 if unknown, as in native code; `file` is then a shared library, or ""."""

    file: str
    line: int
    function: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One thread's calls, innermost first. `thread` is its name if known, else its identifier."""

    thread: str
    frames: tuple[Frame, ...]
    main: bool


def parse_faulthandler(text: str) -> tuple[Stack, ...]:
    """Return the last dump that `faulthandler` has appended to a file.

    A dump begins with a thread that is not preceded by a blank line, or with a fatal error. Lines that are
    cut off at the beginning, a C stack and a list of extension modules are ignored.
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
            frames = None  # a C stack, or a crash message
        previous = line
    # a truncated heading and a fatal error without threads have empty dumps
    return _stacks(next((dump for dump in reversed(dumps) if dump), []))


def parse_py_spy(text: str) -> tuple[Stack, ...]:
    """Return the dump of one process printed by `py-spy dump --full-filenames`, including native frames.

    The main thread is the one of that name, or, before `threading` is imported, the one whose identifier is
    the process's.
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
    """Return the main thread's stack, or None."""
    return next((stack for stack in stacks if stack.main), None)


def user_location(stack: Stack) -> Location | None:
    """Return the line of the user's code that a thread is in.

    This is the innermost frame outside installed packages, the standard library and this project. Without one
    (a recipe has no script), it is the innermost frame outside the frameworks, such as
    `trl/trainer/grpo_trainer.py`. None if there is neither.
    """
    for accepts in (is_user_file, is_outside_frameworks):
        for frame in stack.frames:
            if _is_source(frame) and accepts(frame.file):
                return Location(file=frame.file, line=frame.line, function=frame.function)
    return None


def group_by_stack(stacks_by_rank: Mapping[int, Sequence[Stack]]) -> list[tuple[tuple[int, ...], Stack]]:
    """Group ranks whose main threads have the same stack; the largest group first, then by lowest rank."""
    groups: dict[tuple[Frame, ...], list[int]] = {}
    example: dict[tuple[Frame, ...], Stack] = {}
    for rank in sorted(stacks_by_rank):
        stack = main_stack(stacks_by_rank[rank])
        if stack is not None:
            groups.setdefault(stack.frames, []).append(rank)
            example.setdefault(stack.frames, stack)
    ordered = sorted(groups, key=lambda frames: (-len(groups[frames]), groups[frames]))
    return [(tuple(groups[frames]), example[frames]) for frames in ordered]


def format_stack_groups(groups: Sequence[tuple[Sequence[int], Stack]]) -> str:
    """Return the grouped stacks as text, the innermost call first; `>` marks the user's line."""
    parts = []
    for ranks, stack in groups:
        location = user_location(stack)
        lines = [f"{rank_names(ranks, ranges=False)}:"]
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


def short_file(file: str) -> str:
    """Return a path relative to installed packages or the standard library; user paths are unchanged."""
    for folder in (*LIBRARIES, *STANDARD_LIBRARY):
        _, found, rest = file.rpartition(folder)
        if found:
            return rest
    return file


def _stacks(threads: Sequence[tuple[str, Sequence[Frame]]], main: int = -1) -> tuple[Stack, ...]:
    if main < 0 and threads:
        bootstrapped = (
            index
            for index, (_, frames) in enumerate(threads)
            if any(frame.file == BOOTSTRAP and frame.function == "main" for frame in frames)
        )
        # the interpreter lists the newest thread first
        main = next(bootstrapped, len(threads) - 1)
    return tuple(
        Stack(thread, tuple(frames), index == main) for index, (thread, frames) in enumerate(threads)
    )


def _is_source(frame: Frame) -> bool:
    return frame.line > 0 and bool(frame.file) and not NATIVE_SUFFIX.search(frame.file)


def _place(frame: Frame) -> str:
    if not frame.line:
        return Path(frame.file).name or "?"
    return f"{short_file(frame.file)}:{frame.line}"
