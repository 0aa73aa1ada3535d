"""Deadlines of calls in workers: below the hang detector's, and learned."""

from __future__ import annotations

import pytest

from grpo_run.runtime.features.reward_workers._deadlines import CallClock, Learned
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.process_clocks import ThreadReading, TreeReading

SETTINGS = DeadlineSettings()


def learned(*seconds: float, limit: float | None = None) -> Learned:
    made = Learned(SETTINGS, limit)
    for one in seconds:
        made.add(one)
    return made


@pytest.mark.parametrize("seconds", [(), (0.1,), (0.1, 0.2, 0.3), (40.0, 90.0, 200.0), (300.0,) * 30])
def test_a_call_ends_before_the_hang_detector_would_end_the_rank(seconds: tuple[float, ...]) -> None:
    made = learned(*seconds)
    occurrence = Occurrence.later if seconds else Occurrence.first
    assert made.longest_call_seconds() < deadline_seconds(Phase.reward, made.durations, occurrence, SETTINGS)
    assert made.quiet_seconds(connected=False) < SETTINGS.floor_seconds or max(seconds, default=0) > 30


@pytest.mark.parametrize("longest", [0.5, 20.0, 100.0, 1000.0])
def test_a_call_may_take_longer_than_any_before(longest: float) -> None:
    assert learned(1.0, longest, longest).longest_call_seconds() >= 1.2 * longest


def test_the_users_limit_is_the_limit() -> None:
    made = learned(1.0, 50.0, limit=3.0)
    assert made.longest_call_seconds() == 3.0
    assert made.quiet_seconds(connected=True) == 3.0


def test_a_worker_with_a_connection_may_wait_longer() -> None:
    made = learned(0.1, 0.1)
    made.note_slow(400)
    assert made.quiet_seconds(connected=True) >= 200


def test_the_parts_of_a_search_are_bounded() -> None:
    made = learned(0.01, 0.01)
    assert made.part_seconds(40, 3) == 2.0
    assert made.part_seconds(1, 3) == 1.0
    assert learned().part_seconds(40, 3) == 10.0
    assert learned(0.01, 0.01, limit=1.0).part_seconds(32, 3) == 1.0


def test_a_part_may_take_as_long_as_the_function_gave_the_whole_batch() -> None:
    """After 30 s its own limit has ended the call; a half may need 30 s too, and gets somewhat more."""
    assert learned(0.01, 0.01).part_seconds(300, 3, 30.0) == 45.0


def test_after_a_batch_of_which_no_part_returned_its_parts_have_longer_too() -> None:
    """What its calls took before says nothing any more."""
    made = learned(0.01, 0.01)
    made.note_slow(48.0)
    assert made.part_seconds(300, 3) == 75.0


def test_after_a_batch_of_which_no_part_returned_the_deadline_is_five_times_as_long() -> None:
    made = learned(0.01, 0.01)
    before = made.longest_call_seconds()
    made.note_slow(before)
    assert made.longest_call_seconds() >= 4 * before


def reading(cpu: float, connected: bool = False) -> TreeReading:
    return TreeReading(
        members=frozenset({7}), cpu_seconds=cpu, io_bytes=0, runnable=frozenset(), connected=connected
    )


def quiet_after(cpu_per_second: float, seconds: int, connected: bool = False) -> str | None:
    clock = CallClock(learned(), 1440)
    found = None
    for now in range(0, seconds, 2):
        found = found or clock.quiet(reading(now * cpu_per_second, connected), float(now))
    return found


def test_a_worker_that_does_nothing_is_overdue_before_a_minute() -> None:
    assert quiet_after(0.0, 58) == "did nothing for 48 s"


def test_a_worker_that_computes_or_waits_for_a_server_is_not() -> None:
    assert quiet_after(0.5, 200) is None
    assert quiet_after(0.0, 1400, connected=True) is None


def test_the_first_call_may_wait_for_a_server_as_long_as_any_first_call() -> None:
    """Nothing is known of it. Later ones are compared with what was seen, and the user's limit holds."""
    assert learned().quiet_seconds(connected=True) == learned().longest_call_seconds() == 1440.0
    assert learned(100.0).quiet_seconds(connected=True) == 240.0
    assert learned(limit=30.0).quiet_seconds(connected=True) == 30.0


def test_an_interpreter_that_one_thread_holds_is_ended_before_the_hang_detector_would() -> None:
    """A late heartbeat alone says nothing: the machine may be short of CPUs."""

    def frozen_after(cpu_per_second: float, seconds: int) -> str | None:
        clock = CallClock(learned(), 1440)
        found = None
        for now in range(0, seconds, 2):
            threads = {7: ThreadReading("R", now * cpu_per_second), 8: ThreadReading("S", 0.0)}
            found = found or clock.frozen(threads, float(now), float(now))
        return found

    assert frozen_after(1.0, 20) == "held the interpreter for 16 s"
    assert frozen_after(0.01, 60) is None
    assert frozen_after(1.0, 14) is None


def test_a_late_attempt_knows_what_earlier_ones_have_learned() -> None:
    """That the hang detector has ended a reward does not raise the deadline of a worker."""
    earlier = Durations.of([0.1] * 30).ended_after(60)
    made = Learned(SETTINGS, None, earlier)
    assert made.longest_call_seconds() == 48.0
    assert made.part_seconds(40, 3) == 2.0


def test_a_call_is_overdue_at_its_limit() -> None:
    clock = CallClock(learned(), 5.0)
    assert clock.overdue(4.9) is None
    assert clock.overdue(5.0) == "did not return within 5 s"
