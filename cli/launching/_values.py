"""Checks of single option values: sample masking, snapshots, deadlines, shown ranks, memory plan.

`--memory-plan` sets the plan of a run from its first attempt on, as `NAME=VALUE,NAME`; after an
out-of-memory error the supervisor goes on from it. Called by `command.py`. Chooses no plan.
"""

from __future__ import annotations

import argparse
import difflib
import math
import os
import sys
from dataclasses import replace
from pathlib import Path

import pydantic

from grpo_run.cli.launching._torchrun import handler_seconds
from grpo_run.runtime.errors import ConfigError, UsageError
from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.launch.config import MaskingSettings, Output, Timeouts
from grpo_run.runtime.memory.plan import OPTION_NAMES, MemoryPlan
from grpo_run.runtime.snapshots.ownership import private_folder
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

DEADLINE_FIELDS = {
    "deadline_floor": "floor_seconds",
    "deadline_ceiling": "ceiling_seconds",
    "deadline_first": "first_seconds",
    "deadline_exit": "exit_seconds",
}


def timeouts(options: argparse.Namespace) -> Timeouts:
    """Return the time limits. `--stop-timeout` is also that of the handlers of a script that trains by
    itself; otherwise torchrun's `--shutdown-timeout` is."""
    limits = Timeouts(vote_seconds=options.vote_timeout, tool_seconds=options.tool_timeout)
    handlers = handler_seconds(options)
    if options.stop_timeout is not None:
        return replace(limits, stop_seconds=options.stop_timeout, handler_seconds=options.stop_timeout)
    return limits if handlers is None else replace(limits, handler_seconds=handlers)


def masking(options: argparse.Namespace) -> MaskingSettings:
    """Return which samples are excluded.

    Raises:
        ConfigError: a value is out of range.
    """
    text = options.mask_capped
    ends = () if text == "none" else tuple(word.strip() for word in text.split(","))
    return MaskingSettings(repeat_rewards_above=options.repeat_rewards_above, masked_ends=ends)


def snapshot_every(text: str) -> int | None:
    """Return the number of steps between snapshots; None for `auto`.

    Raises:
        UsageError: it is neither a number nor `auto`.
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise UsageError(f"--snapshot-every {text}: give a number of steps, 0 for none, or auto")
    return int(text)


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


def deadlines(options: argparse.Namespace) -> DeadlineSettings:
    """Return the bounds of the learned deadlines; an option that was not given keeps its default.

    Raises:
        UsageError: a value is not a positive number, or two values contradict each other.
    """
    given = {}
    for name, field in DEADLINE_FIELDS.items():
        value = getattr(options, name)
        if value is None:
            continue
        if not (math.isfinite(value) and value > 0):
            raise UsageError(f"--{name.replace('_', '-')} {value:g}: must be a number of seconds above 0")
        given[field] = value
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


SWITCHES = frozenset({"checkpointing", "offload", "expandable-segments", "vllm-sleep"})
"""Names without a value."""
HELP = (
    "micro-batch=N divides per_device_train_batch_size and multiplies gradient_accumulation_steps",
    "sub-batches=N splits calls of generation",
    "checkpointing turns on gradient checkpointing",
    "offload moves DeepSpeed's optimizer to host memory",
    "expandable-segments",
    "vllm-share=SHARE",
    "vllm-sleep",
)
"""What each does, for the help."""


def parse_memory_plan(text: str | None) -> MemoryPlan:
    """Parse the option.

    Args:
        text: None if it was not given.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is out of range.
    """
    fields: dict[str, object] = {}
    for item in (text or "").split(",") if text is not None else ():
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in OPTION_NAMES:
            near = difflib.get_close_matches(name, OPTION_NAMES, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(OPTION_NAMES)}"
            raise ConfigError(f"--memory-plan {item.strip() or repr(item)}: unknown; {hint}")
        field = OPTION_NAMES[name]
        if field in fields:
            raise ConfigError(f"--memory-plan {name}: given twice")
        if (name in SWITCHES) == bool(equals):
            raise ConfigError(f"--memory-plan {item.strip()}: expected {_expected(name)}")
        fields[field] = True if name in SWITCHES else value
        try:
            MemoryPlan.model_validate({field: fields[field]})
        except pydantic.ValidationError as error:
            raise ConfigError(f"--memory-plan {item.strip()}: {error.errors()[0]['msg'].lower()}") from None
    return MemoryPlan.model_validate(fields)


def _expected(name: str) -> str:
    return f"{name} without a value" if name in SWITCHES else f"{name}=NUMBER"
