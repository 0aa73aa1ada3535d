"""What a stuck rank waits for, as a clause: from the wait itself, and from the Python calls around it.

Called by `runtime.supervisor.detection` before stacks are known, and by `watchdog.diagnosis` with them. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from grpo_run.watchdog.text import join_words, rank_names
from grpo_run.watchdog.waits.looks import Wait, WaitKind
from grpo_run.watchdog.waits.proof import StuckRank

ANOTHER_THREAD = "a lock, a queue or another thread, and no thread that runs can wake it"
"""What is known of a futex without a stack."""

_LIBRARY_CALLS = (
    ("queue.py", "get", "a queue that no running thread can feed"),
    ("queue.py", "put", "a full queue that no running thread can empty"),
    ("queue.py", "join", "the tasks of a queue that no running thread can finish"),
    ("futures/_base.py", "result", "a future that no running thread can complete"),
    ("futures/_base.py", "exception", "a future that no running thread can complete"),
    ("futures/_base.py", "wait", "futures that no running thread can complete"),
    ("futures/_base.py", "as_completed", "futures that no running thread can complete"),
    ("threading.py", "join", "a thread that cannot end"),
    ("threading.py", "_shutdown", "a thread that cannot end"),
    ("threading.py", "wait_for", "a condition that no running thread can notify"),
    ("threading.py", "wait", "an event or a condition that no running thread can set"),
    ("threading.py", "acquire", "a semaphore that no running thread can release"),
)
"""Calls of the standard library around a futex: the end of the file's name, the function, what it waits for.
"""
_LIBRARY_FILES = frozenset({"threading.py", "queue.py", "_base.py", "thread.py"})
_LOCK = "a lock that no running thread can release"


def describe_stuck(stuck: Mapping[int, StuckRank], *, now: float, exiting: bool = False) -> str:
    """Return the sentence of a finding.

    Args:
        stuck: by rank; at least one.
        now: monotonic seconds.
        exiting: the scripts have run their last line.
    """
    clauses: dict[str, list[int]] = {}
    for rank, found in sorted(stuck.items()):
        clauses.setdefault(_clause(found, now), []).append(rank)
    parts: list[str] = []
    for clause, ranks in clauses.items():
        subject = rank_names(ranks, capitalize=not parts)
        end = " did not exit after the script's last line and" if exiting else ""
        parts.append(f"{subject}{end} {'wait' if len(ranks) > 1 else 'waits'} for {clause}")
    return f"{join_words(parts)}."


def name_lock(calls: Iterable[tuple[str, str]]) -> str:
    """Return what a thread in a futex waits for, in place of `ANOTHER_THREAD`.

    Args:
        calls: file and function of each call of the thread, innermost first.
    """
    found = ""
    for file, function in calls:
        if file.replace("\\", "/").rpartition("/")[2] not in _LIBRARY_FILES:
            break
        found = next(
            (what for end, name, what in _LIBRARY_CALLS if file.endswith(end) and name == function), found
        )
    return found or _LOCK


def _clause(found: StuckRank, now: float) -> str:
    what = _what(found.wait)
    if found.by_stop:
        what = f"{what}, while a process that it needs is stopped"
    if math.isfinite(found.until_seconds):
        return f"{what}, and nothing else runs in it for another {found.until_seconds - now:,.0f} s"
    return what


def _what(wait: Wait) -> str:
    if wait.kind is WaitKind.futex:
        return ANOTHER_THREAD
    if wait.kind is WaitKind.child:
        return "a child process that cannot end"
    return "the end of a sleep"
