"""The memory trace in the supervisor: prints each finding once, whichever ranks have it and however often
ranks restart. The status names all ranks.
"""

from __future__ import annotations

from grpo_run.runtime.features.memory_trace.events import MemoryFindings
from grpo_run.runtime.features.memory_trace.settings import MemoryTraceSettings
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import SupervisorFeature


class SaidFindings(SupervisorFeature):
    """What was printed of the findings of one run. What the history has already, an earlier supervisor has
    said.
    """

    name = MemoryTraceSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._found = history.part(MemoryFindings).found
        self._notify = reporter.notify
        self._said = set(self._found)

    def poll(self) -> None:
        """Print what was found since."""
        for key in self._found.keys() - self._said:
            self._said.add(key)
            self._notify(f"memory: {self._found[key].text}")

    end = poll


PART = SaidFindings
