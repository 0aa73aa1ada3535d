"""A step is committed when every rank of every node has voted on it, and once."""

from __future__ import annotations

from collections.abc import Callable

from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.history.lifecycle import RunState
from grpo_run.runtime.processes.agent import Directive


def test_a_step_is_committed_when_every_rank_has_voted(start: Callable[..., SupervisedRun]) -> None:
    """It is committed once, and not before the last vote."""
    run = start()
    run.vote(1, ranks=[0])
    assert run.poll() is Directive.monitor
    assert run.events("step_committed") == []
    run.vote(1, ranks=[1])
    run.poll()
    run.poll()
    assert [(record["step"], record["target_steps"]) for record in run.events("step_committed")] == [(1, 100)]
    assert run.state is RunState.running


def test_a_step_waits_for_the_vote_of_other_nodes(start: Callable[..., SupervisedRun]) -> None:
    """The board does not show their ranks; only the result of the vote commits the step."""
    run = start()
    run.attempt(world_size=4)
    run.train()
    run.vote(1)
    run.poll()
    assert run.events("step_committed") == []
    run.slots[0].committed_step = 1
    run.slots[0].publish()
    run.poll()
    assert [record["step"] for record in run.events("step_committed")] == [1]


def test_the_step_resumed_from_is_not_committed_again(start: Callable[..., SupervisedRun]) -> None:
    """The last attempt committed it."""
    run = start()
    run.train(step=5)
    run.poll()
    assert run.events("step_committed") == []


def test_an_unreadable_slot_prevents_a_commit(start: Callable[..., SupervisedRun]) -> None:
    """Its rank may not have voted."""
    run = start()
    run.vote(1)
    run.supervisor.board.begin_attempt(0)
    run.poll()
    assert run.events("step_committed") == []
