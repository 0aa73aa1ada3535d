"""The request to stop: first and second request, deadline and waiting time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest

from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.supervisor.stop import StopRequest


def test_nothing_is_requested_at_first() -> None:
    """No deadline passes without a request."""
    stop = StopRequest(Timeouts(stop_seconds=30.0), History())
    assert not stop.requested
    assert not stop.expired(1e9)
    assert stop.waited_seconds(1e9) == 0.0


def test_ranks_have_the_timeout_after_the_first_request() -> None:
    """The deadline is inclusive."""
    stop = StopRequest(Timeouts(stop_seconds=30.0), History())
    assert stop.request(100.0)
    assert stop.requested
    assert (stop.expired(129.9), stop.expired(130.0)) == (False, True)


def test_a_second_request_expires_at_once() -> None:
    """The waiting time counts from the first request."""
    stop = StopRequest(Timeouts(stop_seconds=30.0), History())
    stop.request(100.0)
    assert not stop.request(102.5)
    assert stop.expired(102.5)
    assert stop.waited_seconds(102.5) == 2.5


@pytest.mark.parametrize("signalled", [False, True])
def test_time_in_which_nothing_ran_does_not_count(signalled: bool) -> None:
    """A job that is suspended after the request still saves when it goes on."""
    stop = StopRequest(Timeouts(stop_seconds=30.0, handler_seconds=30.0), History())
    ranks = cast(RankGroup, SimpleNamespace(request_exit=lambda: None, alive={0: 1}))
    stop.request(100.0)
    if signalled:
        stop.signalled.send(ranks, 100.0)
    stop.postpone(60.0)

    def is_over(now: float) -> bool:
        return stop.signalled.is_over(ranks, now) if signalled else stop.expired(now)

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
    history.apply({"event": event, "time": 1.0, "step": 4, "path": "/o/checkpoint-4", "seconds": seconds})
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
