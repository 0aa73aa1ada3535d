"""When retried allocations are reported, and when they are thrashing."""

from __future__ import annotations

from dataclasses import fields

import pytest

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.out_of_memory import diagnose_retries
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.memory.retries import STREAK_COMMITS, USUAL_COMMITS, WARM_UP_COMMITS, RetryWatch
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


def memory(retries: int, *, phase: Phase = Phase.forward_backward, has_device: bool = True) -> RankMemory:
    """A rank with so many retries since its start, all in one phase."""
    nothing = {field.name: 0 for field in fields(PhaseMemory)}
    whole = {field.name: 0 for field in fields(RankMemory)} | {"retries": retries, "has_device": has_device}
    phases = {Phase.optimizer: PhaseMemory(**nothing), phase: PhaseMemory(**nothing | {"retries": retries})}
    return RankMemory(**whole | {"phases": phases})  # type: ignore[arg-type]


class Steps:
    """Committed steps of two ranks, of which rank 1 retries."""

    def __init__(self, **changes: object) -> None:
        self.watch = RetryWatch()
        self.now, self.step, self.tokens, self.retries = 0.0, 0, 0, 0
        self._changes = changes

    def take(self, number: int, *, seconds: float = 1.0, retries: int = 0, tokens: int = 100) -> Steps:
        """Commit steps that are alike."""
        for _ in range(number):
            self.now += seconds
            self.step += 1
            self.tokens += tokens
            self.retries += retries
            ranks = {0: memory(0), 1: memory(self.retries, **self._changes)}  # type: ignore[arg-type]
            self.watch.committed(self.step, self.now, self.tokens, ranks)
        return self


USUAL = WARM_UP_COMMITS + USUAL_COMMITS


def test_a_rank_that_retries_in_every_step_is_reported_with_its_phase() -> None:
    """Not before ten steps in a row."""
    steps = Steps().take(USUAL).take(STREAK_COMMITS - 1, retries=2)
    assert steps.watch.found is None
    found = steps.take(1, retries=3).watch.found
    assert found is not None
    assert (found.rank, found.phase, found.count) == (1, MemoryPhase.backward, 2 * (STREAK_COMMITS - 1) + 3)
    assert found.slowdown == pytest.approx(1.0)
    assert not found.is_thrashing
    assert found.warning == (
        "GPU memory of rank 1 is nearly exhausted (phase backward): in each of the last 10 steps, allocations succeeded only"
        " after all caches were returned (21 retries)"
    )


def test_a_step_without_a_retry_ends_the_row() -> None:
    """A few retries are harmless."""
    steps = Steps().take(USUAL)
    for _ in range(5):
        steps.take(STREAK_COMMITS - 1, seconds=9.0, retries=4).take(1)
    assert steps.watch.found is None


def test_steps_that_take_much_longer_than_without_retries_are_thrashing() -> None:
    """The verdict is exhausted memory of that phase, and no certainty that it repeats."""
    found = Steps().take(USUAL).take(STREAK_COMMITS, seconds=4.0, retries=6).watch.found
    assert found is not None
    assert found.slowdown == pytest.approx(4.0)
    assert found.is_thrashing
    verdict = diagnose_retries(found, {0: None, 1: None})
    assert (verdict.cause, verdict.culprits, verdict.waiters) == (Cause.gpu_oom, (1,), (0,))
    assert verdict.sentence == (
        "GPU memory of rank 1 is exhausted after step 23 (phase backward): in each of the last 10 steps, allocations succeeded"
        " only after all caches were returned (60 retries), and steps take 4.0 times as long."
    )
    assert verdict.shortage is not None
    assert verdict.shortage.phase is MemoryPhase.backward
    assert not verdict.deterministic
    assert verdict.advice


def test_longer_completions_are_no_thrashing() -> None:
    """They need more time and more memory; each token takes as long as before."""
    found = Steps().take(USUAL).take(STREAK_COMMITS, seconds=4.0, tokens=400, retries=1).watch.found
    assert found is not None
    assert found.slowdown == pytest.approx(1.0)
    assert not found.is_thrashing


def test_fewer_tokens_alone_are_no_thrashing() -> None:
    """Steps must take longer, too."""
    found = Steps().take(USUAL).take(STREAK_COMMITS, tokens=10, retries=1).watch.found
    assert found is not None
    assert not found.is_thrashing


def test_without_usual_steps_nothing_is_known_of_the_cost() -> None:
    """A rank with vLLM may retry from its first step on."""
    found = Steps().take(60, seconds=9.0, retries=1).watch.found
    assert found is not None
    assert found.slowdown is None
    assert not found.is_thrashing


def test_a_trainer_that_generates_nothing_is_judged_by_its_steps() -> None:
    """SFT, for example."""
    found = Steps().take(USUAL, tokens=0).take(STREAK_COMMITS, seconds=3.5, tokens=0, retries=1).watch.found
    assert found is not None
    assert found.is_thrashing


def test_another_call_is_not_compared_with_the_first() -> None:
    """Its steps may take ten times as long by themselves."""
    steps = Steps().take(USUAL)
    steps.step = 0
    found = steps.take(USUAL + STREAK_COMMITS, seconds=10.0, retries=1).watch.found
    assert found is not None
    assert found.slowdown is None


def test_ranks_without_a_device_retry_nothing() -> None:
    """Their counters are not torch's."""
    steps = Steps(has_device=False).take(USUAL).take(STREAK_COMMITS, seconds=9.0, retries=1)
    assert steps.watch.found is None


@pytest.mark.parametrize(
    ("phase", "part"),
    [
        (Phase.generate, MemoryPhase.generate),
        (Phase.optimizer, MemoryPhase.optimizer),
        (Phase.checkpoint, MemoryPhase.unknown),
    ],
)
def test_the_phase_with_most_retries_is_named(phase: Phase, part: MemoryPhase) -> None:
    """Each phase of the board is one of the parts that a memory plan knows, or unknown."""
    found = Steps(phase=phase).take(USUAL).take(STREAK_COMMITS, retries=1).watch.found
    assert found is not None
    assert found.phase is part
