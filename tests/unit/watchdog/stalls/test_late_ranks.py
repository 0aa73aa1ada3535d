"""A rank that is slow in its own work is reported, and noise is not."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.late_ranks import find_late_ranks


def test_a_rank_twice_as_slow_in_its_own_work_is_reported() -> None:
    """The phase that costs most time first."""
    usual = {Phase.generate: Durations.of([1.0] * 30), Phase.reward: Durations.of([0.5] * 30)}
    slow = {Phase.generate: Durations.of([4.0] * 30), Phase.reward: Durations.of([1.0] * 30)}
    found = find_late_ranks({0: usual, 1: usual, 2: slow})
    assert [(one.rank, one.phase) for one in found] == [(2, Phase.generate), (2, Phase.reward)]
    assert found[0].as_json()["ratio"] == pytest.approx(4.0)


@pytest.mark.parametrize(
    "slow",
    [
        {Phase.generate: Durations.of([4.0] * 20)},  # 19 after the first: too few
        {Phase.generate: Durations.of([1.1] * 30)},  # hardly slower
        {Phase.data: Durations.of([0.04] * 30)},  # ten times, but 36 ms
        {
            Phase.vote: Durations.of([9.0] * 30),
            Phase.forward_backward: Durations.of([9.0] * 30),
        },  # waits included
    ],
)
def test_noise_is_no_straggler(slow: dict[Phase, Durations]) -> None:
    """Neither are ranks in phases in which all wait for the slowest."""
    usual = {
        Phase.generate: Durations.of([1.0] * 30), Phase.data: Durations.of([0.004] * 30),
        Phase.vote: Durations.of([0.001] * 30), Phase.forward_backward: Durations.of([1.0] * 30),
    }  # fmt: skip
    assert find_late_ranks({0: usual, 1: usual, 2: slow}) == []


def test_a_single_rank_is_no_straggler() -> None:
    """There is nothing to compare it with."""
    assert find_late_ranks({0: {Phase.generate: Durations.of([100.0] * 30)}}) == []
