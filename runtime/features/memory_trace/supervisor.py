"""The memory trace in the supervisor: prints each alarm once, whichever ranks have it and however often ranks
restart.

What merely grows (`NOTICE`) is in the status and in reports only. Ranks with the same leak find it after the
same step, so a finding waits for the others before it is said.
"""

from __future__ import annotations

import time

from grpo_run.runtime.features.memory_trace.events import NOTICE, MemoryFindings
from grpo_run.runtime.features.memory_trace.settings import MemoryTraceSettings
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import SupervisorFeature
from grpo_run.watchdog.text import rank_names

WAITED_SECONDS = 5.0
"""How long the other ranks are waited for."""


class SaidFindings(SupervisorFeature):
    """What was printed of the findings of one run. What the history has already, an earlier supervisor has
    said.
    """

    name = MemoryTraceSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._findings = history.part(MemoryFindings)
        self._notify = reporter.notify
        self._said = {key: set(found.ranks) for key, found in self._findings.found.items()}
        """By key, the ranks that were named."""

    def poll(self) -> None:
        """Print what all ranks have found, or some of them a while ago."""
        self._say(final=False)

    def end(self) -> None:
        """Print what is left."""
        self._say(final=True)

    def _say(self, *, final: bool) -> None:
        for key, found in self._findings.found.items():
            first, said = found.first, self._said.get(key)
            if first.kind == NOTICE or said == found.ranks:
                continue
            if said is not None:
                self._notify(f"memory: {rank_names(found.ranks - said)} too: {first.subject}")
            elif final or len(found.ranks) >= first.world_size or time.time() - first.time >= WAITED_SECONDS:
                self._notify(f"memory: {found.text}")
            else:
                continue
            self._said[key] = set(found.ranks)


PART = SaidFindings
