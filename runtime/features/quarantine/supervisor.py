"""Quarantine in the supervisor: reads the prompts before every attempt, and adds to them after a fault.

Faults in generation and in rewards count. A reward function that can run in a worker is moved there before:
`runtime/supervisor/policy.py` asks for an answer only where the run would be given up otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.features.quarantine._files import FILE, read_quarantine, read_rollout, write_quarantine
from grpo_run.runtime.features.quarantine.events import (
    PromptQuarantined,
    Quarantine,
    QuarantinedPrompt,
    RolloutPosition,
    quarantined,
)
from grpo_run.runtime.features.quarantine.settings import NAME, RankQuarantine
from grpo_run.runtime.features.quarantine.shown import ACTION
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Decision
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.supervisor.points import Answer, Fault, SupervisorFeature
from grpo_run.runtime.supervisor.policy import start_of
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.verdict import Verdict

FAILED = {Phase.generate.name: "generation", Phase.reward.name: "rewards"}
"""Phases that depend on the prompts, and what is said to have failed."""


class RunQuarantine(SupervisorFeature):
    """The quarantined prompts of a run.

    Raises:
        RunDirectoryError: the user's `quarantine.json` is not valid.
    """

    name = NAME

    def __init__(self, config: RunConfig, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._run = run
        self._history = history
        self._reporter = reporter
        self._quarantine = history.part(Quarantine)
        self._prompts = self._read()
        self._suspected: RolloutPosition | None = None
        """The rollout of the last fault, whose prompts the ranks record."""

    def begin_attempt(self, node: int) -> None:
        """Read the file again, which the user may have edited, and suspect the rollout of the last fault."""
        try:
            self._prompts = self._read()
        except RunDirectoryError as error:
            self._reporter.warn(None, f"{error}; the prompts that were quarantined before are replaced")
        last = self._history.recoveries[-1] if self._history.recoveries else None
        self._suspected = None
        if last is not None and last.train_call:
            self._suspected = RolloutPosition(train_call=last.train_call, step=last.step + 1)

    def rank_settings(self, rank: int, files: AttemptFiles) -> dict[str, Any] | None:
        """Return which prompts a rank replaces, and where it records those of a suspected rollout."""
        settings = RankQuarantine(
            prompts=self._prompts, suspected=self._suspected, file=str(_recorded(files, rank))
        )
        return settings.model_dump(mode="json")

    def answer(self, fault: Fault) -> Answer | None:
        """Put the prompts of the ranks that failed on their rollout into quarantine, if they are known."""
        prompts = self._due(fault)
        if not prompts:
            return None
        phase = str(fault.verdict.phase)
        have = "has" if phase == Phase.generate.name else "have"
        reason = f"{start_of(self._history)}; {FAILED[phase]} {have} failed twice on this rollout"
        return Answer(decision=Decision(action=ACTION, reason=reason), act=lambda: self._add(prompts, phase))

    def _due(self, fault: Fault) -> list[QuarantinedPrompt]:
        """Return the prompts that a fault would put into quarantine.

        A reward function that has raised before the first step of its call is taken to be broken, memory that
        is exhausted is no failure of a prompt, and ranks that disagree on a collective do so again with
        others.
        """
        verdict, position = fault.verdict, self._suspected
        if (
            position is None
            or not _fails_on_prompts(verdict)
            or verdict.step + 1 != position.step
            or self._quarantine.holds(position)
        ):
            return []
        ranks = sorted(set(fault.failed_ranks))
        found = [one for rank in ranks for one in read_rollout(_recorded(fault.files, rank), position)]
        return quarantined(found, position)

    def _add(self, prompts: Sequence[QuarantinedPrompt], phase: str) -> None:
        known = [one for one in self._prompts if one not in prompts]
        self._reporter.write(
            PromptQuarantined(step=prompts[0].from_step - 1, prompts=[one.model_dump() for one in prompts])
        )
        path = self._run.path / FILE
        try:
            write_quarantine(path, [*known, *prompts])
        except OSError as error:
            self._reporter.warn(None, f"{path} cannot be written: {error.strerror}")
        plural = "prompt is" if len(prompts) == 1 else "prompts are"
        self._reporter.notify(
            f"{len(prompts)} {plural} replaced from step {prompts[0].from_step} on, because {FAILED[phase]}"
            f" failed twice on the rollout: {prompts[0].preview!r}{' …' if len(prompts) > 1 else ''} ({path}"
            " lists them)"
        )

    def _read(self) -> tuple[QuarantinedPrompt, ...]:
        found = read_quarantine(self._run.path / FILE)
        return tuple(self._quarantine.prompts if found is None else found)


def _fails_on_prompts(verdict: Verdict) -> bool:
    if verdict.phase not in FAILED or verdict.shortage is not None:
        return False
    if verdict.phase == Phase.reward.name and verdict.deterministic and verdict.step == 0:
        return False
    raised = verdict.deterministic and verdict.cause is Cause.exception
    return raised or verdict.cause in (Cause.generation_stall, Cause.reward_stall)


def _recorded(files: AttemptFiles, rank: int) -> Path:
    """The file in which a rank records the prompts of a suspected rollout."""
    return files.folder / f"rank{rank}.prompts.json"


PART = RunQuarantine
