"""A stop or a save that is requested happens once, on all ranks at the same step."""

from __future__ import annotations

from typing import Any

import pytest
from support.builders.trainers.callback_loop import Loop, with_flags
from transformers import TrainerControl

from grpo_run.runtime.rank.step.step_vote import UserRequests


@pytest.mark.parametrize("hooks", [True, False])
def test_a_stop_acts_within_two_steps_with_a_checkpoint(session: Any, hooks: bool) -> None:
    """On the step that all ranks agreed on, with and without `on_pre_optimizer_step`."""
    loop = Loop(session, hooks_before_optimizer=hooks)
    loop.begin()
    loop.step()
    session.board.request_stop()
    loop.step()
    loop.step()
    assert loop.saver.stopping
    assert loop.stopped_at == 3
    assert loop.saved == [3]


def test_without_a_request_nothing_is_saved_or_stopped(loop: Loop) -> None:
    """The script's own save schedule is unchanged."""
    for _ in range(9):
        loop.step()
    assert (loop.saved, loop.stopped_at, loop.saver.stopping) == ([], None, False)


@pytest.mark.parametrize("hooks", [True, False])
def test_a_save_request_makes_one_checkpoint(session: Any, hooks: bool) -> None:
    """Later steps do not repeat it."""
    loop = Loop(session, hooks_before_optimizer=hooks)
    loop.begin()
    session.board.request_save()
    for _ in range(4):
        loop.step()
    assert loop.saved == [2]
    session.board.request_save()
    for _ in range(3):
        loop.step()
    assert loop.saved == [2, 6]


def test_a_save_request_before_the_call_is_served_once(session: Any, requests: UserRequests) -> None:
    """Requests are counted over all calls of the attempt: the next call does not repeat the save."""
    session.board.request_save()
    for saved in ([2], []):
        loop = Loop(session, requests=requests)
        loop.begin()
        for _ in range(4):
            loop.step()
        loop.callback.on_train_end(loop.args, loop.state, TrainerControl())
        assert loop.saved == saved


def test_two_ranks_that_see_a_request_a_step_apart_save_once(loop: Loop, session: Any) -> None:
    """The request arrives between the polls of two ranks, so one rank votes for it a step before the
    other.
    """
    loop.step()
    start = session.votes.start
    # the other rank's flag reaches this rank through the vote
    session.votes.start = lambda vote: start(with_flags(vote, save=True))
    loop.step()
    session.votes.start = start
    session.board.request_save()
    for _ in range(5):
        loop.step()
    assert len(loop.saved) == 1
