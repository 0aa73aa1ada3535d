"""The limit of a call ends what hangs, before the hang detector does, and no healthy call."""

from __future__ import annotations

import math

import pytest

from grpo_run.runtime.features.agent_tools._limits import idle_seconds, limit_seconds
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations

SETTINGS = DeadlineSettings()
HEALTHY: dict[str, list[float]] = {
    "always the same": [0.4] * 30,
    "a first call that loads a model": [180.0, 0.4, 0.4],
    "an image that is pulled at the first boot": [900.0],
    "a first call of a quarter of an hour": [1400.0, 0.2],
    "a cold start now and then": [0.4] * 50 + [30.0] + [0.4] * 50,
    "a rate limit of a minute": [0.2] * 200 + [60.0] + [0.2] * 20,
    "a rate limit of three minutes": [0.2] * 200 + [180.0] + [0.2] * 20,
    "a sandbox that is waited for": [1.0, 1.2, 55.0, 1.1],
    "a service that is started again": [0.1] * 500 + [120.0],
    "a database that is locked": [0.01] * 1000 + [30.0],
    "a compiler": [3.0, 40.0, 5.0, 90.0, 2.0],
    "tests of a repository": [30.0, 200.0, 60.0, 220.0],
    "tests that take ten minutes": [600.0] * 5,
    "minutes that vary": [60.0, 240.0, 100.0, 400.0, 300.0],
    "slower and slower": [1.1**step for step in range(60)],
    "faster and faster": [100.0 * 0.9**step for step in range(60)],
    "twice as long each time": [2.0**step for step in range(11)],
    "a nightly backup": [0.5] * 2000 + [200.0] + [0.5] * 100,
    "a network that retries with longer pauses": [0.3] * 40 + [1.0, 3.0, 7.0, 15.0, 31.0, 63.0, 127.0],
    "nothing at all": [0.0] * 100,
    "a game of any length": [0.001, 1.0, 200.0, 0.001, 150.0],
}


def limits(seconds: list[float]) -> list[float]:
    """The limit of each call, known from those before."""
    found, durations = [], Durations()
    for one in seconds:
        found.append(limit_seconds(None, durations, SETTINGS))
        durations = durations.then(Durations.of([0.0, one]))
    return found


@pytest.mark.parametrize("seconds", HEALTHY.values(), ids=HEALTHY)
def test_a_healthy_call_is_not_ended(seconds: list[float]) -> None:
    """However slow the tool is, as long as its calls are of one kind."""
    assert all(one < limit for one, limit in zip(seconds, limits(seconds), strict=True))


@pytest.mark.parametrize("seconds", HEALTHY.values(), ids=HEALTHY)
def test_a_call_ends_before_the_attempt(seconds: list[float]) -> None:
    """The hang detector grants a call that may be at work more, if it has a connection to outside."""
    durations = Durations.of([0.0, *seconds])
    learned = deadline_seconds(Phase.callback, durations, Occurrence.later, SETTINGS)
    assert limit_seconds(None, durations, SETTINGS) < max(learned, SETTINGS.outside_limit_seconds)


def test_a_quick_tool_that_hangs_is_ended_after_four_minutes() -> None:
    """It has shown that it is quick."""
    assert limit_seconds(None, Durations.of([0.4] * 30), SETTINGS) == 240.0


def test_the_users_limit_counts_whatever_is_learned() -> None:
    """Zero is no limit."""
    slow = Durations.of([500.0] * 30)
    assert limit_seconds(5.0, slow, SETTINGS) == limit_seconds(5.0, slow, SETTINGS, asynchronous=True) == 5.0
    assert limit_seconds(0.0, slow, SETTINGS) == math.inf
    assert limit_seconds(None, slow, SETTINGS, asynchronous=True) == 240.0


def test_what_does_nothing_has_as_long_as_the_call() -> None:
    """It may wait for a person. Less where nothing is known, and an hour where there is no limit."""
    known = Durations.of([0.4] * 30)
    assert idle_seconds(600.0, 600.0, Durations(), SETTINGS) == 600.0
    assert idle_seconds(1440.0, None, Durations(), SETTINGS) == 240.0
    assert idle_seconds(1440.0, None, known, SETTINGS) == 1440.0
    assert idle_seconds(math.inf, 0.0, known, SETTINGS) == SETTINGS.ceiling_seconds
