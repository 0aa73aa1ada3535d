"""Trackers in the supervisor: passes the names of their runs to the ranks of the next attempt."""

from __future__ import annotations

from grpo_run.runtime.features.trackers.events import NAME, TrackerRuns
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import FeatureFactory, SupervisorFeature


class KnownTrackerRuns(SupervisorFeature):
    """The runs that trackers have opened in earlier attempts."""

    name = NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._runs = history.part(TrackerRuns)

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, str] | None:
        """Return the names by opening, for rank 0."""
        return self._runs.names if rank == 0 else None


PART: FeatureFactory = KnownTrackerRuns
