"""Training without a Trainer and a loop: since when, and what is said of it.

grpo-run counts no steps of it and saves nothing of it, so a restart runs the script from the beginning.
Whether the script resumes from what it has saved itself is up to the script. Replayed from the journal as
part of `runtime.history.history`; every sentence about such a run is made here. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.event import Event

ANEW = "a restart runs the script from the beginning"
CONSEQUENCE = f"{ANEW}; nothing is saved"
"""What a restart does and what is saved, as a clause."""
SINCE_CALL = "The script takes optimizer steps of its own since its last train() call; they are not saved."
RESTART = "restarts the script from its beginning"


class TrainsWithoutTrainer(Event, kw_only=True):
    """A rank has taken an optimizer step by itself. `trainer` is the class, if a Trainer takes the step."""

    trainer: str = ""


@dataclass(kw_only=True)
class NoTrainerScript:
    """What a run's journal says about training with no Trainer and no loop.

    Attributes:
        seen: the script has taken optimizer steps by itself, in any attempt.
        current: it does so now: in the present attempt, and since its last `train()` call.
        trainer: the trainer's class, if a Trainer takes these steps outside a guarded `train()` call.
    """

    seen: bool = False
    current: bool = False
    trainer: str = ""

    def apply_attempt_started(self) -> None:
        """A new attempt begins: nothing is known of it."""
        self.current = False

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

    def what_trains(self) -> str:
        """Return which optimizer steps are meant, as the beginning of a sentence."""
        if self.trainer:
            return f"{self.trainer} takes optimizer steps outside a guarded train() call"
        return "the script takes optimizer steps with no Trainer and no loop"


def summarize(state: str, exit_code: int | None, *, restarts: int) -> str:
    """Return one sentence or two on a run that has taken no step of a Trainer or of the loop.

    Args:
        exit_code: with which it ends, or has ended; None while it is live.
        restarts: how often the script was restarted.
    """
    after = {0: "", 1: " after 1 restart"}.get(restarts, f" after {restarts} restarts")
    again = "The same command runs the script from the beginning; nothing is saved."
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
    return f"{state.capitalize()}{after}. No Trainer and no loop: {CONSEQUENCE}."
