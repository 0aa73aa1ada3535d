"""Assumptions about a job, and the least that it needs. Nothing is traced."""

from __future__ import annotations

import pytest
from support.predictions import GIB, SHAPE, a_prediction

from grpo_run.runtime.planning._terms import Term
from grpo_run.runtime.planning.explaining import explained_by_trace, floor, other_jobs
from grpo_run.runtime.planning.job import Job


def test_rows_of_one_micro_batch_are_generated_as_often_as_before() -> None:
    """4 micro-batches of 4 rows, or one of 16: a rollout has 32 rows either way."""
    (whole,) = (
        changes
        for name, _, changes in other_jobs(
            Job(batch=4, prompt=8, completion=8, accumulation=4, rollout_batches=8), 64
        )
        if name == "no-accumulation"
    )
    assert (whole["batch"], whole["accumulation"], whole["rollout_batches"]) == (16, 1, 2)


@pytest.mark.parametrize(
    ("rank", "expected"),
    [
        (0, {"a reference model is kept"}),
        (8, {"log-probabilities of a reference are computed", "the frozen weights are float32"}),
    ],
)
def test_adapters_need_no_second_model_and_are_float32_themselves(rank: int, expected: set[str]) -> None:
    """So the words are others with them."""
    job = Job(batch=4, prompt=8, completion=8, weights="bfloat16", lora_rank=rank)
    assert expected <= {assumption for _, assumption, _ in other_jobs(job, None)}


def test_the_least_that_is_needed_has_no_memory_of_an_update_alone() -> None:
    """Optimizer state is what is alive in the forward pass; more of its kind may be alive in the optimizer's
    own phase.
    """
    base = a_prediction()
    update = {**base.phases["optimizer"].traced, "optimizer": 9.0 * GIB}
    phase = base.phases["optimizer"]
    more = type(phase)(traced=update, allocated_bytes=13.0 * GIB, low_bytes=13.0 * GIB, high_bytes=13.0 * GIB)
    found = a_prediction(phases={**base.phases, "optimizer": more})
    assert floor(found, SHAPE.parameters)[0] == (2 + 2 + 4) * GIB


def test_the_arithmetic_of_a_peak_names_what_was_added_to_the_trace() -> None:
    """Such as the cache of keys and values, where generation needs most."""
    base = a_prediction()
    phase = base.phases["generate"]
    cache = Term(
        name="KV cache",
        low_bytes=5.0 * GIB,
        high_bytes=5.0 * GIB,
        provenance="arithmetic",
        phases=("generate",),
        in_allocator=True,
    )
    full = type(phase)(
        traced=phase.traced, allocated_bytes=11.0 * GIB, low_bytes=11.0 * GIB, high_bytes=11.0 * GIB
    )
    found = explained_by_trace(
        a_prediction(phases={**base.phases, "generate": full}, terms=[cache]), "a", "b"
    )
    assert found.arithmetic[0] == "peak in generate: "
    assert "KV cache " in "".join(one for one in found.arithmetic if isinstance(one, str))
    assert sum(one for one in found.arithmetic if isinstance(one, float)) == 11.0 * GIB
