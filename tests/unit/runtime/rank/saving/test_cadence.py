"""A snapshot is due at the fixed interval, or when rank 0 requests it at Young's optimal interval."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.rank.saving._cadence import MAX_STEPS, Cadence, steps_between_snapshots

FAILURE_SECONDS = 2000.0


class Run:
    """A simulated run with a step duration, a snapshot cost and a cadence."""

    def __init__(self, every: int | None = None, *, first_step: int = 0, step_seconds: float = 10.0) -> None:
        self.now = 500.0
        self.step_seconds = step_seconds
        self.cost_seconds = 10.0
        self.notified: list[tuple[int, float, float]] = []
        self.step = first_step
        self.cadence = Cadence(
            every, failure_seconds=FAILURE_SECONDS, notify=self._notify, clock=lambda: self.now
        )
        self.cadence.begin(first_step)

    def _notify(self, steps: int, cost_seconds: float, step_seconds: float) -> None:
        self.notified.append((steps, cost_seconds, step_seconds))

    def advance(self, steps: int, *, answered: bool = True) -> tuple[list[int], list[int]]:
        """Train; return the steps of the requests and of the snapshots, each one step after its request."""
        requests, taken, due = [], [], False
        for _ in range(steps):
            self.now += self.step_seconds
            self.step += 1
            take, due = due and answered, self.cadence.wanted(self.step)
            if due:
                requests.append(self.step)
            if take:
                taken.append(self.step)
                self.take()
        return requests, taken

    def take(self) -> None:
        """Take a snapshot of the current step."""
        self.now += self.cost_seconds
        self.cadence.taken(self.step, self.cost_seconds)


@pytest.mark.parametrize("every", [1, 3, 10, 0, None])
def test_a_fixed_interval_uses_multiples_of_n(every: int | None) -> None:
    """All ranks and attempts agree, wherever the call was resumed, and rank 0 requests nothing; 0 means
    never. A measured interval is not fixed, because ranks measure different costs.
    """
    run = Run(every, first_step=4)
    fixed = [step for step in range(5, 31) if run.cadence.fixed(step)]
    assert fixed == [step for step in range(5, 31) if every and step % every == 0]
    assert (run.advance(20) == ([], [])) is (every is not None)


@pytest.mark.parametrize("keep_every", [0, 3])
def test_kept_snapshots_are_required_and_nothing_else_changes(keep_every: int) -> None:
    """Beside the interval of the others, which may be none."""
    cadence = Cadence(
        0, keep_every=keep_every, failure_seconds=1.0, notify=lambda *given: None, clock=lambda: 0
    )
    found = []
    for step in range(1, 8):
        cadence.decide(step, agreed=False)
        assert cadence.due == cadence.required == cadence.kept
        found += [step] if cadence.kept else []
        cadence.done()
    assert found == ([3, 6] if keep_every else [])


def test_after_two_snapshots_the_interval_is_optimal() -> None:
    """Sqrt(2 * 10 s * 2000 s) is 200 s: 20 steps between a snapshot and the next request."""
    run = Run(first_step=100)
    requests, taken = run.advance(50)
    assert requests == [101, 103, 124, 145]
    assert taken == [102, 104, 125, 146]
    assert run.notified == [(20, 10.0, 10.0)]


def test_an_unanswered_request_is_repeated_at_growing_intervals() -> None:
    """Not before it can be answered. There may be no memory, and each attempt costs all ranks a vote."""
    requests, taken = Run().advance(200, answered=False)
    assert taken == []
    assert requests == [1, 3, 7, 15, 31, 63, 127]


def test_a_snapshot_resets_the_interval_of_requests() -> None:
    """There was memory after all."""
    run = Run()
    run.advance(40, answered=False)
    run.take()
    assert run.advance(30) == ([41, 62], [42, 63])


def test_the_cost_of_snapshots_is_not_part_of_the_step_time() -> None:
    """Otherwise an expensive snapshot would count twice."""
    run = Run(step_seconds=1.0)
    run.cost_seconds = 100.0
    run.advance(10)
    steps, cost, step_seconds = run.notified[0]
    assert (cost, step_seconds) == (100.0, 1.0)
    assert steps == steps_between_snapshots(100.0, FAILURE_SECONDS, 1.0)


def test_the_interval_is_reported_again_when_it_has_changed_by_a_factor_of_two() -> None:
    """Small changes are not reported, but they add up."""
    run = Run()
    run.advance(5)
    assert [steps for steps, _, _ in run.notified] == [20]
    for cost, expected in ((20.0, []), (39.0, []), (41.0, [40]), (39.0, []), (10.0, [20]), (9.0, [])):
        before = len(run.notified)
        run.cost_seconds = cost
        run.now += 10.0 * 20
        run.step += 20
        run.take()
        assert [steps for steps, _, _ in run.notified[before:]] == expected, cost


def test_two_snapshots_of_one_step_do_not_divide_by_zero() -> None:
    """The script may save the step of a snapshot."""
    run = Run()
    run.advance(3)
    run.take()
    run.take()
    run.take()
    assert all(steps >= 1 for steps, _, _ in run.notified)


def test_a_clock_that_stands_still_requests_every_step() -> None:
    """An invalid measurement must not stop snapshots."""
    run = Run(step_seconds=0.0)
    run.cost_seconds = 0.0
    _, taken = run.advance(9)
    assert taken == [2, 4, 6, 8]


SECONDS = st.floats() | st.floats(0.0, 1e7) | st.sampled_from([0.0, -1.0, math.nan, 1e-310])
"""Clocks can be coarse, stand still, or be set."""


@given(cost=st.floats(1e-3, 1e3), failure=st.floats(60.0, 1e6), step=st.floats(0.1, 1e3))
def test_the_optimum_loses_the_least_time(cost: float, failure: float, step: float) -> None:
    """Half and twice the interval lose more, by Young's first-order sum of copies and lost work."""
    steps = steps_between_snapshots(cost, failure, step)

    def lost(between: float) -> float:
        return cost / between + between / (2 * failure)

    if steps > 1:  # else a step is longer than the optimum
        assert lost(steps * step) <= lost(2 * steps * step) * (1 + 1e-9)
        assert lost(steps * step) <= lost(steps * step / 2) * (1 + 1e-9)


@given(cost=SECONDS, failure=SECONDS, step=SECONDS)
def test_the_interval_is_at_least_one_step(cost: float, failure: float, step: float) -> None:
    """Holds for any measurement, up to the maximum; an invalid one gives every step."""
    steps = steps_between_snapshots(cost, failure, step)
    assert 1 <= steps <= MAX_STEPS
    assert steps == 1 or min(cost, failure, step) > 0
