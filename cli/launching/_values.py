"""Settings that are made of several options or of this machine: time limits, deadlines, the folder of
snapshots, what is shown.

Called by `command.py`. Declares no option.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch.config import DeadlineOptions, Output, Timeouts
from grpo_run.runtime.launch.option import given_values, options_of
from grpo_run.runtime.snapshots.ownership import private_folder
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def timeouts(given: Mapping[str, Any], handlers: float | None) -> Timeouts:
    """Return the time limits.

    Args:
        given: values of the command line, by option.
        handlers: torchrun's limit for the handlers of a script that trains by itself, in seconds; None if it
            was not given. `--stop-timeout` goes before it.
    """
    limits = Timeouts(**given_values(Timeouts, given))
    if given.get("--stop-timeout") is not None:
        return replace(limits, handler_seconds=limits.stop_seconds)
    return limits if handlers is None else replace(limits, handler_seconds=handlers)


def snapshot_folder(text: str, nodes: int) -> Path | None:
    """Return the folder of staging areas; None when checkpoints are written directly to disk.

    Args:
        text: the option's value: `off`, or a directory on a file system in memory.
        nodes: the largest number of nodes; with several, no node would stage a complete checkpoint.

    Raises:
        UsageError: the named directory does not exist or cannot be used.
    """
    if text == "off" or nodes > 1:
        return None
    root = Path(text).absolute()
    is_default = text == str(SHARED_MEMORY_ROOT)
    if not root.is_dir():
        if is_default:
            return None  # this machine has no such file system
        raise UsageError(
            f"--snapshot-dir {text}: not a directory; give one on a file system in memory, or off"
        )
    found = private_folder(root)
    if found is None and not is_default:
        raise UsageError(f"--snapshot-dir {text}: a folder that only this user can access cannot be created")
    return found


def deadlines(values: Mapping[str, Any]) -> DeadlineSettings:
    """Return the bounds of the learned deadlines; an option that was not given keeps its default.

    Raises:
        UsageError: a value is not a positive number, or two values contradict each other.
    """
    given = given_values(DeadlineOptions, values)
    for field, declared in options_of(DeadlineOptions):
        value = given.get(field.name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{declared.name} {value:g}: must be a number of seconds above 0")
    bounds = DeadlineSettings()
    floor, ceiling = (
        given.get("floor_seconds", bounds.floor_seconds),
        given.get("ceiling_seconds", bounds.ceiling_seconds),
    )
    if ceiling < bounds.first_floor_seconds:
        raise UsageError(
            f"--deadline-ceiling {ceiling:g}: must be at least {bounds.first_floor_seconds:g} seconds, the"
            " least that the first occurrence of a phase is given"
        )
    if floor > ceiling:
        raise UsageError(f"--deadline-floor {floor:g}: must not be above --deadline-ceiling ({ceiling:g} s)")
    return DeadlineSettings(**given)


def output() -> Output:
    """Return how the output of ranks is shown, from what standard output and standard error lead to."""
    if sys.stdout is None or os.isatty(1):
        return Output.lines
    return Output.merged if sys.stderr is None or os.path.sameopenfile(1, 2) else Output.apart


def shown_ranks(text: str | None, output: Output, world_size: int) -> frozenset[int]:
    """Return the ranks whose output is shown.

    Args:
        text: `none`, `all`, or numbers separated by commas; None for none on a terminal, and all elsewhere.
        output: how it is shown.
        world_size: the largest number of ranks that the run may have.

    Raises:
        UsageError: the value is none of these, or names a rank that the run does not have.
    """
    if text is None:
        text = "none" if output is Output.lines else "all"
    if text == "none":
        return frozenset()
    if text == "all":
        return frozenset(range(world_size))
    words = text.split(",")
    if not all(word.isdecimal() for word in words):
        raise UsageError(f"--show-ranks {text}: give numbers separated by commas, all or none")
    ranks = frozenset(map(int, words))
    if max(ranks) >= world_size:
        have = "the only rank is 0" if world_size == 1 else f"ranks are 0 to {world_size - 1}"
        raise UsageError(f"--show-ranks {text}: there is no rank {max(ranks)}; {have}")
    return ranks
