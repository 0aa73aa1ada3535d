"""The memory plan of a run: what the journal says of it, and what is replayed from that.

A plan belongs to the run, so later launches of the run keep it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.memory_plan._remedies import read_plan, text_of
from grpo_run.runtime.history.history import HistoryPart


class PlanChanged(Event, kw_only=True):
    """The next attempt needs less memory.

    Attributes:
        fallback_step, phase: what was changed, and the phase that had run out of memory.
        plan, before: what is changed, by field.
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
    """The user has given a plan. `plan` is what is changed, by field."""

    plan: dict[str, Any]


@dataclass(kw_only=True)
class PlanRecord(HistoryPart):
    """The memory plan of one run so far.

    Attributes:
        plan: in effect from the next attempt on.
        given: the plan that the user has given last (`--memory-plan`), from which the changes go on.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (PlanChanged, MemoryPlanGiven)

    plan: dict[str, Any] = field(default_factory=dict)
    given: dict[str, Any] = field(default_factory=dict)

    def apply(self, event: PlanChanged | MemoryPlanGiven) -> None:
        """Take over a plan that was changed, or that of the user, who knows better than what was found so
        far.
        """
        self.plan = read_plan(event.plan)
        if isinstance(event, MemoryPlanGiven):
            self.given = self.plan

    def facts(self) -> dict[str, str]:
        """Return what is changed."""
        return {"memory plan": text_of(self.plan)}

    def as_json(self) -> dict[str, Any]:
        """Return what is changed, by field."""
        return {"memory_plan": self.plan}


PART = PlanRecord
