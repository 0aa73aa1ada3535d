"""The options of the memory plan.

`--memory-plan` is the plan of a run from its first attempt on, as `NAME=VALUE,NAME`; after an out-of-memory
error the supervisor goes on from it. Chooses no plan.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from typing import ClassVar

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.memory_plan._plan import OPTION_OF, MemoryPlan
from grpo_run.runtime.launch.option import OptionGroup, option

FIELDS = {name: field for field, name in OPTION_OF.items()}
SWITCHES = {name for name, field in FIELDS.items() if MemoryPlan.model_fields[field].default is False}
"""Names without a value."""
_DOES = ", ".join(MemoryPlan.model_fields[field].description or name for name, field in FIELDS.items())


def parse_memory_plan(text: str) -> MemoryPlan:
    """Parse the option.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is out of range.
    """
    fields: dict[str, object] = {}
    for item in text.split(","):
        name, equals, value = (part.strip() for part in item.partition("="))
        if name not in FIELDS:
            near = difflib.get_close_matches(name, FIELDS, 1)
            hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(FIELDS)}"
            raise ConfigError(f"--memory-plan {item.strip() or repr(item)}: unknown; {hint}")
        field = FIELDS[name]
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


@dataclass(frozen=True, kw_only=True)
class MemoryPlanSettings:
    """With which plan a run begins, and whether its changes may change the experiment.

    Raises:
        ConfigError: the plan is not valid.
    """

    NAME: ClassVar[str] = "memory_plan"
    plan: MemoryPlan = option(
        MemoryPlan, "--memory-plan", group=OptionGroup.training, metavar="NAME[=VALUE],...",
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
