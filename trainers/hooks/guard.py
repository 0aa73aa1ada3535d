"""What the guarded `train()` calls of one attempt share on this rank.

`attach.install_guard` creates one `Guard` per attempt. `train_call.py` uses it in every call. State of a
single call is not kept here, and neither is the rank's identity (`rank/session.py`).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.staging.area import StagingArea
from grpo_run.trainers.hooks.requests import UserRequests
from grpo_run.trainers.rank.session import Session

if TYPE_CHECKING:
    from grpo_run.trainers.saving.snapshots import Snapshots


class Guard:
    """State shared by the `train()` calls of one attempt: call count, snapshots, requests already handled."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.requests = UserRequests(session.board)
        self.claimed: set[int] = set()
        """Numbers of the calls of the run that were recognized in this attempt."""
        self.running = False
        """Whether a `train()` call is running."""
        self._train_calls = 0
        self._warned_of_inner_call = False
        self._output_dirs: set[str] = set()
        self._snapshots: Snapshots | None = None

    def begin_call(self, trainer: Any) -> TrainCall:
        """Number the next `train()` call by its position, and warn if an earlier call used the same directory."""
        self._train_calls += 1
        call = TrainCall(
            ordinal=self._train_calls,
            trainer_class=type(trainer).__qualname__,
            output_dir=str(trainer.args.output_dir),
        )
        directory = os.path.realpath(call.output_dir)
        if directory in self._output_dirs:
            self.session.warn(
                f"{call.output_dir} was used by an earlier train() call. Both calls number their checkpoints from 0,"
                " so a recovery may have to repeat the earlier call. Give each call its own output_dir."
            )
        self._output_dirs.add(directory)
        return call

    def warn_of_inner_call(self, trainer: Any) -> None:
        """Warn once that a `train()` call inside another one is a part of that one's step."""
        if not self._warned_of_inner_call:
            self._warned_of_inner_call = True
            self.session.warn(
                f"a train() call inside another one ({type(trainer).__qualname__}) belongs to the step of the outer call:"
                " after a fault it is repeated with that step, and it has no checkpoints of its own"
            )

    def recognize(self, call: TrainCall, ordinal: int) -> TrainCall:
        """Return the call with its number in the run, on which all ranks have agreed."""
        self.claimed.add(ordinal)
        return call.model_copy(update={"ordinal": ordinal})

    @property
    def snapshots(self) -> Snapshots | None:
        """In-memory snapshots of this rank; None if checkpoints are written directly to disk."""
        directory = self.session.config.snapshot_directory
        if self._snapshots is None and directory is not None:
            # imports torch, which only the script may import first
            from grpo_run.trainers.saving.snapshots import Snapshots

            self._snapshots = Snapshots(self.session, StagingArea(directory))
        return self._snapshots
