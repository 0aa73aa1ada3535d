"""Memory that grows from step to step."""

from __future__ import annotations

from dataclasses import fields

from grpo_run.runtime.supervisor.memory.policy import EARLY_COMMITS, MemoryGrowth
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase


def after_step(kept_bytes: int) -> RankMemory:
    """A rank that keeps so much after its optimizer step, and had a much higher peak."""
    phase = PhaseMemory(**{field.name: 0 for field in fields(PhaseMemory)} | {"allocated_bytes": kept_bytes})
    whole = {field.name: 0 for field in fields(RankMemory)} | {"peak_allocated_bytes": 10**12}
    return RankMemory(**whole | {"phases": {Phase.optimizer: phase}})  # type: ignore[arg-type]


def test_growth_counts_from_a_steady_step_on_not_from_the_first_allocations() -> None:
    growth = MemoryGrowth()
    for kept in (10, 300, 1000, *([1000] * EARLY_COMMITS)):
        growth.committed(lambda kept=kept: {0: after_step(kept)})  # type: ignore[misc]
    assert growth.grown_bytes(0, after_step(1000)) == 0
    assert growth.grown_bytes(0, after_step(1700)) == 700


def test_each_rank_is_compared_with_itself_and_an_unknown_one_has_not_grown() -> None:
    growth = MemoryGrowth()
    for _ in range(EARLY_COMMITS):
        growth.committed(lambda: {0: after_step(100), 1: after_step(500)})
    assert growth.grown_bytes(1, after_step(500)) == 0
    assert growth.grown_bytes(2, after_step(500)) == 0
    assert growth.grown_bytes(0, None) == 0


def test_an_attempt_that_died_early_has_not_grown() -> None:
    growth = MemoryGrowth()
    growth.committed(lambda: {0: after_step(100)})
    assert growth.grown_bytes(0, after_step(10**9)) == 0
