"""The option `--memory-plan`: the plan of a run from its first attempt on, as `NAME=VALUE,NAME`.

After an out-of-memory error the supervisor goes on from it. Read by `config.py`. Chooses no plan.
"""

from __future__ import annotations

import difflib

import pydantic

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.memory.plan import OPTION_NAMES, MemoryPlan

SWITCHES = frozenset({"checkpointing", "offload", "expandable-segments", "vllm-sleep"})
"""Names without a value."""
MEMORY_PLAN_HELP = (
    "micro-batch=N divides per_device_train_batch_size and multiplies gradient_accumulation_steps",
    "sub-batches=N splits calls of generation",
    "checkpointing turns on gradient checkpointing",
    "offload moves DeepSpeed's optimizer to host memory",
    "expandable-segments",
    "vllm-share=SHARE",
    "vllm-sleep",
)
"""What each does, for the help."""


def parse_memory_plan(text: str) -> MemoryPlan:
    """Parse the option.

    Raises:
        ConfigError: a name is unknown or given twice, or a value is out of range.
    """
    fields: dict[str, object] = {}
    for item in text.split(","):
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
