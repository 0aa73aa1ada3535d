"""The steps of one call: its start, the work after each step on every rank, and its end.

After a step, all ranks vote on it and act on the result of the vote before: a stop, a save, a snapshot,
memory cleanup. Called by `runtime/rank/hooks/callback.py` at the events of a Trainer and by
`runtime/rank/loops/run.py` at the steps of a hand-written loop. When the supervisor announces on the board
that host memory runs short, each rank releases its host caches after its next step, once per announcement
and by itself: nothing collective happens, because another rank may see the announcement a step later. Takes
no checkpoint itself (`runtime/rank/saving/saver.py`).
"""

from __future__ import annotations

import ctypes
import functools
import gc
import time
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.learning import LearningGuards
from grpo_run.runtime.rank.memory.cleanup import StepHygiene
from grpo_run.runtime.rank.memory.cleanup_policy import CleanupNeed
from grpo_run.runtime.rank.saving.saver import Saver
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.step.step_vote import StepVote
from grpo_run.watchdog.learning_observations import StepValues
from grpo_run.watchdog.observation import Phase, RankState


class HostCaches:
    """What one rank has freed.

    Args:
        board: carries the announcement.
    """

    def __init__(self, board: Board) -> None:
        self._board = board
        self._freed = False

    def after_step(self) -> None:
        """Free caches if memory has become short since they were freed last."""
        short = self._board.memory_is_short
        if short and not self._freed:
            free_caches()
        self._freed = short


def free_caches() -> None:
    """Collect garbage, and give memory that the C library keeps back to the kernel (malloc_trim(3), glibc only)."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class CallSteps:
    """The steps of one call on this rank.

    Args:
        ordinal: the number of the call, from 1.
    """

    def __init__(
        self, session: Session, ordinal: int, step_vote: StepVote, saver: Saver, guards: LearningGuards
    ) -> None:
        self._session = session
        self._guards = guards
        self._ordinal = ordinal
        self._step_vote = step_vote
        self._saver = saver
        self._hygiene = self._make_hygiene(session.config.hygiene_every)
        self._host_caches = HostCaches(session.board)
        self._tokens = 0

    def begin(
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
            engine_sleeps: a vLLM engine in this process releases its memory between rollouts. There is no hygiene then: the
                trainer releases caches itself before it wakes the engine.
        """
        if engine_sleeps:
            self._hygiene = self._make_hygiene(0)
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
            "train_started",
            rank=self._session.rank,
            step=step,
            train_call=self._ordinal,
            target_steps=target_steps,
            **record,
        )

    def finished(self, step: int, values: StepValues, *, collected: bool = False) -> None:
        """Start the vote on a finished step, and act on the result of the previous vote.

        The saver then knows what is due: call `Saver.after_step`.

        Args:
            values: what the step has shown of the learning.
            collected: the previous vote is known to be collected.

        Raises:
            GuardTripped: a learning guard ends the attempt.
        """
        session, slot = self._session, self._session.slot
        if not collected:  # before the optimizer's step
            self._step_vote.collect()
        self._host_caches.after_step()
        cadence = self._saver.cadence
        learning = self._guards.end_step(step, values)
        result = self._step_vote.start(
            step,
            snapshot=session.is_main and cadence.wanted(step),
            learning=learning,
            hygiene=self._hygiene.take_need(),
        )
        if result is not None:
            self._hygiene.clean(step, CleanupNeed(result.flags.collect, result.flags.release))
        slot.step = step
        slot.replace(Phase.data)
        self._hygiene.observe(step, session.accounting.step_ended())
        if session.memory_trace is not None:
            self._trace_memory(step)
        slot.publish()
        if learning.tripped:  # before the next rollout, which may fail with such weights
            self._step_vote.collect()
        save, stop = (result.flags.save, result.flags.stop) if result is not None else (False, False)
        self._saver.stopping |= stop
        cadence.decide(
            step,
            agreed=result is not None and result.flags.snapshot,
            required=save or self._saver.stopping,
            kept=save,
        )
        if result is not None and result.flags.timed_out and session.is_main:
            session.journal.write("rollout_timed_out", rank=session.rank, step=result.step)

    def _trace_memory(self, step: int) -> None:
        session, tokens = self._session, self._session.slot.tokens_generated
        assert session.memory_trace is not None
        session.memory_trace.step_ended(step, generated=tokens != self._tokens)
        self._tokens = tokens

    def _make_hygiene(self, every: int) -> StepHygiene:
        session = self._session
        journal = functools.partial(session.journal.write, "hygiene", rank=session.rank)
        return StepHygiene(
            every,
            session.slot,
            session.device_memory,
            session.host_memory,
            journal=journal if session.is_main else None,
        )

    def end(self) -> None:
        """Commit the last step."""
        self._step_vote.collect()
        self._session.slot.state = RankState.between
        self._session.slot.publish()


def finish(session: Session, call: TrainCall, saver: Saver, step: int) -> None:
    """Make the call's last step durable and mark its checkpoint as the end of the call. Collective."""
    path = saver.finish()
    if session.is_main:
        if path is not None:
            try:
                mark_finished(path)
            except (OSError, CheckpointError) as error:
                session.warn(f"{path} could not be marked as the end of its {call.kind}: {error}")
        session.journal.write("train_ended", rank=0, step=step, train_call=call.ordinal)
    session.votes.maximum(0)


def leave(session: Session) -> None:
    """Publish that no call is running."""
    session.keep_process_group()
    session.slot.state = RankState.between
    session.slot.replace(Phase.idle)
    session.slot.publish()
