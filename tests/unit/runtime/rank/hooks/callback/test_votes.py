"""Each step is voted on, and committed before the next one; no flag of a vote is lost."""

from __future__ import annotations

from typing import Any

from support.builders.trainers.callback_loop import Loop, Reading
from transformers import TrainerControl

from grpo_run.runtime.rank.vote import Vote
from grpo_run.watchdog.observation import Phase


def test_a_step_is_committed_before_the_next_optimizer_step(loop: Loop, reading: Reading) -> None:
    """The vote starts at the end of the step and is collected before weights change again. Votes are
    counted, and the time spent waiting for them.
    """
    loop.step()
    assert (reading().step, reading().voted_step, reading().committed_step) == (1, 1, 0)
    loop.step()
    loop.step()
    assert (reading().voted_step, reading().committed_step, reading().votes) == (3, 2, 2)
    assert reading().vote_wait_seconds >= 0


def test_results_that_are_collected_together_are_combined(loop: Loop, session: Any) -> None:
    """A save may collect a vote early. The flags of both votes still take effect."""
    session.board.request_save()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.saver.stopping
    assert loop.saved[-1] == loop.stopped_at == 3


def test_the_last_vote_is_collected_at_the_end(session: Any, reading: Reading) -> None:
    """The last step is committed too."""
    loop = Loop(session)
    loop.begin(8)
    loop.step()
    loop.callback.on_train_end(loop.args, loop.state, TrainerControl())
    session.slot.publish()
    assert reading().committed_step == 9


def test_the_fingerprint_of_phases_is_voted_on(loop: Loop, session: Any) -> None:
    """Each vote carries the phases since the vote before."""
    fingerprints = []
    start = session.votes.start

    def record(vote: Vote) -> None:
        fingerprints.append(vote.fingerprint)
        start(vote)

    session.votes.start = record
    loop.step_vote.fingerprint.enter(Phase.generate)
    loop.step()
    loop.step()
    assert fingerprints[0] != 0
    assert fingerprints[1] == 0
