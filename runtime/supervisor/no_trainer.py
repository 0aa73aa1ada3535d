"""Report and journal that a script trains with neither a Trainer nor a loop.

Said once, when a rank has taken its first optimizer step with no Trainer and no loop: what a restart does,
and that nothing is saved. Completed saves of the script's own are journaled. Called at each poll; decides
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.lifecycle import TRANSITIONS, Lifecycle, RunEvent
from grpo_run.runtime.history.no_trainer_script import ANEW, ScriptCheckpointSaved
from grpo_run.runtime.history.reporter import Reporter
from grpo_run.watchdog.observation import Slot

SETTLE_SECONDS = 2.0
"""How long to wait for a rank that has never saved in this attempt: ranks reach the same line within a step's
imbalance.
"""


class ScriptSaves:
    """When a checkpoint that the script saves with `Accelerator.save_state` is complete: on all ranks that
    save.

    Some scripts call it on every rank, some on rank 0 only.
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._complete: dict[int, int] = {}
        self._changed_at = 0.0

    def observe(self, slots: Mapping[int, Slot | None], now: float, *, ended: bool = False) -> bool:
        """Return whether a save is complete that was not complete before.

        Args:
            slots: of this node's ranks.
            now: monotonic seconds.
            ended: the ranks go no further, so no rank is waited for.
        """
        readings = {rank: slot for rank, slot in slots.items() if slot is not None}
        counts = {**self._counts, **{rank: slot.states_saved for rank, slot in readings.items()}}
        if counts != self._counts:
            self._counts, self._changed_at = counts, now
        new = {rank: count - self._complete.get(rank, 0) for rank, count in counts.items() if count}
        if is_saving(slots) or not new or min(new.values()) < 1:
            return False
        all_save = len(new) == len(slots)
        if not (all_save or ended or min(new.values()) > 1 or now - self._changed_at >= SETTLE_SECONDS):
            return False
        self._complete = counts
        return True


def is_saving(slots: Mapping[int, Slot | None]) -> bool:
    """Whether a rank is inside `Accelerator.save_state`."""
    return any(slot is not None and slot.saves_state for slot in slots.values())


class NoTrainerWatch:
    """Watches the ranks of one run for training of their own.

    Args:
        lifecycle: is `running` once the script trains.
        reporter: for events and messages.
    """

    def __init__(self, lifecycle: Lifecycle, reporter: Reporter, history: History) -> None:
        self._lifecycle = lifecycle
        self._reporter = reporter
        self._history = history
        self._saves = ScriptSaves()
        self._said = False
        self._said_of_saves = False
        self._said_of_call = False
        self._alone = False

    def begin_attempt(self) -> None:
        """A new attempt begins."""
        self._saves = ScriptSaves()
        self._alone = False

    def poll(self, slots: Mapping[int, Slot | None], now: float, *, ended: bool = False) -> bool:
        """Read the board once; the ranks' events have been read.

        Args:
            now: monotonic seconds.
            ended: the ranks go no further.

        Returns:
            whether a save of the script's own has become complete.
        """
        own = self._history.no_trainer
        if own.current != self._alone:
            self._alone = own.current
            call = self._history.calls.interrupted
            if own.current:
                self._begin()
            elif call is not None and not self._said_of_call:
                self._said_of_call = True
                self._reporter.notify(f"{call.place} begins: its steps are counted and saved")
        if not self._saves.observe(slots, now, ended=ended):
            return False
        self._reporter.write(ScriptCheckpointSaved(path=own.newest_path, saved_at=time.time()))
        if not self._said_of_saves:
            self._said_of_saves = True
            self._reporter.notify(
                f"the script saves its own state{f' in {own.newest_path}' if own.newest_path else ''}: this"
                " counts as progress, and a stop waits for the next time; whether it resumes from there is"
                " up to the script"
            )
        return True

    def _begin(self) -> None:
        if (self._lifecycle.state, RunEvent.trains_without_trainer) in TRANSITIONS:
            self._lifecycle.fire(RunEvent.trains_without_trainer)
        if self._said:
            return
        self._said = True
        own = self._history.no_trainer
        consequence = own.consequence(time.time())
        if len(self._history.calls):
            consequence = f"{ANEW} and restores its finished train() calls; what follows them is not saved"
        self._reporter.notify(f"{own.what_trains()}: {consequence}")
