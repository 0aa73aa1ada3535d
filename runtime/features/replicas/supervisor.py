"""Replicas in the supervisor: ranks that differ go back to before they did, once.

The second time the run ends, or the host of the rank that is wrong leaves it, if there are several.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.features.replicas.events import Replicas, ReplicasDiffered
from grpo_run.runtime.features.replicas.settings import Difference, RankReplicas, ReplicaSettings
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Action, Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault, FeatureFactory, SupervisorFeature
from grpo_run.watchdog.causes import Cause


class RunReplicas(SupervisorFeature):
    """The replicas of a run."""

    name = ReplicaSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._history = history
        self._reporter = reporter

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return the differences so far: two at most end a run, besides those that the script makes."""
        found = self._history.part(Replicas)
        told = RankReplicas(differences=tuple(found.differences), open=tuple(found.open))
        return told.model_dump(mode="json")

    def answer(self, fault: Fault) -> Answer | None:
        """Journal a difference, and go back to the last step at which the ranks were equal."""
        alarm = fault.verdict.alarm
        if alarm is None or alarm.cause != Cause.replicas_differ:
            return None
        before = bool(self._history.part(Replicas).differences)
        found = Difference.model_validate(alarm.details)
        self._reporter.write(ReplicasDiffered(difference=found.model_dump(mode="json")))
        wrong = set(found.ranks)
        if before and (not wrong or wrong & set(fault.local_ranks)):
            reason = "ranks have differed a second time in this run"
            return Answer(
                decision=Decision(action=Action.stop, reason=reason),
                leaves=bool(wrong) and fault.on_several_nodes,
            )
        return Answer(
            decision=Decision(
                action=Action.restart_from_earlier_checkpoint,
                reason=f"repeats the steps after step {found.agreed}, when the ranks were equal, exactly",
                before_step=found.agreed + 1,
            )
        )


PART: FeatureFactory = RunReplicas
