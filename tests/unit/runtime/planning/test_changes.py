"""Presets, and what fits: what is chosen keeps its promises on every GPU. The predictor is arithmetic;
nothing is traced.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.predictions import GIB, SHAPE, a_prediction

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning._terms import terms
from grpo_run.runtime.planning.changes import candidates, estimate, largest_batch
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.prediction import Fit, PredictedPhase, Prediction
from grpo_run.runtime.planning.presets import PRESETS, choose

JOB = Job(batch=1, prompt=256, completion=768)
TOKEN_BYTES = 300_000.0


class Arithmetic:
    """Stands for a predictor: 8 GiB, and a figure per token that checkpointing divides by four."""

    shape = SHAPE

    def __init__(self, gpu_bytes: float, *, fits_are_low: bool = False) -> None:
        self.gpu_bytes = int(gpu_bytes)
        self.fits_are_low = fits_are_low
        self.predicted: list[Job] = []

    def predict(self, job: Job, *, fitted: bool = False) -> Prediction:
        """Return a prediction whose fit is right, or too low on demand."""
        self.predicted.append(job)
        token = TOKEN_BYTES / (4 if job.checkpointing else 1)
        size = 8 * GIB + token * job.tokens
        memory = PredictedPhase(
            traced={"activations": size}, allocated_bytes=size, low_bytes=size, high_bytes=size
        )
        fit = Fit(fixed_bytes=8 * GIB, token_bytes=token * (0.5 if self.fits_are_low else 1), pair_bytes=0.0)
        return a_prediction(
            job=job,
            phases={"backward": memory},
            terms=terms(job, SHAPE, self.gpu_bytes, SHAPE.parameters),
            fits={("backward", 0): fit} if fitted else {},
        )


def _choose(gpu_bytes: float, name: str, job: Job = JOB, **more: Any) -> Any:
    predictor: Any = Arithmetic(gpu_bytes, **more)
    return choose(predictor, job, name)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("gpu", [12, 16, 24, 40, 80])
@pytest.mark.parametrize("ranks", [1, 3, 8])
def test_a_choice_fits_with_its_margin_and_is_an_update_that_trl_accepts(
    name: str, gpu: int, ranks: int
) -> None:
    """A generation batch is a multiple of the group; the update has the preset's rows."""
    preset = PRESETS[name]
    choice = _choose(gpu * GIB, name, Job(batch=1, prompt=256, completion=768, ranks=ranks))
    job = choice.prediction.job
    assert choice.prediction.high_bytes <= gpu * GIB * (1 - preset.margin)
    assert choice.free_share >= preset.margin - 1e-9
    assert job.batch * ranks * job.rollout_batches % preset.group == 0
    assert job.accumulation % job.rollout_batches == 0
    rows = job.batch * ranks * job.accumulation
    assert rows % preset.group == 0
    assert rows >= preset.group * preset.prompts
    assert job.batch <= preset.most_rows


def test_the_largest_micro_batch_that_fits_is_chosen() -> None:
    """All 64 rows on a large GPU, fewer on a small one."""
    assert _choose(80 * GIB, "balanced").prediction.job.batch == 64
    assert _choose(12 * GIB, "balanced").prediction.job.batch == 32


def test_what_a_fit_promises_is_predicted_again() -> None:
    """The fit is too low by a factor of two, and the choice fits all the same."""
    choice = _choose(10 * GIB, "balanced", fits_are_low=True)
    assert choice.prediction.high_bytes <= 9 * GIB


def test_economical_recomputes_only_where_no_group_fits_without() -> None:
    """Both fit with checkpointing."""
    assert _choose(16 * GIB, "economical").prediction.job.checkpointing is False
    assert _choose(10 * GIB, "economical").prediction.job.checkpointing is True


def test_a_gpu_that_is_too_small_is_said_with_figures() -> None:
    """One line."""
    with pytest.raises(ConfigError, match="a micro-batch of one row needs"):
        _choose(8 * GIB, "constrained")


@pytest.mark.parametrize(("ranks", "parts", "unit"), [(1, 1, 8), (2, 2, 2), (8, 1, 1)])
def test_the_largest_micro_batch_makes_whole_groups(ranks: int, parts: int, unit: int) -> None:
    """TRL refuses a rollout whose rows are no multiple of `num_generations`."""
    predictor: Any = Arithmetic(8 * GIB + 1024 * TOKEN_BYTES / 4 * 23.5)
    job = replace(JOB, num_generations=8, ranks=ranks, rollout_batches=parts, layout="fsdp")
    found = largest_batch(predictor, predictor.predict(job, fitted=True))
    free = replace(job, num_generations=0)
    most = largest_batch(predictor, predictor.predict(free, fitted=True))
    assert most is not None
    assert found == most - most % unit


def test_the_rows_of_a_whole_rollout_are_generated_at_once() -> None:
    """A fit over the micro-batch is asked for the rows of all of them."""
    predictor: Any = Arithmetic(80 * GIB)
    memory = PredictedPhase(traced={}, allocated_bytes=0, low_bytes=0, high_bytes=0)
    fit = Fit(fixed_bytes=0.0, token_bytes=1.0, pair_bytes=0.0)
    job = replace(JOB, device="cpu")
    fitted = a_prediction(job=job, phases={"generate": memory}, terms=[], fits={("generate", 0): fit})
    assert estimate(predictor, fitted, replace(job, batch=2, rollout_batches=4)) == 8 * job.length


def test_adapters_and_a_state_of_8_bits_are_proposed_as_other_updates() -> None:
    """Each is predicted, and only where it is another job."""
    proposed = {change.name: change for change in candidates(JOB)}
    lora, state = proposed["LoRA of rank 16 (peft_config)"], proposed["optim='adamw_bnb_8bit'"]
    assert (lora.exact, state.exact) == (False, False)
    assert (lora.job.lora_rank, state.job.optimizer) == (16, "adamw_bnb_8bit")
    already = {change.name for change in candidates(replace(lora.job, optimizer="adamw_bnb_8bit"))}
    assert not already & {lora.name, state.name}
