"""What the processes that remain have done, and how long they may do nothing."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.exit_hangs import (
    QUIET_BYTES,
    Activity,
    ExitClock,
    ExitFacts,
    ProcessUsage,
    all_frozen,
    hung_ranks,
    limit_seconds,
)

RANK, HELPER = (900, 1), (950, 7)


def facts(*, cpu: float = 10.0, io: int = 1000, helper: bool = True) -> ExitFacts:
    """A rank with a helper."""
    own = {RANK: ProcessUsage(cpu_seconds=cpu, io_bytes=io)}
    if helper:
        own[HELPER] = ProcessUsage(cpu_seconds=1.0, io_bytes=0)
    return ExitFacts(states={0: "S"}, own=own)


@pytest.mark.parametrize(
    ("now", "expected"),
    [
        (facts(), Activity.none),
        (facts(cpu=10.5, io=1000 + QUIET_BYTES - 1), Activity.none),
        (facts(cpu=10.7), Activity.cpu),
        (facts(io=1000 + QUIET_BYTES), Activity.progress),
        (facts(cpu=10.7, io=1000 + QUIET_BYTES), Activity.progress),
        (facts(helper=False), Activity.progress),
        # a pid that is used again is another process, whose counters have nothing to do with the first one's
        (
            ExitFacts(states={0: "S"}, own={(900, 2): ProcessUsage(cpu_seconds=0.0, io_bytes=0)}),
            Activity.progress,
        ),
    ],
)
def test_the_most_that_was_done_counts(now: ExitFacts, expected: Activity) -> None:
    """The threads of an idle interpreter and the last lines of a log are nothing. A helper's exit is
    progress.
    """
    clock = ExitClock(DeadlineSettings(), facts(), 0.0)
    clock.record(now, 2.0)
    assert clock.seen is expected


def test_a_process_that_may_wait_has_the_longer_limit() -> None:
    """Unless the user has set a longer one for all."""
    alone = ExitFacts(states={0: "S"}, own={})
    waiting = ExitFacts(states={0: "S"}, own={}, waits_for=("process 4 (curl)",))
    assert limit_seconds(alone, DeadlineSettings()) == 60.0
    assert limit_seconds(waiting, DeadlineSettings()) == 300.0
    assert limit_seconds(waiting, DeadlineSettings(exit_seconds=400.0)) == 400.0


def test_a_rank_that_has_exited_and_is_not_reaped_does_not_hang() -> None:
    """The supervisor reaps it at its next poll."""
    assert hung_ranks(ExitFacts(states={1: "S", 0: "Z", 3: "T", 2: "D"}, own={})) == (1, 2, 3)


@pytest.mark.parametrize(
    ("states", "silent", "expected"),
    [
        ({1: "T"}, {1: 20.0}, True),
        ({1: "R"}, {1: 20.0}, True),
        ({1: "T"}, {1: 19.9}, False),
        ({1: "S"}, {1: 100.0}, False),
        ({0: "S", 1: "T"}, {0: 0.5, 1: 100.0}, False),
        ({0: "R", 1: "T"}, {0: 20.0, 1: 20.0}, True),
        ({0: "T", 1: "T"}, {0: 20.0, 1: 20.0}, True),
    ],
)
def test_frozen_interpreters_are_found_if_no_other_rank_works(
    states: dict[int, str], silent: dict[int, float], expected: bool
) -> None:
    """Stopped, or at work without running Python."""
    facts = ExitFacts(states=states, own={})
    assert all_frozen(facts, silent, DeadlineSettings()) is expected
