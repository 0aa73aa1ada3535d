"""What proves that a rollout server is dead or stuck, and what does not: it may only be slow."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.features.rollout_server._judge import (
    CONFIRM_SECONDS,
    FOREIGN_SECONDS,
    LEAST_ANSWER_SECONDS,
    PAUSED_SECONDS,
    STOPPED_SECONDS,
    Processes,
    Reading,
    judge,
)
from grpo_run.watchdog.causes import Cause

NOW = 1000.0
OWN = Processes()
DEAD, STUCK, SYNC = Cause.rollout_server_dead, Cause.rollout_server_stuck, Cause.weight_sync_stuck


def found(reading: Reading, processes: Processes | None = OWN, *, syncing: bool = False) -> Any:
    """The cause that is found, or None."""
    finding = judge(reading, processes, syncing=syncing, now=NOW)
    return None if finding is None else finding.cause


@pytest.mark.parametrize(
    ("processes", "cause"),
    [
        (Processes(exit_code=1), DEAD),
        (Processes(exit_code=-9), DEAD),
        (Processes(gone=("VLLM::EngineCore (7)", NOW - CONFIRM_SECONDS)), DEAD),
        (Processes(stopped=("VLLM::EngineCore (7)", NOW - STOPPED_SECONDS)), STUCK),
    ],
)
def test_a_server_is_judged_by_its_processes(processes: Processes, cause: Cause) -> None:
    """Also if its health check succeeds."""
    assert found(Reading(answered_at=NOW), processes) is cause


@pytest.mark.parametrize(
    ("reading", "cause"),
    [
        (Reading(refused_since=NOW - CONFIRM_SECONDS), DEAD),
        (Reading(unhealthy_since=NOW - CONFIRM_SECONDS), DEAD),
        (Reading(paused_since=NOW - PAUSED_SECONDS), STUCK),
        (Reading(asked_at=NOW - LEAST_ANSWER_SECONDS), STUCK),
        (Reading(asked_at=NOW - 400, longest_answer_seconds=40), STUCK),
    ],
)
def test_a_server_is_judged_by_its_answers(reading: Reading, cause: Cause) -> None:
    """While its processes live."""
    assert found(reading) is cause


@pytest.mark.parametrize(
    ("reading", "processes"),
    [
        (Reading(refused_since=NOW - CONFIRM_SECONDS / 2), OWN),
        (Reading(unhealthy_since=NOW - CONFIRM_SECONDS / 2), OWN),
        (Reading(paused_since=NOW - PAUSED_SECONDS / 2), OWN),
        (Reading(), Processes(stopped=("python (7)", NOW - STOPPED_SECONDS / 2))),
        (Reading(), Processes(gone=("VLLM::EngineCore (7)", NOW - CONFIRM_SECONDS / 2))),
        (Reading(refused_since=NOW - FOREIGN_SECONDS / 2), None),
    ],
)
def test_a_moment_proves_nothing(reading: Reading, processes: Processes | None) -> None:
    """A debugger stops a process, a server of others is restarted."""
    assert found(reading, processes) is None


@pytest.mark.parametrize(
    "reading",
    [
        pytest.param(Reading(), id="never seen"),
        pytest.param(Reading(answered_at=NOW - 3600), id="a health check that is late for an hour"),
        pytest.param(Reading(asked_at=NOW - 59), id="the first request compiles"),
        pytest.param(Reading(asked_at=NOW - 399, longest_answer_seconds=40), id="slow as before"),
        pytest.param(Reading(asked_at=NOW - 3600, worked_at=NOW - 30), id="busy with other clients"),
    ],
)
def test_a_slow_server_is_not_stuck(reading: Reading) -> None:
    """Whoever has started it."""
    assert found(reading) is None
    assert found(reading, None) is None


def test_a_pause_or_a_missing_token_is_no_fault_while_weights_are_sent() -> None:
    """The trainer pauses the server for it, and it may take long."""
    assert found(Reading(paused_since=NOW - 600, asked_at=NOW - 600), syncing=True) is None


def test_a_server_that_is_stopped_while_weights_are_sent_has_a_name_of_its_own() -> None:
    """Its weights are of no policy."""
    assert found(Reading(), Processes(stopped=("python (7)", NOW - 60)), syncing=True) is SYNC


@pytest.mark.parametrize(
    ("reading", "processes", "seconds"),
    [
        (Reading(), Processes(gone=("VLLM::EngineCore (7)", NOW - 2)), 2.0),
        (Reading(), Processes(stopped=("VLLM::EngineCore (7)", NOW - 4)), 4.0),
        (Reading(refused_since=NOW - 3), OWN, 3.0),
        (Reading(unhealthy_since=NOW - 5), OWN, 5.0),
        (Reading(asked_at=NOW - 90), OWN, 90.0),
    ],
)
def test_a_fault_is_dated_from_when_it_was_first_seen(
    reading: Reading, processes: Processes, seconds: float
) -> None:
    """What confirms it takes part of the time until it is named."""
    finding = judge(reading, processes, syncing=False, now=NOW)
    assert finding is not None
    assert finding.since_seconds == seconds


def test_the_sentence_says_what_was_seen() -> None:
    """With the time, and what is usual."""
    finding = judge(Reading(asked_at=NOW - 90, longest_answer_seconds=0.4), OWN, syncing=False, now=NOW)
    assert finding is not None
    assert finding.what == "has not answered one token for 90 s, where it took at most 0.4 s before"
    assert finding.confidence == "deadline"
