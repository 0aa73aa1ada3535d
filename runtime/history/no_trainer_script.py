"""Training without a Trainer and a loop: since when, and what the script has saved itself.

grpo-run counts no steps of it and saves nothing of it, so a restart runs the script from the beginning. What
`Accelerator.save_state` has saved is a checkpoint of the script's own: whether the script resumes from it is
up to the script. Replayed from the journal as part of `runtime.history.history`; every sentence about such a
run is made here. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.event import Event
from grpo_run.watchdog.text import duration_text

ANEW = "a restart runs the script from the beginning"
SINCE_CALL = "The script takes optimizer steps of its own since its last train() call; they are not saved."
RESTART = "restarts the script from its beginning"
MAX_PATHS = 4096
"""Directories that are remembered. A later one counts as progress in any case."""


class TrainsWithoutTrainer(Event, kw_only=True):
    """A rank has taken an optimizer step by itself. `trainer` is the class, if a Trainer takes the step."""

    trainer: str = ""


class StateSaved(Event, kw_only=True):
    """A rank has returned from `Accelerator.save_state`."""

    path: str = ""


class ScriptCheckpointSaved(Event, kw_only=True, tag="script_checkpoint"):
    """All ranks that save have returned from `Accelerator.save_state`, at `saved_at`."""

    path: str = ""
    saved_at: float | None = None


@dataclass(frozen=True, kw_only=True)
class ScriptCheckpoint:
    """The newest checkpoint of the script's own.

    Args:
        path: its directory, as `Accelerator.save_state` returned it; empty if it did not.
        saved_at: when it was complete, in seconds since the epoch.
    """

    path: str
    saved_at: float

    def sentence(self, now: float) -> str:
        """Return what can be said about it, as a clause.

        Args:
            now: seconds since the epoch.
        """
        where = f" in {self.path}" if self.path else ""
        return (
            f"the script's own checkpoints: last saved{where} {duration_text(max(0.0, now - self.saved_at))}"
            " ago; whether it resumes from them is up to the script"
        )


@dataclass(kw_only=True)
class NoTrainerScript:
    """What a run's journal says about training with no Trainer and no loop.

    Attributes:
        seen: the script has taken optimizer steps by itself, in any attempt.
        current: it does so now: in the present attempt, and since its last `train()` call.
        trainer: the trainer's class, if a Trainer takes these steps outside a guarded `train()` call.
        checkpoint: the newest checkpoint of the script's own; None before the first one is complete.
    """

    seen: bool = False
    current: bool = False
    trainer: str = ""
    checkpoint: ScriptCheckpoint | None = None
    newest_path: str = ""
    """Directory that a rank has saved last; it may not be complete yet."""
    _paths: dict[str, bool] = field(default_factory=dict)
    """Directories of checkpoints, each with whether it was written in the present attempt."""

    def apply_attempt_started(self) -> None:
        """A new attempt begins: nothing is known of it."""
        self.current = False
        self._paths = dict.fromkeys(self._paths, False)

    def apply_train_started(self) -> None:
        """A `train()` call, or the loop, begins."""
        self.current = False

    def apply_noted(self, event: TrainsWithoutTrainer) -> bool:
        """A rank has taken an optimizer step by itself. Returns whether this is the first one since the last
        call.
        """
        first = not self.current
        self.seen = self.current = True
        self.trainer = event.trainer
        return first

    def apply_state_saved(self, event: StateSaved) -> None:
        """A rank has returned from `Accelerator.save_state`."""
        self.newest_path = event.path

    def apply_saved(self, event: ScriptCheckpointSaved) -> bool:
        """All ranks that save have returned from `Accelerator.save_state`.

        Returns:
            whether it is progress. A directory that an earlier attempt has written is none, because the
            script may have begun anew; the second time in an attempt it is, because then the script always
            writes the same one.
        """
        path = event.path
        self.checkpoint = ScriptCheckpoint(path=path, saved_at=event.saved_at or event.time)
        progress = self._paths.get(path, True)
        if len(self._paths) < MAX_PATHS or path in self._paths:
            self._paths[path] = True
        return progress

    def what_trains(self) -> str:
        """Return which optimizer steps are meant, as the beginning of a sentence."""
        if self.trainer:
            return f"{self.trainer} takes optimizer steps outside a guarded train() call"
        return "the script takes optimizer steps with no Trainer and no loop"

    def consequence(self, now: float) -> str:
        """Return what a restart does and what is saved, as a clause.

        Args:
            now: seconds since the epoch.
        """
        return f"{ANEW}; {_saved(self, now)}"

    def restart(self, now: float) -> str:
        """Return what a restart does, as the reason of an action.

        Args:
            now: seconds since the epoch.
        """
        return RESTART if self.checkpoint is None else f"{RESTART}; {self.checkpoint.sentence(now)}"


def summarize(own: NoTrainerScript, state: str, exit_code: int | None, *, restarts: int, now: float) -> str:
    """Return one sentence or two on a run that has taken no step of a Trainer or of the loop.

    Args:
        exit_code: with which it ends, or has ended; None while it is live.
        restarts: how often the script was restarted.
        now: seconds since the epoch.
    """
    after = {0: "", 1: " after 1 restart"}.get(restarts, f" after {restarts} restarts")
    again = f"The same command runs the script from the beginning; {_saved(own, now)}."
    if state == "stopped" and exit_code not in (EXIT_STOPPED, EXIT_GAVE_UP):
        return f"Stopped{after}: the script returned {exit_code}. {again}"
    if state == "stopped":
        return f"Stopped{after}. {again}"
    if exit_code == EXIT_FINISHED:
        return (
            f"Finished{after or ', no faults'}. The script used no Trainer and no loop, so no steps were"
            " counted."
        )
    if state == "unknown":
        return f"Unknown: the supervisor exited without ending the run. {again}"
    return f"{state.capitalize()}{after}. No Trainer and no loop: {own.consequence(now)}."


def _saved(own: NoTrainerScript, now: float) -> str:
    return "nothing is saved" if own.checkpoint is None else own.checkpoint.sentence(now)
