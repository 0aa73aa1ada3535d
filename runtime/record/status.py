"""The state of a run as one object: what `grpo-run status --json`, the metrics and the pages show.

Joins the journal's fold with the live board. A run whose supervisor is gone without having said how it
ended is reported as `unknown`, never as running. Reads files; decides nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import EXIT_STOPPED, RunDirectoryError
from grpo_run.runtime.record.commits import newest_commit
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.watchdog.observation import Slot

BEHIND_SECONDS = 5.0
"""Since the journal's last line; a live supervisor writes down a step within a tenth of a second."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One reading of a run. `slots` holds None for a rank that could not be observed.

    `blind` says of each rank what the watchdog cannot see now, `journal_lost` how many events the disk did not take;
    only the supervisor itself knows them.
    """

    run_id: str
    state: str
    sentence: str
    history: History
    slots: tuple[Slot | None, ...]
    supervisor_pid: int | None
    blind: Mapping[int, str] = field(default_factory=dict)
    journal_lost: int = 0

    def as_json(self) -> dict[str, Any]:
        """The object `grpo-run status --json` prints."""
        history = self.history
        checkpoint = history.checkpoint
        return {
            "run_id": self.run_id,
            "state": self.state,
            "step": history.step,
            "target_steps": history.target_steps,
            "attempts": history.attempts,
            "goodput": history.goodput(time.time() if self.supervisor_pid else None),
            "checkpoint": None
            if checkpoint is None
            else {"step": checkpoint.step, "path": checkpoint.path, "verified": checkpoint.verified},
            "snapshot_step": history.snapshot_step,
            "checkpoint_trouble": history.checkpoint_trouble,
            "recoveries": [recovery.as_json() for recovery in history.recoveries],
            "sentence": self.sentence,
            "exit_code": history.exit_code,
            "warnings": history.warnings,
        }


def read_status(run: RunDirectory) -> RunStatus:
    """Read a run's directory once.

    Raises:
        RunDirectoryError: it is not a run directory.
    """
    run_id = str(run.read_run().get("run_id", run.path.name))
    history = History.of(read_journal(run.journal))
    owner = run.owner()
    slots: tuple[Slot | None, ...] = ()
    if owner is not None:
        try:
            slots = tuple(Board.open(run.board).read_all())
        except RunDirectoryError:
            slots = ()
    state = history.state
    if owner is None and history.exit_code is None:
        state = "unknown"
    behind = _behind(history, slots)
    return RunStatus(
        run_id=run_id, state=state, sentence=" ".join(filter(None, (verdict_sentence(state, history), behind))),
        history=history, slots=slots, supervisor_pid=owner,
    )  # fmt: skip


def _behind(history: History, slots: tuple[Slot | None, ...]) -> str | None:
    """What is known from the board alone: a full disk takes no more of the journal, and what it says is old."""
    commit = newest_commit(dict(enumerate(slots)), world_size=0)
    if commit is None or time.time() - (history.last_time or 0.0) < BEHIND_SECONDS:
        return None
    # one step more may be one that the supervisor has not looked at yet
    if (commit.train_call, commit.step) <= (history.train_call, history.step + 1):
        return None
    return (
        f"The journal is behind: the ranks have done step {commit.step}; the disk of the run directory may be full, and"
        " faults since then are not known here."
    )


def verdict_sentence(state: str, history: History) -> str:
    """How the run stands, in one sentence, the thing a person wants to know first."""
    place = (
        f"step {history.step} of {history.target_steps}" if history.target_steps else f"step {history.step}"
    )
    healed = sum(1 for recovery in history.recoveries if recovery.recovery_seconds is not None)
    times = {0: "nothing to recover from", 1: "1 fault recovered"}.get(healed, f"{healed} faults recovered")
    if history.exit_code == 0:
        return f"Finished at {place}, {times}."
    if history.exit_code == EXIT_STOPPED:
        saved = f"checkpoint at step {history.checkpoint.step}" if history.checkpoint else "no checkpoint yet"
        return f"Stopped at {place} ({saved}); the same command goes on."
    if history.exit_code is not None:
        return history.sentence or f"Gave up at {place}."
    if state == "unknown":
        return (
            f"Unknown: the supervisor is gone without a word, last seen at {place}; the same command goes on."
        )
    return f"{state.capitalize()} at {place}, attempt {history.attempts}, {times}."
