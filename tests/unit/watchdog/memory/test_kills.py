"""Which ranks the kernel has killed: its counter must have risen when the rank died, not at another time."""

from __future__ import annotations

from grpo_run.watchdog.memory.host_kills import HELPER_SECONDS, KillWatch, reached_limit
from grpo_run.watchdog.memory.host_sample import LimitUse


def nobody() -> frozenset[int]:
    """No rank is exiting."""
    return frozenset()


def watch(count: int | None = 0) -> KillWatch:
    """A watch at the beginning of an attempt."""
    made = KillWatch()
    made.begin(count)
    return made


def test_a_rise_at_the_poll_that_saw_the_exit_is_a_kill() -> None:
    """Also if it is seen only when the counter is read again during that poll."""
    for again in (False, True):
        kills = watch(4)
        kills.record(4, 1.0, nobody)
        kills.record(4 if again else 5, 1.2, nobody)
        kills.record(5, 1.3, nobody, again=True)
        assert kills.killed({1}) == {1}
        assert kills.counts() == (4, 5)


def test_a_kill_without_a_rise_is_somebody_elses() -> None:
    """`kill -9` by a user does not count, and neither does what the kernel killed before the attempt."""
    kills = watch(7)
    kills.record(7, 1.0, nobody)
    kills.record(7, 1.2, nobody, again=True)
    assert not kills.killed({0, 1})
    assert not kills.helper_killed(1.2)


def test_an_earlier_rise_counts_only_for_ranks_that_were_dying() -> None:
    """A reward worker was killed; seconds later a user kills rank 0. Rank 1 has taken as long to free its
    memory.
    """
    kills = watch()
    kills.record(1, 1.0, lambda: frozenset({1}))
    kills.record(1, 1.2, nobody)
    kills.record(1, 3.0, nobody)
    assert kills.killed({0, 1}) == {1}
    assert kills.dying({0}) == {1}
    assert not kills.dying({0, 1})


def test_a_helper_counts_as_killed_for_a_minute() -> None:
    """A data loader notices seconds later that a worker has died."""
    kills = watch()
    kills.record(1, 10.0, nobody)
    assert kills.helper_killed(10.0 + HELPER_SECONDS)
    assert not kills.helper_killed(10.1 + HELPER_SECONDS)


def test_an_unreadable_counter_proves_nothing() -> None:
    """A counter that appears later, or is unreadable for a moment, has not risen."""
    kills = watch(None)
    for number, count in enumerate((3, None, 3)):
        kills.record(count, 1.0 + number, nobody)
    assert kills.rises == []
    kills.record(4, 4.0, nobody)
    assert kills.counts() == (3, 4)


def limit(name: str, used: int, hits: int | None) -> LimitUse:
    """A limit of 100 bytes."""
    return LimitUse(name=name, limit_bytes=100, usage_bytes=used, working_set_bytes=used, hits=hits)


def test_the_limit_that_allocations_have_met_is_the_one_reached() -> None:
    """Its figures are those before the kill; a limit that was nearer before but was not met is not blamed."""
    before = (limit("machine", 70, None), limit("outer", 60, 5), limit("inner", 40, 2))
    inner = (limit("machine", 71, None), limit("outer", 62, 5), limit("inner", 99, 9))
    assert reached_limit(before, inner) == before[2]
    assert reached_limit(before, before) == before[0]
    assert reached_limit(before[1:], before[1:]) is None
