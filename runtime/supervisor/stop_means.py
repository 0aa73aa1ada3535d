"""How a stop is made, and with which exit code it ends: what the ranks can save, and what the run can resume
from.

Pure. Called by the supervisor while a stop is requested.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum

from grpo_run.runtime.errors import EXIT_GAVE_UP, EXIT_STOPPED
from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.watchdog.observation import Exit, RankState, Slot, all_returned
from grpo_run.watchdog.text import duration_text


class StopMeans(Enum):
    """What ends the ranks."""

    vote = "vote"
    """They agree on a step, save and exit."""
    end = "end"
    """They are ended: no rank has finished a step or a `train()` call, and nothing can be saved."""
    term = "term"
    """SIGTERM, as under torchrun: the script has no `train()` call, and its own handlers may save."""
    exit = "exit"
    """They are left to exit: every script has run its last line, and its threads may still work."""


def choose(committed: tuple[int, int], slots: Mapping[int, Slot | None], history: History) -> StopMeans:
    """Return how the ranks are to be stopped.

    Args:
        committed: the newest (train call, step) committed in this attempt; (0, 0) for none.
        slots: of the attempt's ranks; None for one that has not written its slot yet.
    """
    if all_returned(list(slots.values())):
        return StopMeans.exit
    readings = [slot for slot in slots.values() if slot is not None]
    if not any(slot.state is RankState.training for slot in readings):
        if any(slot.trains_without_trainer for slot in readings):
            return StopMeans.term
        early = (RankState.absent, RankState.starting)
        if committed == (0, 0) and all(slot.state in early for slot in readings):
            return StopMeans.term
    return StopMeans.end if _nothing_to_save(committed, slots) else StopMeans.vote


def _nothing_to_save(committed: tuple[int, int], slots: Mapping[int, Slot | None]) -> bool:
    """Return whether no rank has finished a step or a `train()` call in this attempt."""
    return committed == (0, 0) and all(
        slot is None
        or slot.state in (RankState.absent, RankState.starting)
        or (slot.state is RankState.training and slot.train_call == 1 and slot.step <= slot.resumed_step)
        for slot in slots.values()
    )


def describe(means: StopMeans, history: History, timeouts: Timeouts, *, training: bool) -> str:
    """Return what happens now, for the user.

    Args:
        training: whether a rank is inside a `train()` call or a loop.
    """
    if means is StopMeans.vote and not training:
        return (
            "no train() call is running: stopping in the next one, when the script ends, or after"
            f" {duration_text(timeouts.stop_seconds)} (repeat to stop at once)"
        )
    if means is StopMeans.vote:
        return "stopping at the next step that all ranks agree on, with a checkpoint (repeat to stop at once)"
    if means is StopMeans.exit:
        return (
            "every script has run its last line; its processes are left to exit, for"
            f" {duration_text(timeouts.stop_seconds)} at most (repeat to end them now)"
        )
    if means is StopMeans.term and history.no_trainer.current:
        return (
            "stopping at once by SIGTERM, because nothing is saved without a Trainer or a loop; the script's"
            f" own handler has {duration_text(timeouts.handler_seconds)} (repeat to end it now)"
        )
    return "stopping at once, because no step has finished since the ranks started"


def stop_code(history: History) -> int:
    """Return the exit code of a stop: 75 only if the same command goes on from something, or a Trainer has
    not begun yet.
    """
    return EXIT_GAVE_UP if uses_no_trainer(history) else EXIT_STOPPED


def uses_no_trainer(history: History) -> bool:
    """Return whether the script uses no Trainer and no loop, as far as is known."""
    return not history.counts_steps and history.no_trainer.seen


def returned_code(exits: Collection[Exit]) -> int | None:
    """Return the exit code with which every rank's script has ended by itself; None if there is no such code.

    A signal and an exception are no code of the script's.
    """
    codes = {exit.exit_code for exit in exits}
    raised = any(exit.error is not None and exit.error.type != "SystemExit" for exit in exits)
    return next(iter(codes)) if len(codes) == 1 and not raised else None
