"""The exception that is shown is the culprit's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.supervised_run import SupervisedRun

from grpo_run.runtime.launch.config import Budget
from grpo_run.runtime.processes.agent import Directive


@pytest.mark.parametrize(
    ("shown", "wanted"), [(frozenset(), False), (frozenset({0}), True), (frozenset({0, 1}), False)]
)
def test_the_traceback_of_a_recovered_exception_is_the_culprits(
    start: Callable[..., SupervisedRun], shown: frozenset[int], wanted: bool
) -> None:
    """It is shown if the output of any rank is, but not that of the culprit, which has it."""
    run = start(step=7, shown_ranks=shown)
    peer_gone = "Connection closed by peer [127.0.0.1]:4182"
    run.raised(0, type="RuntimeError", message=peer_gone, traceback="Traceback of rank 0")
    run.raised(1, traceback="Traceback of rank 1")
    exits = [run.ranks.exit(0, code=1), run.ranks.exit(1, code=1)]
    assert run.poll(*exits) is Directive.restart
    assert "Traceback of rank 0" not in run.messages
    assert ("Traceback of rank 1" in run.messages) is wanted
    assert run.supervisor.history.recoveries[0].lost_connection == (0,)


def test_a_rank_that_has_not_exited_yet_is_named_with_its_error(start: Callable[..., SupervisedRun]) -> None:
    """Exit handlers take a while, but its error file says that it lost its connection."""
    run = start(step=7)
    run.raised(0, type="RuntimeError", message="Connection closed by peer")
    run.raised(1)
    run.poll(run.ranks.exit(1, code=1))
    (recovery,) = run.supervisor.history.recoveries
    assert (recovery.rank, recovery.lost_connection, recovery.also_failed) == (1, (0,), ())


def test_no_traceback_is_shown_if_every_rank_is_a_victim(start: Callable[..., SupervisedRun]) -> None:
    """A connection error is not the cause; that is on another node."""
    run = start(step=7, budget=Budget(failures_without_progress=0))
    for rank in (0, 1):
        run.raised(rank, type="RuntimeError", message="Connection closed by peer", traceback="Traceback")
    assert run.poll(run.ranks.exit(0, code=1), run.ranks.exit(1, code=1)) is Directive.terminate
    assert run.supervisor.exit_code == 93
    assert "Traceback" not in run.messages


@pytest.mark.parametrize("message", ["bad config: foo", "bad config: foo."])
def test_a_verdict_and_the_reason_to_give_up_are_two_sentences(
    start: Callable[..., SupervisedRun], message: str
) -> None:
    """A full stop separates them, whether or not the exception's message ends with one."""
    run = start(step=7, budget=Budget(failures_without_progress=0))
    run.raised(0, type="ValueError", message=message)
    run.poll(run.ranks.exit(0, code=1))
    sentence = run.supervisor.sentence
    assert "bad config: foo (train.py:3 in reward). Gave up: " in sentence
    assert sentence.endswith("(budget 0).")
