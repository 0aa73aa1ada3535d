"""The quarantined prompts of a run: read before every attempt, extended after a fault.

    first fault → the next attempt records the prompts of that rollout → the same fault again → quarantine

Faults in generation and in rewards count. A reward function that can run in a worker is moved there before.

Used by `faults.py` and by `cli.launching`, which passes the prompts to the ranks. That a fault leads to
quarantine is decided in `policy.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.quarantine import (
    PromptQuarantined,
    QuarantinedPrompt,
    RolloutPosition,
    quarantined,
)
from grpo_run.runtime.history.quarantine_file import read_quarantine, read_rollout, write_quarantine
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.verdict import Verdict

FAILED = {Phase.generate.name: "generation failed", Phase.reward.name: "rewards failed"}
"""Phases that depend on the prompts, and what is said of them."""


class RunQuarantine:
    """The quarantined prompts of a run.

    Raises:
        RunDirectoryError: the user's `quarantine.json` is not valid.
    """

    def __init__(self, run: RunDirectory, history: History, reporter: Reporter) -> None:
        self._run = run
        self._history = history
        self._reporter = reporter
        self.prompts = self._read()
        """Prompts that the ranks replace."""
        self.suspected: RolloutPosition | None = None
        """The rollout whose prompts the ranks record."""

    def begin_attempt(self) -> None:
        """Read the file again, which the user may have edited, and suspect the rollout of the last fault."""
        try:
            self.prompts = self._read()
        except RunDirectoryError as error:
            self._reporter.warn(None, f"{error}; the prompts that were quarantined before are replaced")
        last = self._history.recoveries[-1] if self._history.recoveries else None
        self.suspected = None
        if last is not None and last.train_call:
            self.suspected = RolloutPosition(train_call=last.train_call, step=last.step + 1)

    def due(
        self, verdict: Verdict, also_failed: Iterable[int], files: AttemptFiles
    ) -> list[QuarantinedPrompt]:
        """Return the prompts that a fault would put into quarantine: those of the ranks that failed on their
        rollout.

        A reward function that has raised before the first step of its call is taken to be broken, and memory
        that is exhausted is no failure of a prompt.

        Args:
            also_failed: ranks that failed by themselves besides the culprits.
            files: of the attempt, in which the ranks recorded them.
        """
        position = self.suspected
        if (
            position is None
            or verdict.phase not in FAILED
            or verdict.shortage is not None
            or (verdict.phase == Phase.reward.name and verdict.deterministic and verdict.step == 0)
            or verdict.step + 1 != position.step
            or self._history.quarantine.holds(position)
        ):
            return []
        ranks = sorted({*verdict.culprits, *also_failed})
        found = [one for rank in ranks for one in read_rollout(files.prompts(rank), position)]
        return quarantined(found, position)

    def add(self, prompts: Sequence[QuarantinedPrompt], phase: str | None) -> None:
        """Put prompts into quarantine, and say so.

        Args:
            phase: name of the one that failed.
        """
        assert phase is not None
        known = [one for one in self.prompts if one not in prompts]
        self._reporter.write(
            PromptQuarantined(step=prompts[0].from_step - 1, prompts=[one.model_dump() for one in prompts])
        )
        path = self._run.quarantine
        try:
            write_quarantine(path, [*known, *prompts])
        except OSError as error:
            self._reporter.warn(None, f"{path} cannot be written: {error.strerror}")
        plural = "prompt is" if len(prompts) == 1 else "prompts are"
        self._reporter.notify(
            f"{len(prompts)} {plural} replaced from step {prompts[0].from_step} on, because {FAILED[phase]}"
            f" twice on the rollout: {prompts[0].preview!r}{' …' if len(prompts) > 1 else ''} ({path} lists"
            " them)"
        )

    def _read(self) -> tuple[QuarantinedPrompt, ...]:
        found = read_quarantine(self._run.quarantine)
        return tuple(self._history.quarantine.prompts if found is None else found)
