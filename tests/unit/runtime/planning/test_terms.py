"""What is added to a trace under ZeRO-3: what TRL gathers to generate, and what DeepSpeed keeps. Arithmetic
only.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.predictions import SHAPE

from grpo_run.runtime.planning._terms import share_of_rank, terms
from grpo_run.runtime.planning.job import Job

JOB = Job(batch=8, prompt=256, completion=512, layout="zero3", ranks=8)


def _added(job: Job, phase: str) -> dict[str, float]:
    run = job.as_run
    found = terms(run, SHAPE, None, SHAPE.parameters)
    return {term.name: term.low_bytes for term in found if phase in term.phases and term.in_allocator}


def test_the_whole_model_is_gathered_to_generate_unless_it_is_switched_off() -> None:
    """In bfloat16, to which DeepSpeed casts it; layers only where the model is not gathered as a whole."""
    assert _added(JOB, "generate")["gathered model"] == 2 * SHAPE.parameters
    assert "gathered layers" not in _added(JOB, "generate")
    assert "gathered model" not in _added(JOB, "forward")
    for other in (replace(JOB, gathers=False), replace(JOB, layout="fsdp")):
        assert "gathered model" not in _added(other, "generate")
        assert "gathered layers" in _added(other, "generate")


@pytest.mark.parametrize("autocast", [True, False])
def test_a_rank_keeps_its_share_of_16_or_20_bytes_a_weight(autocast: bool) -> None:
    """Weights, their copy in fp32, two states and gradients."""
    run = replace(JOB, autocast=autocast).as_run
    width = 2 if autocast else 4
    added = _added(run, "score")
    kept = added["DeepSpeed's fp32 weights"] + added["DeepSpeed's gradients"]
    states = 2 * width * SHAPE.parameters * share_of_rank(run, "optimizer")
    weights = width * SHAPE.parameters * share_of_rank(run, "weights")
    assert kept + states + weights == pytest.approx((12 + 2 * width) * SHAPE.parameters / 8)
