"""Reward workers in the supervisor: a function that has failed twice at one step runs in a worker from the
next attempt on.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.features.reward_workers.events import (
    FAILURES_TO_MOVE,
    MovedReward,
    RewardFailures,
    RewardMoved,
)
from grpo_run.runtime.features.reward_workers.settings import RankRewards, RewardWorkerSettings
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault, SupervisorFeature
from grpo_run.runtime.supervisor.policy import start_of
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.verdict import Verdict


class RunRewards(SupervisorFeature):
    """The reward functions of a run that run in workers."""

    name = RewardWorkerSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._most_failures = config.budget.failures_without_progress
        self._all_moved = config.of(RewardWorkerSettings).workers > 0
        self._history = history
        self._reporter = reporter
        self._failures = history.part(RewardFailures)

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return which functions run in workers; None if none does, so that the rank starts nothing."""
        moved = tuple(self._failures.moved)
        if not (self._all_moved or moved):
            return None
        known = self._history.phases.get(Phase.reward)
        durations = known.as_json() if known is not None else None
        return RankRewards(moved=moved, durations=durations).model_dump(mode="json")

    def answer(self, fault: Fault) -> Answer | None:
        """Move a reward function that has failed too often."""
        moved, failures = self._failures.due, self._history.failures_without_progress
        if moved is None or fault.verdict.final or not 0 < failures <= self._most_failures:
            return None
        decision = Decision(action=Action.restart, reason=start_of(self._history))
        return Answer(decision=decision, act=lambda: self._move(moved, fault.verdict), at_once=True)

    def _move(self, moved: MovedReward, verdict: Verdict) -> None:
        step, file, function = verdict.step, moved.file, moved.function
        self._reporter.write(RewardMoved(step=step, file=file, function=function, failures=FAILURES_TO_MOVE))
        if self._all_moved:
            return  # it has stayed in the rank for a reason, which a warning has given
        what = "raised" if self._failures.last_raised else "not returned in time"
        said = (verdict.traceback or "").rstrip().rpartition("\n")[2]
        self._reporter.notify(
            f"{moved.name} has {what} {FAILURES_TO_MOVE} times at one step{f' ({said})' if said else ''}: the"
            " next attempt runs it in a worker process, where only the samples that it fails on are excluded;"
            " `--reward-workers` does so from the start"
        )


PART = RunRewards
