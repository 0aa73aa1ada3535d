"""Settings that are made of several options or of this machine: time limits, deadlines, the folder of
snapshots, which ranks are shown.

Called by `_configuration.py`. Declares no option.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch.config import DeadlineOptions, Output, Timeouts
from grpo_run.runtime.launch.option import options_of
from grpo_run.runtime.snapshots.ownership import private_folder
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def timeouts(limits: Timeouts, handlers: float | None) -> Timeouts:
    """Return the time limits with that of the handlers of a script that trains by itself.

    Args:
        handlers: torchrun's limit for them, in seconds; None if it was not given. `--stop-timeout` goes
            before it.
    """
    if limits.stop_is_given or handlers is None:
        return limits
    return replace(limits, handler_seconds=handlers)


def snapshot_folder(text: str) -> Path | None:
    """Return the folder of staging areas; None when checkpoints are written directly to disk.

    Args:
        text: the option's value: `off`, or a directory on a file system in memory.

    Raises:
        UsageError: the named directory does not exist or cannot be used.
    """
    if text == "off":
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


def deadlines(options: DeadlineOptions) -> DeadlineSettings:
    """Return the bounds of the learned deadlines; an option that was not given keeps its default.

    Raises:
        UsageError: a value is not a positive number, or two values contradict each other.
    """
    given = {name: value for name, value in vars(options).items() if value is not None}
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


def shown_ranks(text: str | None, output: Output, world_size: int) -> frozenset[int]:
    """Return the ranks whose output is shown.

    Args:
        text: `none`, `all`, or numbers separated by commas; None for 0 on a terminal, and all elsewhere.
        output: how it is shown.
        world_size: the largest number of ranks that the run may have.

    Raises:
        UsageError: the value is none of these, or names a rank that the run does not have.
    """
    if text is None:
        text = "0" if output is Output.lines else "all"
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
