"""What a user could change in a healthy run: said once, and only if it was measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.memory_cases import GRPO

from grpo_run.runtime.supervisor.advice import STEADY_COMMITS, Advice, GenerationBalance, larger_batch
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import RankState, Slot

GB = 10**9
FACTS = GRPO.model_copy(
    update={"per_device_train_batch_size": 2, "gradient_accumulation_steps": 8, "steps_per_generation": 8}
)


def slot(rank: int, passes: int) -> Slot:
    return Slot(
        rank=rank, local_rank=rank, pid=1, attempt=0, state=RankState.training, phases=(), train_call=1,
        step=1, target_steps=9, voted_step=1, committed_step=1, last_progress_seconds=0, writes=1,
        generation_passes=passes,
    )  # fmt: skip


def memory(peak_bytes: int, capacity_bytes: int) -> RankMemory:
    return RankMemory(
        has_device=capacity_bytes > 0,
        capacity_bytes=capacity_bytes,
        readings=9,
        peak_reserved_bytes=peak_bytes,
    )


def test_an_under_used_gpu_gets_the_batch_that_computes_the_same_update() -> None:
    """10.5 of 80 GB: four times the rows need less than 64 GB, whatever part of the peak they are."""
    text = larger_batch(FACTS, int(10.5 * GB), 80 * GB)
    assert text is not None
    assert "per_device_train_batch_size=8 with gradient_accumulation_steps=2" in text
    assert "steps_per_generation=2 computes the same update" in text


@pytest.mark.parametrize(
    ("peak", "capacity", "accumulation"),
    [(40 * GB, 80 * GB, 8), (10 * GB, 80 * GB, 1), (10 * GB, 80 * GB, 3), (0, 80 * GB, 8), (GB, 0, 8)],
    ids=["used", "nothing is accumulated", "odd", "not measured", "no GPU"],
)
def test_nothing_is_proposed_that_is_not_the_same_update(peak: int, capacity: int, accumulation: int) -> None:
    facts = FACTS.model_copy(update={"gradient_accumulation_steps": accumulation})
    assert larger_batch(facts, peak, capacity) is None


def balance(rows: list[tuple[int, int]]) -> GenerationBalance:
    """A run of two ranks that made so many passes in each rollout."""
    made, totals = GenerationBalance(), [0, 0]
    made.committed({0: slot(0, 0), 1: slot(1, 0)})
    for row in rows:
        totals = [total + passes for total, passes in zip(totals, row, strict=True)]
        made.committed({rank: slot(rank, total) for rank, total in enumerate(totals)})
    return made


def test_a_rank_that_is_always_the_longest_is_named() -> None:
    text = balance([(20, 100)] * 40).advice
    assert text is not None
    assert "wait for one another in generation for 40%" in text
    assert "rank 1 is the longest in 40 of 40 rollouts" in text
    assert "shuffle the data set" in text


def test_lengths_that_differ_by_chance_get_another_remedy() -> None:
    text = balance([(20, 100), (100, 20)] * 20).advice
    assert text is not None
    assert "now one and now another" in text
    assert "max_completion_length" in text


@pytest.mark.parametrize("rows", [[(90, 100)] * 40, [(20, 100)] * 3, [(0, 0)] * 40, [(60, 100)] * 40])
def test_usual_differences_are_not_told(rows: list[tuple[int, int]]) -> None:
    """Also after a few rollouts, and where vLLM generates and no pass is counted."""
    assert balance(rows).advice is None


def test_each_advice_is_given_once_over_all_attempts() -> None:
    said: list[str] = []
    advice = Advice(lambda: FACTS, said.append)
    for _ in range(2):
        advice.begin_attempt()
        for commit in range(2 * STEADY_COMMITS + 1):
            advice.committed(
                {0: slot(0, 20 * commit), 1: slot(1, 100 * commit)}, lambda: {0: memory(10 * GB, 80 * GB)}
            )
    assert ["wait for one another" in text for text in said] == [True, False]


def test_a_run_on_a_cpu_is_told_nothing_of_memory() -> None:
    said: list[str] = []
    advice = Advice(lambda: FACTS, said.append)
    for _ in range(3 * STEADY_COMMITS):
        advice.committed({0: slot(0, 7)}, lambda: {0: memory(0, 0)})
    assert said == []


def test_a_slot_that_cannot_be_read_is_left_out() -> None:
    made = GenerationBalance()
    for passes in (1, 2, 3):
        made.committed({0: replace(slot(0, passes)), 1: None})
    assert made.advice is None
