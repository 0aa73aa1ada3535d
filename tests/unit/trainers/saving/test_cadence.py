"""When the next snapshot is due: as asked, or as often as pays."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.runtime.record.failure_rate import steps_between_snapshots
from grpo_run.trainers.saving.cadence import Cadence

FAILURE_SECONDS = 2000.0


class Run:
    """Steps of a length, snapshots of a cost, and the cadence between them."""

    def __init__(self, every: int | None = None, *, first_step: int = 0, step_seconds: float = 10.0) -> None:
        self.now = 500.0
        self.step_seconds = step_seconds
        self.cost_seconds = 10.0
        self.said: list[tuple[int, float, float]] = []
        self.sentences: list[str] = []
        self.step = first_step
        self.cadence = Cadence(
            every,
            failure_seconds=FAILURE_SECONDS,
            notify=self._say,
            clock=lambda: self.now,
        )
        self.cadence.begin(first_step)

    def _say(self, text: str, *numbers: Any) -> None:
        self.sentences.append(text)
        self.said.append(numbers)  # type: ignore[arg-type]

    def advance(self, steps: int, *, heard: bool = True) -> tuple[list[int], list[int]]:
        """Train; gives the steps of the wishes and of the snapshots, each a step after its wish."""
        wishes, taken, due = [], [], False
        for _ in range(steps):
            self.now += self.step_seconds
            self.step += 1
            take, due = due and heard, self.cadence.wanted(self.step)
            if due:
                wishes.append(self.step)
            if take:
                taken.append(self.step)
                self.take()
        return wishes, taken

    def take(self) -> None:
        """A snapshot of the present step."""
        self.now += self.cost_seconds
        self.cadence.taken(self.step, self.cost_seconds)


@pytest.mark.parametrize("every", [1, 3, 10])
def test_every_so_many_steps_means_steps_of_that_number(every: int) -> None:
    """Wherever the call was resumed, so that all ranks and attempts agree; nobody is asked."""
    run = Run(every, first_step=4)
    assert [step for step in range(5, 31) if run.cadence.fixed(step)] == [
        step for step in range(5, 31) if step % every == 0
    ]
    assert run.advance(20) == ([], [])


def test_never_means_never() -> None:
    """0 steps."""
    run = Run(0)
    assert not any(run.cadence.fixed(step) for step in range(50))
    assert run.advance(50) == ([], [])


def test_a_chosen_cadence_is_no_fixed_one() -> None:
    """Ranks measure differently: rank 0 wishes, and the vote tells all."""
    run = Run()
    assert not any(run.cadence.fixed(step) for step in range(50))


def test_the_first_two_are_taken_at_once_and_then_the_optimum() -> None:
    """Sqrt(2 * 10 s * 2000 s) is 200 s: 20 steps between a snapshot and the next wish."""
    run = Run(first_step=100)
    wishes, taken = run.advance(50)
    assert wishes == [101, 103, 124, 145]
    assert taken == [102, 104, 125, 146]
    assert run.said == [(20, 10.0, 10.0)]
    assert "every 20 steps" in run.sentences[0]
    assert "10000 ms" in run.sentences[0]


def test_a_wish_is_voiced_once_until_it_can_be_seen_to_be_unheard() -> None:
    """Asked again before the snapshot was taken it would make two of each."""
    run = Run()
    assert run.cadence.wanted(1)
    assert not run.cadence.wanted(2)


def test_a_wish_that_is_never_heard_becomes_rare() -> None:
    """There is no memory, perhaps: trying costs all ranks an agreement each time."""
    wishes, taken = Run().advance(200, heard=False)
    assert taken == []
    assert wishes == [1, 3, 7, 15, 31, 63, 127]


def test_after_a_snapshot_wishes_are_voiced_as_before() -> None:
    """Memory was found after all."""
    run = Run()
    run.advance(40, heard=False)
    run.take()
    assert run.advance(30) == ([41, 62], [42, 63])


def test_the_scripts_own_checkpoints_count() -> None:
    """One in memory a moment ago is as good as a snapshot."""
    run = Run()
    run.advance(24)
    run.take()
    wishes, _ = run.advance(30)
    assert wishes[0] == 24 + 20


def test_the_time_that_snapshots_take_is_no_steps_time() -> None:
    """Else a dear snapshot would make itself rarer twice."""
    run = Run(step_seconds=1.0)
    run.cost_seconds = 100.0
    run.advance(10)
    steps, cost, step_seconds = run.said[0]
    assert (cost, step_seconds) == (100.0, 1.0)
    assert steps == steps_between_snapshots(100.0, FAILURE_SECONDS, 1.0)


def test_a_choice_is_said_when_it_changes_by_half_or_double() -> None:
    """Not at each small change, and the smaller changes do not add up unsaid."""
    run = Run()
    run.advance(5)
    assert [steps for steps, _, _ in run.said] == [20]
    for cost, said in ((20.0, []), (39.0, []), (41.0, [40]), (39.0, []), (10.0, [20]), (9.0, [])):
        before = len(run.said)
        run.cost_seconds = cost
        run.now += 10.0 * 20
        run.step += 20
        run.take()
        assert [steps for steps, _, _ in run.said[before:]] == said, cost


def test_two_at_one_step_do_not_divide_by_nothing() -> None:
    """A checkpoint of the script's in the step of a snapshot."""
    run = Run()
    run.advance(3)
    run.take()
    run.take()
    run.take()
    assert all(steps >= 1 for steps, _, _ in run.said)


def test_a_clock_that_stands_still_gives_every_step() -> None:
    """A measurement that says nothing must not stop snapshots."""
    run = Run(step_seconds=0.0)
    run.cost_seconds = 0.0
    _, taken = run.advance(9)
    assert taken == [2, 4, 6, 8]
