"""When retried allocations are reported."""

from __future__ import annotations

import pytest

from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.memory.retries import STREAK_COMMITS, RetryWatch
from grpo_run.watchdog.observation import Phase


def memory(retries: int, *, phase: Phase = Phase.forward_backward, has_device: bool = True) -> RankMemory:
    """A rank with so many retries since its start, all in one phase."""
    phases = {Phase.optimizer: PhaseMemory(), phase: PhaseMemory(retries=retries)}
    return RankMemory(retries=retries, has_device=has_device, phases=phases)


def take(watch: RetryWatch, number: int, *, retries: int, before: int = 0, **changes: object) -> int:
    """Commit steps of two ranks, of which rank 1 retries; return its retries so far."""
    for step in range(1, number + 1):
        one = memory(before + step * retries, **changes)  # type: ignore[arg-type]
        watch.committed({0: memory(0), 1: one})
    return before + number * retries


def test_a_rank_that_retries_in_every_step_is_reported_with_its_phase() -> None:
    """Not before ten steps in a row."""
    watch = RetryWatch()
    before = take(watch, 3, retries=0)
    before = take(watch, STREAK_COMMITS - 1, retries=2, before=before)
    assert watch.warning is None
    take(watch, 1, retries=3, before=before)
    assert watch.warning is not None
    rank, text = watch.warning
    assert rank == 1
    assert text == (
        "GPU memory of rank 1 is nearly exhausted (phase forward_backward): in each of the last 10 steps,"
        " allocations succeeded only after all caches were returned (21 retries)"
    )


def test_a_step_without_a_retry_ends_the_row() -> None:
    """A few retries are harmless."""
    watch, before = RetryWatch(), 0
    for _ in range(5):
        before = take(watch, STREAK_COMMITS - 1, retries=4, before=before)
        before = take(watch, 1, retries=0, before=before)
    assert watch.warning is None


def test_ranks_without_a_device_retry_nothing() -> None:
    """Their counters are not torch's."""
    watch = RetryWatch()
    take(watch, 3 * STREAK_COMMITS, retries=1, has_device=False)
    assert watch.warning is None


@pytest.mark.parametrize("phase", [Phase.generate, Phase.optimizer, Phase.checkpoint])
def test_the_phase_with_most_retries_is_named(phase: Phase) -> None:
    """As on the board."""
    watch = RetryWatch()
    take(watch, STREAK_COMMITS + 1, retries=1, phase=phase)
    assert watch.warning is not None
    assert f"(phase {phase.name})" in watch.warning[1]
