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
    UNUSED_SECONDS,
    Processes,
    Reading,
    judge,
)
from grpo_run.watchdog.causes import Cause

NOW = 1000.0
OWN = Processes()
DEAD, STUCK, SYNC = Cause.rollout_server_dead, Cause.rollout_server_stuck, Cause.weight_sync_stuck


def found(
    reading: Reading,
    processes: Processes | None = OWN,
    *,
    syncing: bool = False,
    needed_since: float | None = NOW - 600,
) -> Any:
    """The cause that is found, or None."""
    finding = judge(reading, processes, syncing=syncing, now=NOW, needed_since=needed_since)
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
        (Reading(counts_tokens=True, asked_at=NOW - LEAST_ANSWER_SECONDS), STUCK),
        (Reading(counts_tokens=True, asked_at=NOW - 400, longest_answer_seconds=40), STUCK),
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
        pytest.param(Reading(counts_tokens=True, asked_at=NOW - 59), id="the first request compiles"),
        pytest.param(
            Reading(counts_tokens=True, asked_at=NOW - 399, longest_answer_seconds=40), id="slow as before"
        ),
        pytest.param(
            Reading(counts_tokens=True, asked_at=NOW - 3600, worked_at=NOW - 30), id="busy with other clients"
        ),
        pytest.param(Reading(asked_at=NOW - 3600), id="no counters tell whether it works"),
    ],
)
def test_a_slow_server_is_not_stuck(reading: Reading) -> None:
    """Whoever has started it."""
    assert found(reading) is None
    assert found(reading, None) is None


def test_a_pause_or_a_missing_token_is_no_fault_while_weights_are_sent() -> None:
    """The trainer pauses the server for it, and it may take long."""
    assert (
        found(Reading(paused_since=NOW - 600, counts_tokens=True, asked_at=NOW - 600), syncing=True) is None
    )


def test_a_server_that_is_stopped_while_weights_are_sent_has_a_name_of_its_own() -> None:
    """Its weights are of no policy."""
    assert found(Reading(), Processes(stopped=("python (7)", NOW - 60)), syncing=True) is SYNC


def test_the_sentence_says_what_was_seen() -> None:
    """With the time, and what is usual."""
    reading = Reading(counts_tokens=True, asked_at=NOW - 90, longest_answer_seconds=0.4)
    finding = judge(reading, OWN, syncing=False, now=NOW, needed_since=NOW - 100)
    assert finding is not None
    assert finding.what == "has not answered one token for 90 s, where it took at most 0.4 s before"
    assert finding.confidence == "deadline"


@pytest.mark.parametrize(
    ("reading", "processes", "needed_since", "since"),
    [
        (Reading(), Processes(exit_code=1), NOW - 9, NOW),
        (Reading(), Processes(exit_code=1, gone=("x (7)", NOW - 0.5)), NOW - 9, NOW - 0.5),
        (Reading(), Processes(gone=("x (7)", NOW - 2)), NOW - 9, NOW - 2),
        (Reading(refused_since=NOW - 2), OWN, NOW - 9, NOW - 2),
        (Reading(unhealthy_since=NOW - 2), OWN, NOW - 9, NOW - 2),
        (Reading(), Processes(stopped=("x (7)", NOW - 8)), NOW - 9, NOW - 8),
        (Reading(), Processes(stopped=("x (7)", NOW - 90)), NOW - 9, NOW - 9),
        (Reading(), Processes(stopped=("x (7)", NOW - 90)), None, NOW - 90),
        (Reading(paused_since=NOW - 8), OWN, NOW - 9, NOW - 8),
        (Reading(counts_tokens=True, asked_at=NOW - 70), OWN, NOW - 80, NOW - 70),
        (Reading(counts_tokens=True, asked_at=NOW - 90, worked_at=NOW - 70), OWN, NOW - 80, NOW - 70),
    ],
)
def test_a_fault_is_known_since_it_holds_up_the_ranks(
    reading: Reading, processes: Processes, needed_since: float | None, since: float
) -> None:
    """How late it was detected is counted from then on, not from the last look."""
    finding = judge(reading, processes, syncing=False, now=NOW, needed_since=needed_since)
    assert finding is not None
    assert finding.since == since


@pytest.mark.parametrize(("gone_at", "said"), [(NOW - 1, "after"), (NOW, "with")])
def test_which_process_was_first_is_said_only_if_it_was_seen(gone_at: float, said: str) -> None:
    """Both may be killed at once."""
    processes = Processes(exit_code=-9, gone=("VLLM::EngineCore (7)", gone_at))
    finding = judge(Reading(), processes, syncing=False, now=NOW, needed_since=None)
    assert finding is not None
    assert finding.what == f"has exited by signal 9, {said} its engine VLLM::EngineCore (7)"


STOPPED = Processes(stopped=("VLLM::EngineCore (7)", NOW - 50))
PAUSED = Reading(paused_since=NOW - 50)


@pytest.mark.parametrize(("reading", "processes"), [(Reading(), STOPPED), (PAUSED, OWN)])
def test_a_server_that_stands_still_is_no_fault_before_it_is_needed(
    reading: Reading, processes: Processes
) -> None:
    """Somebody looks into it while the ranks compute. Ranks may need it unseen, so a stop does not count for
    ever; a pause may be the script's own, which lets the server sleep.
    """
    assert found(reading, processes, needed_since=None) is None
    assert found(reading, processes, needed_since=NOW - 1) is None
    assert found(reading, processes, needed_since=NOW - PAUSED_SECONDS) is STUCK
    stopped = Processes(stopped=("python (7)", NOW - UNUSED_SECONDS))
    assert found(Reading(), stopped, needed_since=None) is STUCK
    assert found(Reading(paused_since=NOW - UNUSED_SECONDS), needed_since=None) is None
