"""What fits, and which changes are proposed in which order. The predictor is arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.predictions import GIB, SHAPE, a_prediction

from grpo_run.runtime.planning.changes import candidates, largest_batch
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.prediction import PredictedPhase, Prediction

JOB = Job(batch=1, prompt=256, completion=768)
TOKEN_BYTES = 300_000.0


class Arithmetic:
    """Stands for a predictor: 8 GiB, and a figure per token that checkpointing divides by four."""

    shape = SHAPE

    def __init__(self, gpu_bytes: float) -> None:
        self.gpu_bytes = int(gpu_bytes)

    def predict(self, job: Job) -> Prediction:
        """Return what a trace of the job would show."""
        token = TOKEN_BYTES / (4 if job.checkpointing else 1)
        size = 8 * GIB + token * job.tokens
        memory = PredictedPhase(
            traced={"activations": size}, allocated_bytes=size, low_bytes=size, high_bytes=size
        )
        return a_prediction(job=job, phases={"backward": memory})


@pytest.mark.parametrize(("ranks", "parts", "unit"), [(1, 1, 8), (2, 2, 2), (8, 1, 1)])
def test_the_largest_micro_batch_makes_whole_groups(ranks: int, parts: int, unit: int) -> None:
    """TRL refuses a rollout whose rows are no multiple of `num_generations`."""
    predictor: Any = Arithmetic(8 * GIB + 1024 * TOKEN_BYTES / 4 * 23.5)
    job = replace(JOB, num_generations=8, ranks=ranks, rollout_batches=parts, layout="fsdp")
    found = largest_batch(predictor, predictor.predict(job))
    free = replace(job, num_generations=0)
    most = largest_batch(predictor, predictor.predict(free))
    assert most == 23
    assert found == most - most % unit


def test_adapters_and_a_state_of_8_bits_are_proposed_as_other_updates() -> None:
    """Each is predicted, and only where it is another job."""
    proposed = {change.name: change for change in candidates(JOB)}
    lora, state = proposed["LoRA of rank 16 (peft_config)"], proposed["optim='adamw_bnb_8bit'"]
    assert (lora.exact, state.exact) == (False, False)
    assert (lora.job.lora_rank, state.job.optimizer) == (16, "adamw_bnb_8bit")
    already = {change.name for change in candidates(replace(lora.job, optimizer="adamw_bnb_8bit"))}
    assert not already & {lora.name, state.name}


def test_changes_are_proposed_in_the_order_in_which_to_try_them() -> None:
    """Length, group, checkpointing, batch, precision, fused attention; exact ones are marked."""
    job = replace(JOB, batch=8, num_generations=8, checkpointing=False, attention="eager", device="cpu")
    found = [(change.name.partition("=")[0], change.exact) for change in candidates(job)]
    assert found == [
        ("max_completion_length", False),
        ("num_generations", False),
        ("gradient_checkpointing", True),
        ("per_device_train_batch_size", True),
        ("weights in bfloat16", False),
        ("optim", False),
        ("attn_implementation", False),
        ("LoRA of rank 16 (peft_config)", False),
    ]
    (group,) = (change.job for change in candidates(job) if change.name.startswith("num_generations"))
    assert (group.num_generations, group.batch) == (4, 4)


def test_fused_attention_is_proposed_only_where_the_model_has_it() -> None:
    """transformers has none for some models."""
    names = [change.name for change in candidates(replace(JOB, attention="eager"), has_fused_attention=False)]
    assert not any("attn" in name for name in names)


@pytest.mark.parametrize("generations", [0, 2, 3])
def test_a_group_that_cannot_be_halved_is_not_proposed(generations: int) -> None:
    """A group has two completions at least."""
    job = replace(JOB, batch=6, num_generations=generations)
    assert not any(change.name.startswith("num_generations") for change in candidates(job))


def test_a_size_that_follows_from_two_others_and_does_not_fit_is_corrected() -> None:
    """Small micro-batches may peak where the rows do not count."""

    class Bent(Arithmetic):
        def predict(self, job: Job) -> Prediction:
            size = 8 * GIB + max(GIB, job.batch * GIB / 8)
            memory = PredictedPhase(traced={}, allocated_bytes=size, low_bytes=size, high_bytes=size)
            return a_prediction(job=job, phases={"backward": memory})

    predictor: Any = Bent(12 * GIB)
    found = largest_batch(predictor, predictor.predict(replace(JOB, batch=6)))
    assert found == 31, "42 rows follow from 6 and 12, and do not fit; 32 would"
