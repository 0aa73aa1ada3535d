"""The memory plan of a run: what is changed so that the next attempt needs less memory, for the same update.

The supervisor chooses it after an out-of-memory error (`runtime.supervisor.memory`) and passes it to the
ranks in their settings; the ranks apply it to the trainer's configuration. The default changes nothing. The
values are absolute: they are applied to what the script itself has set, never to what an earlier plan has
made of it.

`MemoryRecord` replays the changes from the journal, as a part of `runtime.history.history`: a plan belongs to
the run, so later launches of the run keep it. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pydantic

from grpo_run.runtime.event import Event

OPTION_NAMES = {
    "micro-batch": "micro_batch_divisor",
    "sub-batches": "generation_sub_batches",
    "checkpointing": "gradient_checkpointing",
    "offload": "optimizer_offload",
    "expandable-segments": "expandable_segments",
    "vllm-share": "vllm_gpu_memory_utilization",
    "vllm-sleep": "vllm_sleep",
}
"""Names of `--memory-plan`, and the fields of a plan."""
_NAMES_OF_FIELDS = {field: name for name, field in OPTION_NAMES.items()}
ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of torch's allocator, before and since torch 2.10, read when a process first uses its GPU. vLLM
inspects the first only, so both are set.
"""
SEGMENTS = "expandable_segments"


class MemoryPlan(pydantic.BaseModel):
    """What is changed to lower the peak of memory; every field is at its default if it is not changed."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    micro_batch_divisor: int = pydantic.Field(default=1, ge=1)
    """`per_device_train_batch_size` is divided by it; `gradient_accumulation_steps` and
    `steps_per_generation` are multiplied.
    """
    generation_sub_batches: int = pydantic.Field(default=1, ge=1)
    """Into how many parts a call of generation is split."""
    gradient_checkpointing: bool = False
    """Whether gradient checkpointing is turned on."""
    optimizer_offload: bool = False
    """Whether DeepSpeed keeps the optimizer's state in host memory."""
    expandable_segments: bool = False
    """Whether the allocator uses expandable segments; set by the supervisor in the ranks' environment."""
    vllm_gpu_memory_utilization: float | None = pydantic.Field(default=None, gt=0.0, le=1.0)
    """Share of a GPU that vLLM may use; None keeps the script's."""
    vllm_sleep: bool = False
    """Whether vLLM frees its memory while the model is trained."""
    max_completion_length: int | None = pydantic.Field(default=None, ge=1)
    """Longest completion in tokens, which changes the experiment (`--allow-degrade`); None keeps the
    script's.
    """

    @property
    def changed(self) -> bool:
        """Whether it changes anything."""
        return self != MemoryPlan()

    @property
    def text(self) -> str:
        """What is changed, as `--memory-plan` has it, such as `micro-batch=2,checkpointing`; empty if nothing
        is.
        """
        changed = self.model_dump(exclude_defaults=True)
        named = {_NAMES_OF_FIELDS.get(field, field): value for field, value in changed.items()}
        return ",".join(name if value is True else f"{name}={value}" for name, value in named.items())


def expandable_segments(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that turn expandable segments on and keep the user's other settings.

    Args:
        environment: the rank's, without them.
    """
    return {
        name: ",".join(filter(None, (environment.get(name, "").strip(" ,"), f"{SEGMENTS}:True")))
        for name in ALLOCATOR_VARIABLES
    }


def sets_segments(environment: Mapping[str, str]) -> bool:
    """Whether the user's environment decides about expandable segments."""
    return any(SEGMENTS in environment.get(name, "") for name in ALLOCATOR_VARIABLES)


class PlanChanged(Event, kw_only=True):
    """The next attempt needs less memory.

    Attributes:
        fallback_step, phase: what was changed, and the phase that had run out of memory.
        plan, before: JSON objects of `MemoryPlan`.
        skipped: further changes, each with the reason why it was not made.
        inexact: why the updates are not those of the script's own settings.
    """

    fallback_step: str = ""
    phase: str = ""
    plan: dict[str, Any]
    before: Mapping[str, Any] = msgspec.field(default_factory=dict)
    skipped: Sequence[dict[str, str]] = ()
    inexact: Sequence[str] = ()


class MemoryPlanApplied(Event, kw_only=True):
    """A plan is applied to a configuration of the script, in which these numbers are now.

    Attributes:
        plan: as `--memory-plan` has it.
        divided_by: by how much the micro-batch was divided.
    """

    config: str
    plan: str
    per_device_train_batch_size: int
    gradient_accumulation_steps: int
    divided_by: int


class MemoryPlanGiven(Event, kw_only=True):
    """The user has given a plan. `plan` is a JSON object of `MemoryPlan`."""

    plan: dict[str, Any]


@dataclass(kw_only=True)
class MemoryRecord:
    """The memory plan of one run so far.

    Attributes:
        plan: in effect from the next attempt on.
        given: the plan that the user has given last (`--memory-plan`), from which the changes go on.
        changes: how often it has changed.
        inexact: why the run's updates are not those of the script's own settings, oldest first.
    """

    plan: MemoryPlan = field(default_factory=MemoryPlan)
    given: MemoryPlan = field(default_factory=MemoryPlan)
    changes: int = 0
    inexact: list[str] = field(default_factory=list)

    def apply(self, event: PlanChanged) -> None:
        """Take over a plan that was changed."""
        self.plan = MemoryPlan.model_validate(event.plan)
        self.changes += 1
        self.inexact += [reason for reason in event.inexact if reason not in self.inexact]

    def apply_given(self, event: MemoryPlanGiven) -> None:
        """Take over the plan of the user: the user knows better than what was found so
        far.
        """
        self.plan = self.given = MemoryPlan.model_validate(event.plan)
