"""The options of the memory plan.

`--memory-plan` is the plan of a run from its first attempt on, as `NAME=VALUE,NAME`; after an out-of-memory
error the supervisor goes on from it. Chooses no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.memory_plan._remedies import OPTIONS, read_plan
from grpo_run.runtime.launch.option import OptionGroup, option
from grpo_run.watchdog.text import did_you_mean

_DOES = ", ".join(remedy.help or name for name, remedy in OPTIONS.items())


def parse_memory_plan(text: str) -> dict[str, Any]:
    """Parse the option.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is out of range.
    """
    plan: dict[str, Any] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        said = f"--memory-plan {item.strip() or repr(item)}"
        if name not in OPTIONS:
            raise ConfigError(f"{said}: unknown; {did_you_mean(name, OPTIONS)}")
        remedy = OPTIONS[name]
        is_switch = remedy.default is False
        if remedy.field in plan:
            raise ConfigError(f"--memory-plan {name}: given twice")
        if is_switch == bool(equals):
            raise ConfigError(f"{said}: expected {name}{' without a value' if is_switch else '=NUMBER'}")
        try:
            plan |= {remedy.field: remedy.default} | read_plan({remedy.field: is_switch or value})
        except pydantic.ValidationError as error:
            raise ConfigError(f"{said}: {error.errors()[0]['msg'].lower()}") from None
    return read_plan(plan)


@dataclass(frozen=True, kw_only=True)
class MemoryPlanSettings:
    """With which plan a run begins, and whether its changes may change the experiment.

    Raises:
        ConfigError: the plan is not valid.
    """

    NAME: ClassVar[str] = "memory_plan"
    plan: dict[str, Any] = option(
        dict, "--memory-plan", group=OptionGroup.training, metavar="NAME[=VALUE],...",
        read=parse_memory_plan,
        help=f"use less memory for the same update: {_DOES} (default: what the script has set, until a rank"
        " runs out of memory)",
    )  # fmt: skip
    allow_degrade: bool = option(
        False, "--allow-degrade", group=OptionGroup.training,
        help="after an out-of-memory error, shorten completions when no change of the memory plan is left"
        " that keeps the update (default: end the run and propose it)",
    )  # fmt: skip


SETTINGS = MemoryPlanSettings
