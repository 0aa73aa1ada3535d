"""What follows when a rank runs out of memory, or its generation stalls; see the text file."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.journal import event
from support.memory_cases import COLOCATED, GRPO, SFT, facts, planned
from support.transcripts import Story, stories

from grpo_run.runtime.features.memory_plan._decision import (
    PlanChange,
    decide_generation_stall,
    decide_out_of_memory,
    next_change,
)
from grpo_run.runtime.features.memory_plan._remedies import text_of
from grpo_run.runtime.features.memory_plan._remedy import Situation
from grpo_run.runtime.features.memory_plan.events import PlanRecord
from grpo_run.runtime.features.memory_plan.shown import ACTION as CHANGE
from grpo_run.runtime.history.history import History
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.memory.error_patterns import ErrorSource
from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, Shortage

GIB = 1 << 30
FIGURES = {
    "none": Figures(),
    "nothing-reserved": Figures(unallocated_bytes=0),
    "fragmented": Figures(tried_bytes=GIB, unallocated_bytes=10 * GIB),
    "unknown": Figures(tried_bytes=2 * GIB),
    "full": Figures(tried_bytes=2 * GIB, free_bytes=GIB, unallocated_bytes=1 << 20),
    "free-1": Figures(tried_bytes=40 * GIB, free_bytes=GIB),
    "free-20": Figures(tried_bytes=40 * GIB, free_bytes=20 * GIB),
}
TRAINERS = {"grpo": GRPO, "sft": SFT, "colocated": facts(**COLOCATED)}


def values(fields: dict[str, str]) -> dict[str, Any]:
    """Read words: yes and no, numbers, and names."""
    words = {"yes": True, "no": False}
    read = {name: int(text) if text.isdigit() else words.get(text, text) for name, text in fields.items()}
    return {
        name: float(value)
        if name.endswith("utilization")
        else (value,)
        if name == "explicit_sizes"
        else value
        for name, value in read.items()
    }


class PlanShell:
    """A run of GRPO with micro-batches of eight, which goes from one failure to the next."""

    def __init__(self) -> None:
        self.facts = GRPO
        self.options: dict[str, Any] = {"budget": 3}
        self.plan()

    def trainer(self, name: str, **changed: str) -> None:
        """What trains."""
        self.facts = facts(TRAINERS[name], **values(changed))

    def given(self, **options: str) -> None:
        """What else decisions depend on."""
        self.options |= values(options)

    def plan(self, **changed: str) -> None:
        """The run begins with a plan."""
        self.record = PlanRecord(plan=planned(**values(changed)))
        self.history = History(parts=(self.record,))
        self._apply("run_started")

    def _apply(self, name: str, **fields: Any) -> None:
        self.history.apply(event(name, **fields))

    def _situation(self, phase: str, figures: str, source: str = "allocator", line: str = "") -> Situation:
        shortage = Shortage(
            cause=Cause.gpu_oom, source=ErrorSource(source), phase=MemoryPhase[phase], text="out of memory",
            figures=FIGURES[figures],
        )  # fmt: skip
        return Situation(
            shortage=replace(shortage, line="/home/u/train.py:7") if line else shortage, facts=self.facts,
            plan=self.record.plan, start="restart from checkpoint-6", **self.options,
        )  # fmt: skip

    def change(self, phase: str, figures: str = "none", source: str = "allocator") -> str:
        """The next change, what it does not keep exactly, and what was left out."""
        found = next_change(self._situation(phase, figures, source))
        if isinstance(found, str):
            return f"none: {found}"
        skipped = [f"not {name}: {why}" for name, why in found.skipped.items()]
        return "\n".join([text_of(found.plan), *(f"inexact: {why}" for why in found.inexact), *skipped])

    def plans(self, phase: str) -> str:
        """The plans of a run whose every attempt runs out of memory in one phase."""
        return "\n".join(all_plans(self._situation(phase, "none"))) or "none"

    def fails(self, phase: str, figures: str = "full", line: str = "") -> str:
        """Memory runs out: what follows, and the new plan."""
        given = self._situation(phase, figures, line=line)
        self._apply("incident", cause="gpu_oom", step=7, shortage=given.shortage.as_json())
        found = decide_out_of_memory(self.history, given)
        decision = found.decision
        self._apply("action", action=str(decision.action), reason="", patient=decision.patient)
        if found.change is None:
            return f"{decision.action}: {decision.reason}"
        self._apply("plan_changed", plan=found.change.plan, inexact=list(found.change.inexact))
        return f"{decision.action}: {decision.reason}\nplan {text_of(found.change.plan)}"

    def checkpoint(self, step: str) -> None:
        """A newer checkpoint is on disk."""
        self._apply("checkpoint_published", step=int(step), path="p", train_call=1)

    def failures(self) -> str:
        """The failures that count against the budget."""
        return str(self.history.failures_without_progress)

    def stalls(self, step: str, then: str = "") -> str:
        """Generation does not return in time at a step; another action than the answer may follow."""
        self._apply("incident", cause="generation_stall", step=int(step))
        found = decide_generation_stall(
            self.history, self.facts, {}, start="from checkpoint-6", budget=self.options["budget"]
        )
        action = then or (str(found.decision.action) if found else "restart")
        self._apply("action", action=action, reason="", patient=action == CHANGE)
        if found is None or found.change is None:
            return "no change"
        return "\n".join([str(found.decision.action), *found.change.sentences({}, self.facts)])


def all_plans(given: Situation) -> list[str]:
    """Return the texts of all plans until there is none left."""
    texts: list[str] = []
    while isinstance(change := next_change(given), PlanChange):
        assert text_of(change.plan) not in texts, "a plan comes back, and the steps would have no end"
        texts.append(text_of(change.plan))
        given = replace(given, plan=change.plan)
    return texts


@stories(__file__, "answers.txt")
def test_answers(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(PlanShell(), word)


@pytest.mark.parametrize("phase", list(MemoryPhase))
@pytest.mark.parametrize(
    "given",
    [
        GRPO,
        SFT,
        facts(**COLOCATED),
        facts(**COLOCATED, vllm_sleep=True),
        facts(per_device_train_batch_size=1024),
        facts(deepspeed=True, layout="deepspeed-zero3"),
    ],
)
def test_fallback_steps_end(phase: MemoryPhase, given: MemoryFacts) -> None:
    """Also where completions may be shortened."""
    shortage = Shortage(
        cause=Cause.gpu_oom, source=ErrorSource.allocator, phase=phase, text="", figures=Figures()
    )
    situation = Situation(shortage=shortage, facts=given, plan={}, start="", budget=3, allow_degrade=True)
    assert len(all_plans(situation)) < 30
