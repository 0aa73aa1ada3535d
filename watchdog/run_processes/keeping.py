"""Which of a run's processes the user wants to keep (`--keep`), with everything that they have started.

Pure, except that command lines are read from /proc. Ends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

from grpo_run.watchdog.processes import ProcessStat, descendants, read_arguments

RANK_TITLE = "grpo-run rank "
"""How the command line of a rank begins, and that of its forks."""
MAX_NAME_CHARACTERS = 15
"""The kernel truncates process names."""


def is_fork_of_rank(arguments: str) -> bool:
    """Return whether a command line is that of a rank, or of a fork of it that runs no program of its own."""
    return arguments.startswith(RANK_TITLE)


def matches(name: str, arguments: str, patterns: Sequence[str]) -> bool:
    """Return whether a process is meant by one of the patterns.

    Args:
        name: as the kernel shows it, at most 15 characters.
        arguments: its command line, separated by spaces.
        patterns: a name, or a shell pattern (`*`, `?`, `[…]`) that matches the whole command line.
    """
    if is_fork_of_rank(arguments):
        return False
    return any(
        name == pattern[:MAX_NAME_CHARACTERS] or fnmatchcase(arguments, pattern) for pattern in patterns
    )


def without_kept(processes: Mapping[int, ProcessStat], patterns: Sequence[str]) -> dict[int, ProcessStat]:
    """Return the processes that are not kept, by pid.

    Args:
        processes: of a run, by pid.
        patterns: of `--keep`.
    """
    if not patterns:
        return dict(processes)
    meant = [pid for pid, one in processes.items() if matches(one.name, read_arguments(pid), patterns)]
    kept = descendants(processes, meant)
    return {pid: process for pid, process in processes.items() if pid not in kept}
