"""The memory plan in the supervisor: decided after an out-of-memory error, journaled and reported.

    verdict, facts of the call → `_decision.py` → `action` → `plan_changed` → what the next ranks get

The first rank of each node publishes the facts of a call (`runtime/memory/facts.py`): no rank is left to ask.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.features.memory_plan._decision import (
    MemoryDecision,
    PlanChange,
    decide_generation_stall,
    decide_out_of_memory,
)
from grpo_run.runtime.features.memory_plan._remedies import SEGMENTS, differing, text_of
from grpo_run.runtime.features.memory_plan._remedy import Situation
from grpo_run.runtime.features.memory_plan.events import MemoryPlanGiven, PlanChanged, PlanRecord
from grpo_run.runtime.features.memory_plan.settings import MemoryPlanSettings
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.files import read_facts
from grpo_run.runtime.supervisor.points import Answer, Fault, SupervisorFeature
from grpo_run.runtime.supervisor.policy import start_of
from grpo_run.watchdog.causes import Cause

STEADY_COMMITS = 20
"""Commits of an attempt after which the work of a step is taken to have fitted before."""


class RunMemory(SupervisorFeature):
    """The memory plan of one run."""

    name = MemoryPlanSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._config, self._run, self._history, self._reporter = config, run, history, reporter
        self._record = history.part(PlanRecord)
        self._settings = config.of(MemoryPlanSettings)
        self._own_allocator_setting = SEGMENTS.set_by({**os.environ, **config.environment})
        self._began = self._warned = False

    def begin_attempt(self, node: int) -> None:
        """At the start of a launch, take over the plan that the user has given, unless the run has it
        already.
        """
        given = self._settings.plan
        if not self._began and given and given != self._record.given:
            self._reporter.write(MemoryPlanGiven(plan=given))
            self._reporter.notify(f"memory plan of this command: {text_of(given)}")
        self._began = True

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return the plan."""
        return self._record.plan

    def rank_environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of the plan."""
        variables: dict[str, str] = {}
        for remedy in differing({}, self._record.plan):
            variables |= remedy.environment(environment)
        return variables

    def poll(self) -> None:
        """Warn once if the plan has no effect, because the script trains with no Trainer.

        The allocator's part has.
        """
        plan = {name: value for name, value in self._record.plan.items() if name != SEGMENTS.field}
        if self._warned or not plan:
            return
        history, call = self._history, self._history.calls.interrupted
        loop = history.no_trainer.current and not history.no_trainer.trainer
        if loop or (call is not None and call.trainer_class == LOOP):
            self._warned = True
            self._reporter.warn(
                None,
                f"the memory plan {text_of(plan)} has no effect on training of the script's own: it changes"
                " the configuration of a Trainer",
            )

    def answer(self, fault: Fault) -> Answer | None:
        """Decide what follows if a rank has run out of GPU memory, or generation has not returned in time
        twice at one step.

        Not where no plan can be changed: before a `train()` call, in a hand-written loop, and on several
        nodes, each of which has its own supervisor.
        """
        found = self._decide(fault)
        if found is None:
            return None
        return Answer(decision=found.decision, act=lambda: self._change(found.change), at_once=True)

    def _decide(self, fault: Fault) -> MemoryDecision | None:
        verdict = fault.verdict
        shortage, stalled = verdict.shortage, verdict.cause is Cause.generation_stall
        if fault.on_several_nodes or not (stalled or (verdict.cause is Cause.gpu_oom and shortage)):
            return None
        if (facts := self._facts()) is None:
            return None
        history, plan = self._history, self._record.plan
        start, budget = start_of(history), self._config.budget.failures_without_progress
        if shortage is None:
            return decide_generation_stall(history, facts, plan, start=start, budget=budget)
        situation = Situation(
            shortage=shortage,
            facts=facts,
            plan=plan,
            start=start,
            budget=budget,
            proceeds=history.committed_in_attempt >= STEADY_COMMITS,
            allow_degrade=self._settings.allow_degrade,
            own_allocator_setting=self._own_allocator_setting,
        )
        return decide_out_of_memory(history, situation)

    def _change(self, change: PlanChange | None) -> None:
        """Let the next attempt use a changed plan, and say so."""
        if change is None:
            return
        before, facts = self._record.plan, self._facts()
        self._reporter.write(
            PlanChanged(
                step=self._history.recoveries[-1].step,
                fallback_step=change.remedy.name,
                phase=str(change.phase),
                plan=change.plan,
                before=before,
                skipped=[{"fallback_step": name, "why": why} for name, why in change.skipped.items()],
                inexact=list(change.inexact),
            )
        )
        assert facts is not None, "a change is found in the facts"
        for sentence in change.sentences(before, facts):
            self._reporter.notify(sentence)

    def _facts(self) -> MemoryFacts | None:
        """Return the facts of the `train()` call that ran; None if there are none, or a hand-written loop
        ran.
        """
        facts, call = read_facts(self._run.path), self._history.calls.interrupted
        if facts is not None and call is not None and call.trainer_class != facts.trainer_class:
            return None
        return facts


PART = RunMemory
