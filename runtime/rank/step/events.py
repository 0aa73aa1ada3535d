"""What a rank does at each event of an optimizer step, in order: one straight-line method per event.

`runtime/rank/hooks/_callback.py` calls `StepEvents` at the events of a Trainer, and
`runtime/rank/loops/run.py` at those of a hand-written loop. After a step all ranks vote on it, and act on the
result of the vote before: a stop, a save, a snapshot, memory cleanup. `docs/internals/step.md` lists the
calls of a real step in their order; it is generated from a recording of this module.

Does not know what a Trainer or a loop is. The methods of a trainer that are wrapped within a step are listed
in `runtime/rank/hooks/_rollout_hooks.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished
from grpo_run.runtime.errors import CheckpointError, Superseded
from grpo_run.runtime.history.events import TrainEnded, TrainStarted
from grpo_run.runtime.rank.memory.cleanup import HostCaches, StepCleanup
from grpo_run.runtime.rank.memory.cleanup_policy import CleanupNeed
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.step_vote import NO_REQUESTS, StepVote
from grpo_run.runtime.rank.vote import ControlRequests, either
from grpo_run.watchdog.observation import Phase, RankState


class StepEvents:
    """The events of one `train()` call or loop on this rank.

    Args:
        ordinal: the number of the call in the run, from 1.
        step_vote: votes on the steps of this call.
        saver: takes the checkpoints of this call.
        points: what features add to the call.
        note_position: notes the position in the data, when the batches of a step have been read.
    """

    def __init__(
        self,
        session: Session,
        ordinal: int,
        step_vote: StepVote,
        saver: Saver,
        points: CallPoints,
        note_position: Callable[[], None] = lambda: None,
    ) -> None:
        self._session = session
        self._ordinal = ordinal
        self._step_vote = step_vote
        self._saver = saver
        self._points = points
        self._note_position = note_position
        self._cleanup = self._make_cleanup(session.config.cleanup_every)
        self._host_caches = HostCaches(session.board)

    def call_begins(
        self,
        step: int,
        target_steps: int,
        *,
        record: Mapping[str, Any],
        restoring: bool = False,
        engine_sleeps: bool = False,
    ) -> None:
        """Publish that the call begins; its state is loaded.

        Args:
            step: the last finished step; above 0 if the call is resumed.
            target_steps: how many steps the call takes; 0 if not known.
            record: what the journal records of the call besides its steps.
            restoring: the call was finished in an earlier attempt and takes no steps now.
            engine_sleeps: a vLLM engine in this process releases its memory between rollouts. There is no
                memory cleanup then: the trainer releases caches itself before it wakes the engine.
        """
        if engine_sleeps:
            self._cleanup = self._make_cleanup(0)
        self._session.record_imports()
        slot = self._session.slot
        slot.state = RankState.training
        slot.train_call = self._ordinal
        slot.step = slot.voted_step = slot.committed_step = slot.resumed_step = step
        slot.target_steps = target_steps
        slot.train_started_ns = slot.voted_at_ns = time.monotonic_ns()
        slot.replace(Phase.data)
        slot.publish()
        self._saver.cadence.begin(step)
        if restoring:
            return  # a `train_started` event would count as a resume from the call's last step
        self._session.journal.write(
            TrainStarted(
                rank=self._session.rank,
                step=step,
                train_call=self._ordinal,
                target_steps=target_steps,
                **record,
            )
        )

    def step_begins(self, step: int) -> None:
        """The batches of a step have been read; its forward and backward passes begin.

        Args:
            step: counted from 1.
        """
        self._note_position()
        for begins in self._points.step_begins:
            begins(step)
        self._session.slot.replace(Phase.forward_backward)

    def optimizer_begins(self) -> None:
        """Commit the previous step before the optimizer changes the weights.

        Raises:
            ConsensusError: ranks disagree about the previous step or its phases.
            AlarmRaised: the ranks agree to end the attempt.
        """
        self._step_vote.collect()
        self._session.slot.replace(Phase.optimizer)

    def step_ends(self, step: int, requests: ControlRequests = NO_REQUESTS) -> ControlRequests:
        """Start the vote on a finished step, and act on the result of the previous vote.

        The saver then knows what is due: call `checkpoint`.

        Args:
            step: counted from 1.
            requests: what the script's callbacks ask for on this rank, and perhaps not on all. This rank
                waits for the vote then: if all ask, it is done after this step, as without the vote.

        Returns:
            What all ranks do after this step, of what callbacks have asked for on any.

        Raises:
            AlarmRaised: the ranks agree to end the attempt.
        """
        session, slot = self._session, self._session.slot
        self._step_vote.collect()  # if no optimizer has taken a step
        self._host_caches.after_step()
        for ends in self._points.step_ends:
            ends(step)
        self._points.norm = None
        agreed = self._step_vote.start(
            step,
            snapshot=session.is_main and self._saver.cadence.wanted(step),
            cleanup=self._cleanup.take_need(),
            requests=requests,
        )
        self._cleanup.clean(step, CleanupNeed(agreed.flags.collect, agreed.flags.release))
        slot.step = step
        slot.replace(Phase.data)
        self._cleanup.observe(step, session.accounting.step_ended())
        for begins in self._points.votes_begin:
            begins(step)
        slot.publish()
        own = None
        # before the next rollout, which may fail with such weights
        if self._points.alarm is not None or any(requests):
            own = self._step_vote.collect()
        self._saver.decide(step, agreed.flags)
        return agreed.asked_by_some if own is None else either(agreed.asked_by_some, own.asked_by_all)

    def checkpoint(self) -> None:
        """Take what is due of the finished step: a save that the user asked for, a snapshot, or the last save
        before a stop.

        Raises:
            Stopped: all ranks have agreed to stop.
        """
        for over in self._points.steps_over:
            over(self._session.slot.step)
        self._saver.after_step()

    def call_ends(self) -> None:
        """Commit the last step."""
        self._step_vote.collect()
        self._session.slot.state = RankState.between
        self._session.slot.publish()

    def _make_cleanup(self, every: int) -> StepCleanup:
        session = self._session
        return StepCleanup(
            every,
            session.slot,
            session.device_memory,
            session.host_memory,
            journal=session.journal.write if session.is_main else None,
        )


def finish(session: Session, call: TrainCall, saver: Saver, step: int) -> None:
    """Make the call's last step durable and mark its checkpoint as the end of the call. Collective.

    Raises:
        Superseded: a newer attempt has begun on other hosts.
    """
    path, superseded = saver.finish(), False
    if session.is_main:
        if path is not None:
            fence = session.fence(call.output_dir)
            try:
                mark_finished(path, fence=fence)
            except (OSError, CheckpointError) as error:
                superseded = fence is not None and not fence.exists()
                consequence = f"{path} could not be marked as the end of its {call.kind}"
                reason = fencing.superseded(consequence) if superseded else f"{consequence}: {error}"
                session.warn(str(reason))
        if not superseded:
            session.journal.write(TrainEnded(rank=0, step=step, train_call=call.ordinal))
    if session.votes.maximum(int(superseded)):
        raise Superseded


def leave(session: Session) -> None:
    """Publish that no call is running."""
    session.keep_process_group()
    session.slot.state = RankState.between
    session.slot.replace(Phase.idle)
    session.slot.publish()
