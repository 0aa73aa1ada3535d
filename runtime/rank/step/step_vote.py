"""The vote at step boundaries: what this rank votes for, and what all ranks agreed on.

A vote starts when an optimizer step is done and is collected before the next one, so it overlaps with the
forward and backward pass. `events.py` acts on its result at the end of that next step, on every rank alike:
a stop takes at most two steps to act. `runtime/rank/vote.py` transports the vote.

Requests to stop or save that the user makes through the board (`grpo-run stop`, `grpo-run save`, signals)
are polled at every step. One rank may see a request a step before another, so it takes effect only after
the vote has carried it to all ranks.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import replace

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import AlarmRaised
from grpo_run.runtime.rank.memory.cleanup_policy import NOTHING, CleanupNeed
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import ControlRequests, Flags, Vote, VoteResult, either
from grpo_run.watchdog.observation import Phase

NO_RESULT = VoteResult(step=0, flags=Flags())
NO_REQUESTS = ControlRequests()


class UserRequests:
    """Requests on this node's board that this rank has not put to a vote yet."""

    def __init__(self, board: Board) -> None:
        self._board = board
        self._saves_seen = board.requests[1]

    def poll(self) -> tuple[bool, bool]:
        """Return (stop requested, save requested since the last poll)."""
        stop, saves = self._board.requests
        save = saves > self._saves_seen
        self._saves_seen = saves
        return stop, save


class PhaseFingerprint:
    """A CRC-32 over the phases that this rank's main thread has entered since the last vote."""

    def __init__(self) -> None:
        self.value = 0

    def enter(self, phase: Phase) -> None:
        """Add one phase."""
        self.value = zlib.crc32(bytes((phase,)), self.value)

    def take(self) -> int:
        """Return the fingerprint and reset it."""
        value, self.value = self.value, 0
        return value


class StepVote:
    """Votes on the steps of one call.

    Args:
        requests: the user's requests, shared by all calls of the attempt.
        points: of the call; an alarm in it ends the attempt before anything else is done with a result.
    """

    def __init__(self, session: Session, requests: UserRequests, points: CallPoints) -> None:
        self._session = session
        self._points = points
        self.fingerprint = PhaseFingerprint()
        """Of the phases that this rank enters between two votes."""
        self._requests = requests
        self._result = NO_RESULT
        self._in_progress = False

    def start(
        self,
        step: int,
        *,
        snapshot: bool,
        cleanup: CleanupNeed = NOTHING,
        requests: ControlRequests = NO_REQUESTS,
    ) -> VoteResult:
        """Start the vote on a finished step; the vote before must have been collected.

        Args:
            step: the optimizer step that is done.
            snapshot: whether this rank wants a snapshot.
            cleanup: what this rank needs freed.
            requests: what callbacks ask for on this rank.

        Returns:
            The result of the votes collected since the last `start`, to act on now; without flags if there
            were none.
        """
        result, self._result = self._result, NO_RESULT
        stop, save = self._requests.poll()
        flags = Flags(
            stop=stop,
            # the save that is about to be made answers this request too
            save=save and not result.flags.save,
            snapshot=snapshot,
            alarm=self._points.alarm is not None,
            collect=cleanup.collect,
            release=cleanup.release,
        )
        self._in_progress = True
        vote = Vote(
            step=step,
            fingerprint=self.fingerprint.take(),
            common=self._points.common,
            flags=flags,
            requests=requests,
        )
        self._session.votes.start(vote)
        slot = self._session.slot
        slot.voted_step = step
        slot.voted_at_ns = time.monotonic_ns()
        return result

    def collect(self) -> VoteResult | None:
        """Wait for the vote in progress, if any, and return its result. Its step is then committed.

        Raises:
            ConsensusError: ranks disagree about the step or the phases.
            RuntimeError: a peer is gone or the vote timed out (raised by torch).
            AlarmRaised: the ranks agree to end the attempt.
        """
        if not self._in_progress:
            return None
        slot, votes = self._session.slot, self._session.votes
        slot.enter(Phase.vote)
        result = votes.collect()
        slot.leave(Phase.vote)
        self._in_progress = False
        if result is None:  # collected by the next call, after an exception that the script has handled
            return None
        slot.committed_step = result.step
        self._points.agreed = result.common
        slot.votes = votes.votes
        slot.vote_wait_seconds = votes.wait_seconds
        if result.flags.alarm:
            # None if only another rank has seen it, which says what it is
            raise AlarmRaised(self._points.alarm)
        # a save may collect a vote early, before the result of the previous vote was acted on
        self._result = replace(
            result,
            flags=either(result.flags, self._result.flags),
            asked_by_some=either(result.asked_by_some, self._result.asked_by_some),
        )
        return result
