"""The memory plan of a run in the supervisor: decided after an out-of-memory error, journaled and reported.

    verdict, facts file → policy → `action` → `plan_changed` → the settings of the next attempt's ranks

Used by `faults.py`. The plan itself is in the run's history, so later launches of the run keep it. That and
how it changes is decided in `runtime/supervisor/memory/policy.py` and
`runtime/supervisor/memory/fallback_steps.py`.
"""

from __future__ import annotations

import os
from dataclasses import replace

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.facts import MemoryFacts
from grpo_run.runtime.memory.files import read_facts
from grpo_run.runtime.memory.plan import MemoryPlan, MemoryPlanGiven, PlanChanged, sets_segments
from grpo_run.runtime.supervisor.memory.fallback_steps import PlanChange, Situation
from grpo_run.runtime.supervisor.memory.policy import (
    MemoryDecision,
    decide_generation_stall,
    decide_out_of_memory,
    sentences,
)
from grpo_run.runtime.supervisor.memory.returned import ReturnedMemory, visible_gpus
from grpo_run.runtime.supervisor.policy import start_of
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.verdict import Verdict

STEADY_COMMITS = 20
"""Commits of an attempt after which the work of a step is taken to have fitted before."""


class RunMemory:
    """The memory plan of one run.

    Args:
        config: of the run.
        run: its directory, with the facts that the ranks publish.
        history: contains each event as soon as it is written.
        reporter: for events and messages.
    """

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._config = config
        self._run = run
        self._history = history
        self._reporter = reporter
        environment = {**os.environ, **config.environment}
        self._own_allocator_setting = sets_segments(environment)
        self._returned = ReturnedMemory(visible=visible_gpus(environment.get("CUDA_VISIBLE_DEVICES")))
        self._began = False

    def begin_attempt(self) -> None:
        """Wait until the memory of the last attempt is back, if it ended because there was not enough.

        At the start of a launch, take over the plan that the user has given, unless the run has it already.
        """
        if not self._began:
            self._began = True
            self._returned.begin()
            given = self._config.memory_plan
            if given.changed and given != self._history.memory.given:
                self._reporter.write(MemoryPlanGiven(plan=given.model_dump(exclude_defaults=True)))
                self._reporter.notify(f"memory plan of this command: {given.text}")
            return
        last = self._history.recoveries[-1] if self._history.recoveries else None
        if last is not None and last.cause == str(Cause.gpu_oom) and last.recovery_seconds is None:
            held = self._returned.wait()
            if held:
                self._reporter.warn(None, held)

    def decide(self, verdict: Verdict, *, several_nodes: bool, grown_bytes: int) -> MemoryDecision | None:
        """Return what follows a fault if a rank has run out of GPU memory, or generation has not returned in
        time twice at one step; None for any other fault.

        None also where no plan can be changed: before a `train()` call, in a hand-written loop, and on
        several nodes, each of which has its own supervisor. The policy for other faults then decides.

        Args:
            verdict: of the fault, which is the last one of the history.
            several_nodes: the run has ranks on other nodes.
            grown_bytes: how much more the rank had allocated than early in the attempt.
        """
        shortage, stalled = verdict.shortage, verdict.cause is Cause.generation_stall
        if not stalled and (verdict.cause is not Cause.gpu_oom or shortage is None):
            return None
        facts, history = self._facts(), self._history
        if facts is None or several_nodes:
            return None
        if shortage is None:
            return decide_generation_stall(
                history, facts, start=start_of(history), budget=self._config.budget.failures_without_progress
            )
        situation = Situation(
            shortage=shortage,
            facts=facts,
            start=start_of(history),
            budget=self._config.budget.failures_without_progress,
            grown_bytes=grown_bytes,
            proceeds=history.committed_in_attempt >= STEADY_COMMITS,
            allow_degrade=self._config.allow_degrade,
            own_allocator_setting=self._own_allocator_setting,
        )
        return decide_out_of_memory(history, situation)

    def change(self, change: PlanChange) -> None:
        """Let the next attempt use a changed plan, and say so. The decision has been journaled."""
        before = self._history.memory.plan
        self._reporter.write(
            PlanChanged(
                step=self._history.recoveries[-1].step,
                fallback_step=str(change.fallback_step),
                phase=str(change.phase),
                plan=change.plan.model_dump(exclude_defaults=True),
                before=before.model_dump(exclude_defaults=True),
                skipped=[
                    {"fallback_step": str(skipped.fallback_step), "why": skipped.why}
                    for skipped in change.skipped
                ],
                inexact=list(change.inexact),
            )
        )
        facts = self._facts()
        assert facts is not None, "a change is found in the facts"
        for sentence in sentences(change, before, facts):
            self._reporter.notify(sentence)

    def _facts(self) -> MemoryFacts | None:
        """Return the facts of the `train()` call that ran; None if there are none, or a hand-written loop
        ran.
        """
        facts, call = read_facts(self._run.path), self._history.calls.interrupted
        if facts is not None and call is not None and call.trainer_class != facts.trainer_class:
            return None
        return facts


def signature_with_plan(verdict: Verdict, plan: MemoryPlan) -> str:
    """Return the signature of a failure: out of memory with another plan is another failure."""
    if verdict.cause is not Cause.gpu_oom or not plan.changed:
        return verdict.signature
    return f"{verdict.signature} with {plan.text}"


def config_for_ranks(config: RunConfig, plan: MemoryPlan) -> RunConfig:
    """Return the configuration that the ranks of an attempt get: with the plan's shorter completions, if it
    has any.
    """
    if plan.max_completion_length is None:
        return config
    return replace(
        config, generation={**config.generation, "max_completion_length": plan.max_completion_length}
    )
