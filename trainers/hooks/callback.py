"""The guard's part at step boundaries: vote, requests, hygiene, what is shown.

A `TrainerCallback` added to each guarded trainer. A vote begins when the optimizer step is done and is
collected before the next optimizer step; what it asks for (stop, save) happens at the end of that next
step, on every rank alike. So a stop takes at most two steps to act. Does not wrap methods (`phases.py`).
"""

from __future__ import annotations

import math
import time
from pathlib import Path as FilePath
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from grpo_run.trainers.exact.state import ExactState
from grpo_run.trainers.hooks import hygiene
from grpo_run.trainers.hooks.phases import Path
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.rank.vote import Ballot, Outcome
from grpo_run.trainers.saving.cadence import Cadence
from grpo_run.watchdog.observation import Phase, RankState

SHOWN = {
    "reward": ("reward", "rewards/mean"),
    "completion_length": ("completions/mean_length", "completion_length"),
    "loss": ("loss",),
    "grad_norm": ("grad_norm",),
    "learning_rate": ("learning_rate",),
}
"""Fields of the slot and the names TRL logs them under."""


class GuardCallback(TrainerCallback):  # type: ignore[misc]
    """One a `train()` call. `stopping` is set once all ranks have agreed to stop and the step is saved."""

    def __init__(
        self,
        session: Session,
        ordinal: int,
        path: Path,
        *,
        restoring: bool = False,
        exact: ExactState | None = None,
        resumed_from: FilePath | None = None,
    ) -> None:
        self._session = session
        self._ordinal = ordinal
        self._path = path
        self._restoring = restoring
        self._exact = exact
        self._resumed_from = resumed_from
        self._outcome: Outcome | None = None
        self._snapshot_due = False
        self.cadence: Cadence | None = None
        """Of snapshots, once the call has begun; None where none are taken."""
        self.nonfinite = False
        self.stopping = False

    def snapshot_due(self) -> bool:
        """Whether all ranks take a snapshot after this step."""
        return self._snapshot_due

    def snapshot_taken(self, step: int, cost_seconds: float) -> None:
        """A checkpoint of `step` is in memory."""
        if self.cadence is not None:
            self.cadence.taken(step, cost_seconds)

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The call's model is loaded and its loop is about to start."""
        if self._exact is not None:
            self._exact.begin(self._resumed_from)
        slot = self._session.slot
        slot.state = RankState.training
        slot.train_call = self._ordinal
        slot.step = slot.voted_step = slot.committed_step = slot.resumed_step = state.global_step
        slot.target_steps = state.max_steps
        slot.train_started_ns = slot.voted_at_ns = time.monotonic_ns()
        slot.replace(Phase.data)
        slot.touch()
        self.cadence = self._session.cadence(state.global_step)
        if self._restoring:
            return  # nothing starts here: the call's steps were all taken in an earlier attempt
        self._session.journal.write(
            "train_started",
            rank=self._session.rank,
            step=state.global_step,
            train_call=self._ordinal,
            target_steps=state.max_steps,
        )

    def on_epoch_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The epoch's order is about to be drawn."""
        if self._exact is not None:
            self._exact.begin_epoch()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step's batches are there."""
        if self._exact is not None:
            self._exact.begin_step()
        self._session.slot.replace(Phase.forward_backward)

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Gradients are ready: before weights change, all ranks must have agreed on the step before."""
        self.collect()
        self._session.slot.replace(Phase.optimizer)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The step is done here; say so, ask what is to be asked, and do what the last vote decided."""
        session, slot = self._session, self._session.slot
        self.collect()  # under DeepSpeed the hook before the optimizer does not fire
        if hygiene.due(state.global_step, session.config.hygiene_every):
            seconds = hygiene.clean(slot)
            if session.is_main:
                session.journal.write("hygiene", rank=session.rank, step=state.global_step, seconds=seconds)
        stop, saves = session.board.requests
        ballot = Ballot(
            step=state.global_step,
            fingerprint=self._path.take(),
            stop=stop,
            # a save agreed on already, and made at this step's end, is what the request asked for
            save=saves > session.saves_seen and not (self._outcome is not None and self._outcome.save),
            snapshot=self.cadence is not None and session.is_main and self.cadence.wanted(state.global_step),
            nonfinite=self.nonfinite,
        )
        session.saves_seen = saves
        self.nonfinite = False
        session.votes.start(ballot)
        slot.step = slot.voted_step = state.global_step
        slot.voted_at_ns = time.monotonic_ns()
        slot.replace(Phase.data)
        slot.touch()
        outcome, self._outcome = self._outcome, None
        self._snapshot_due = self.cadence is not None and (
            self.cadence.fixed(state.global_step) or (outcome is not None and outcome.snapshot)
        )
        if state.global_step >= state.max_steps:
            control.should_save = True  # so that a finished call can be restored
        if outcome is not None and outcome.nonfinite and session.is_main:
            session.journal.write("guard_tripped", rank=session.rank, step=outcome.step, guard="nonfinite")
        if outcome is not None and (outcome.save or outcome.stop):
            control.should_save = True
        if outcome is not None and outcome.stop:
            control.should_training_stop = True
            self.stopping = True

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Show what the trainer logs; rank 0 also writes it down, step by step."""
        shown: dict[str, float] = {}
        for field, names in SHOWN.items():
            for name in names:
                value = (logs or {}).get(name)
                if isinstance(value, (int, float)) and not isinstance(value, bool):
                    shown[field] = float(value)
                    setattr(self._session.slot, field, float(value))
                    break
        if shown and not math.isnan(shown.get("reward", 0.0)):
            self._session.slot.touch()
        if shown and self._session.is_main and "train_runtime" not in (logs or {}):
            self._session.journal.write(
                "step_logged", rank=0, step=state.global_step, train_call=self._ordinal, **shown
            )

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """The loop is over; the last step's vote is still to be read."""
        if self._exact is not None:
            self._exact.end()
        self.collect()
        self._session.slot.state = RankState.between
        self._session.slot.touch()

    def collect(self) -> None:
        """Read the vote under way, if any; from here on its step is committed."""
        session, slot = self._session, self._session.slot
        votes = session.votes
        slot.enter(Phase.vote)
        outcome = votes.collect()
        slot.leave(Phase.vote)
        if outcome is not None:
            slot.committed_step = outcome.step
            slot.votes = votes.votes
            slot.vote_wait_seconds = votes.wait_seconds
            # two votes may be read before one is acted on; a request must not get lost between them
            if self._outcome is not None:
                outcome = Outcome(
                    step=outcome.step,
                    stop=outcome.stop or self._outcome.stop,
                    save=outcome.save or self._outcome.save,
                    snapshot=outcome.snapshot or self._outcome.snapshot,
                    nonfinite=outcome.nonfinite or self._outcome.nonfinite,
                    oom=outcome.oom or self._outcome.oom,
                )
            self._outcome = outcome
