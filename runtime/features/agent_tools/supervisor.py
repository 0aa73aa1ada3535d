"""Tools in the supervisor: the attempts that have ended in a call, and which tools ranks move for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.features.agent_tools.events import ToolFault, ToolHistory
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault, SupervisorFeature
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.text import is_of_agent
from grpo_run.watchdog.verdict import Verdict


class RunTools(SupervisorFeature):
    """The tools and environments of a run."""

    name = ToolSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._history = history
        self._reporter = reporter
        self._running: dict[int, str] = {}

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return which tools run in workers, and how long calls have taken."""
        self._running = {}
        durations = {
            name: known.as_json()
            for name, known in self._history.phases.items()
            if isinstance(name, str) and is_of_agent(name)
        }
        moved = self._history.part(ToolHistory).moved
        return RankTools(moved=moved, durations=durations).model_dump() if durations or moved else None

    def fault(self, slots: Mapping[int, Slot | None]) -> Verdict | None:
        """Note which call each rank is in."""
        self._running = {rank: slot.callback for rank, slot in slots.items() if slot is not None}
        return None

    def answer(self, fault: Fault) -> Answer | None:
        """Note a call in which a rank has failed; what follows is decided as for any fault."""
        for rank in fault.failed_ranks:
            if is_of_agent(name := self._running.get(rank, "")):
                self._reporter.write(ToolFault(step=fault.verdict.step, tool=name))
        return None


PART = RunTools
