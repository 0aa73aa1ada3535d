"""The request to stop: first and second request, deadlines, and SIGTERM when no rank saves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.journal import as_event

from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.supervisor.stop import StopRequest


def test_ranks_have_the_timeout_after_the_first_request_and_no_time_after_a_second() -> None:
    """The deadline is inclusive. The waiting time counts from the first request."""
    stop = StopRequest(Timeouts(stop_seconds=30.0), History())
    assert not stop.requested
    assert not stop.expired(1e9)
    assert stop.waited_seconds(1e9) == 0.0
    assert stop.request(100.0)
    assert stop.requested
    assert (stop.expired(129.9), stop.expired(130.0)) == (False, True)
    assert not stop.request(102.5)
    assert stop.expired(102.5)
    assert stop.waited_seconds(102.5) == 2.5


def test_the_termination_that_a_signal_announces_is_no_second_request() -> None:
    """A scheduler sends SIGUSR1, as it was told, and at the time limit SIGTERM: ranks may still be saving."""
    stop = StopRequest(Timeouts(stop_seconds=300.0), History())
    assert stop.request(100.0, "SIGUSR1")
    assert not stop.request(190.0, "SIGTERM")
    assert not stop.request(190.1, "SIGTERM")
    assert (stop.expired(399.9), stop.expired(400.0)) == (False, True)
    assert not stop.request(192.5, "SIGTERM")
    assert stop.expired(192.5)


def test_one_termination_may_arrive_twice() -> None:
    """A scheduler sends it by two ways within milliseconds; later it is a second request."""
    stop = StopRequest(Timeouts(stop_seconds=300.0), History())
    assert stop.request(100.0, "SIGTERM")
    assert not stop.request(101.9, "SIGTERM")
    assert (stop.expired(399.9), stop.expired(400.0)) == (False, True)
    assert not stop.request(102.0, "SIGTERM")
    assert stop.expired(102.0)


@pytest.mark.parametrize("first", ["SIGUSR1", "SIGTERM", "SIGINT"])
@pytest.mark.parametrize("again", ["SIGUSR1", "SIGINT", ""])
def test_any_other_request_after_a_signal_is_a_second_one_at_once(first: str, again: str) -> None:
    """Nobody sends these twice for one stop."""
    stop = StopRequest(Timeouts(stop_seconds=300.0), History())
    assert stop.request(100.0, first)
    assert not stop.request(100.1, again)
    assert stop.expired(100.1)


@pytest.mark.parametrize(("step_seconds", "usual"), [(None, 5.0), (0.2, 5.0), (40.0, 80.0)])
def test_a_stop_takes_two_steps_and_some_seconds_at_least(step_seconds: float | None, usual: float) -> None:
    """What takes longer is long only if a step has no end, which others judge."""
    stop = StopRequest(Timeouts(stop_seconds=300.0), History())
    assert not stop.takes_long(1e9, step_seconds)
    stop.request(100.0)
    assert not stop.takes_long(99.9 + usual, step_seconds)
    assert stop.takes_long(100.0 + usual, step_seconds)


@pytest.mark.parametrize("signalled", [False, True])
def test_time_in_which_nothing_ran_does_not_count(signalled: bool) -> None:
    """A job that is suspended after the request still saves when it goes on."""
    stop = StopRequest(Timeouts(stop_seconds=30.0, handler_seconds=30.0), History())
    ranks = cast(RankGroup, SimpleNamespace(request_exit=lambda: None, alive={0: 1}))
    stop.request(100.0)
    if signalled:
        stop.signal(ranks, 100.0)
    stop.postpone(60.0)

    def is_over(now: float) -> bool:
        return stop.handlers_are_over(ranks, now) if signalled else stop.expired(now)

    assert (is_over(189.9), is_over(190.0)) == (False, True)
    stop.request(191.0)
    assert is_over(191.0)


@pytest.mark.parametrize("event", ["checkpoint_staged", "checkpoint_published"])
@pytest.mark.parametrize(
    ("timeouts", "seconds", "said"),
    [
        (Timeouts(stop_seconds=30.0, handler_seconds=30.0), 30.1, True),
        (Timeouts(stop_seconds=30.0, handler_seconds=30.0), 30.0, False),
        (Timeouts(), 301.0, False),
    ],
)
def test_a_save_that_does_not_fit_into_the_timeout_is_said_once(
    event: str, timeouts: Timeouts, seconds: float, said: bool
) -> None:
    """Only if the user gave one: it is what the scheduler grants."""
    history = History()
    stop = StopRequest(timeouts, history)
    assert stop.short_sentence() is None
    history.apply(
        as_event({"event": event, "time": 1.0, "step": 4, "path": "/o/checkpoint-4", "seconds": seconds})
    )
    assert ("--stop-timeout" in (stop.short_sentence() or "")) is said
    assert stop.short_sentence() is None


def test_noted_requests_are_taken_once_in_order() -> None:
    """A signal handler notes them; a poll takes them."""
    stop = StopRequest(Timeouts(stop_seconds=30.0), History())
    stop.note("SIGTERM")
    stop.note("SIGINT")
    assert not stop.requested
    assert stop.take_noted() == ["SIGTERM", "SIGINT"]
    assert stop.take_noted() == []


def test_the_wait_for_handlers_ends_with_the_last_rank() -> None:
    """Before their deadline."""
    stop = StopRequest(Timeouts(handler_seconds=30.0), History())
    ranks: Any = SimpleNamespace(request_exit=lambda: None, alive={0: 1})
    stop.request(100.0)
    stop.signal(ranks, 100.0)
    assert not stop.handlers_are_over(ranks, 101.0)
    ranks.alive.clear()
    assert stop.handlers_are_over(ranks, 101.0)
