"""Injections in the supervisor: ranks learn what has fired, and a run says at its end what never has.

A run must not look like one that has passed the faults that it was started with.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from grpo_run.runtime.errors import EXIT_STOPPED, EXIT_USAGE
from grpo_run.runtime.features.injections._injection import Injection, remaining
from grpo_run.runtime.features.injections.events import FiredInjections
from grpo_run.runtime.features.injections.settings import InjectionSettings, RankInjections
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import EndRemark, SupervisorFeature


class RunInjections(SupervisorFeature):
    """The injections of a run."""

    name = InjectionSettings.NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._settings = config.of(InjectionSettings)
        self._history = history
        self._fired = history.part(FiredInjections)

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return which injections a rank does not repeat."""
        return RankInjections(fired=tuple(self._fired.texts)).model_dump() if self._fired.texts else None

    def end_remark(self, exit_code: int, ranks: Collection[int]) -> EndRemark | None:
        """Name the faults of this node's ranks that never happened, unless the run may be continued."""
        if exit_code in (EXIT_STOPPED, EXIT_USAGE):
            return None
        # without a rank that was ever started, none is another node's
        missed = [
            one
            for one in remaining(self._settings.injections, self._fired.texts)
            if not ranks or one.rank in ranks
        ]
        if not missed:
            return None
        number = "1 injected fault" if len(missed) == 1 else f"{len(missed)} injected faults"
        named = ", ".join(f"{one} ({self._reason(one)})" for one in missed)
        asked = "--strict-faults asks for all injected faults." if self._settings.strict else ""
        return EndRemark(text=f"{number} never happened: {named}.", unfinished=asked)

    def _reason(self, fault: Injection) -> str:
        history = self._history
        if history.no_trainer.seen and not history.counts_steps:
            return "without a Trainer or a loop, steps are not counted"
        if fault.step > history.step:
            return f"the run ended at step {history.step}"
        if fault.recurs:
            limit = f"{fault.tokens} tokens" if fault.tokens else f"{fault.rows} rows"
            return f"no phase {fault.phase.name} from step {fault.step} on had more than {limit}"
        return f"step {fault.step} was not run with phase {fault.phase.name}"


PART = RunInjections
