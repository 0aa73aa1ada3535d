"""Profiles of a job for a GPU: how many rows a micro-batch, a group and an update have, so that the job fits
with a margin.

Called by `cli.planning`. A profile fixes the update and what it spends memory on; the micro-batch follows
from the prediction. What is chosen is predicted again as it is: the fit only says where to look.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.planning.changes import estimate
from grpo_run.runtime.planning.job import Job
from grpo_run.runtime.planning.prediction import Prediction, Predictor

FIT_ROWS = 2
"""Rows of the micro-batch that is traced first; the fit also sees twice and half of them."""
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A profile.

    Attributes:
        about: what it is for, in a few words.
        group: completions of a prompt (`num_generations`).
        prompts: of an optimizer step, over all ranks.
        most_rows: of a micro-batch.
        recomputes: gradient checkpointing is on; without it only if a whole group then fits into a
            micro-batch, where this is False.
        margin: share of the GPU that stays free beyond the highest figure of the prediction.
    """

    about: str
    group: int
    prompts: int
    most_rows: int
    recomputes: bool
    margin: float


PRESETS = {
    "constrained": Preset(
        about="the least memory: small groups, small micro-batches, 15 % of the GPU free",
        group=4, prompts=4, most_rows=4, recomputes=True, margin=0.15,
    ),
    "balanced": Preset(
        about="groups of 8, the largest micro-batch with gradient checkpointing, 10 % free",
        group=8, prompts=8, most_rows=64, recomputes=True, margin=0.10,
    ),
    "economical": Preset(
        about="`balanced` in the least GPU time: nothing is recomputed if a group fits, 5 % free",
        group=8, prompts=8, most_rows=64, recomputes=False, margin=0.05,
    ),
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Choice:
    """What a preset has chosen.

    Attributes:
        name: of the preset.
        preset: itself.
        prediction: for the chosen job.
        gpu_bytes: memory of the GPU.
    """

    name: str
    preset: Preset
    prediction: Prediction
    gpu_bytes: int

    @property
    def settings(self) -> dict[str, int | bool]:
        """The chosen settings by TRL's names."""
        job = self.prediction.job
        return {
            "per_device_train_batch_size": job.batch,
            "num_generations": self.preset.group,
            "gradient_accumulation_steps": job.accumulation,
            "steps_per_generation": job.rollout_batches,
            "gradient_checkpointing": job.checkpointing,
        }

    @property
    def free_share(self) -> float:
        """Share of the GPU that stays free even if the highest figure is right."""
        return 1 - self.prediction.high_bytes / self.gpu_bytes


def choose(predictor: Predictor, job: Job, name: str) -> Choice:
    """Return what a preset chooses for a model, its lengths and a GPU.

    Args:
        predictor: of the model, with the memory of the GPU.
        job: what is not chosen: lengths, types, optimizer, ranks.
        name: of the preset.

    Raises:
        ConfigError: not even a micro-batch of one row fits.
    """
    preset, gpu = PRESETS[name], predictor.gpu_bytes
    assert gpu is not None
    limit = gpu * (1 - preset.margin)
    for checkpointing in (True,) if preset.recomputes else (False, True):
        base = replace(job, checkpointing=checkpointing)
        fitted = predictor.predict(
            replace(base, batch=FIT_ROWS, accumulation=2, rollout_batches=1), fitted=True
        )
        fewest = 1 if checkpointing else preset.group
        for candidate in _candidates(preset, base):
            if candidate.batch < fewest or estimate(predictor, fitted, candidate) > limit:
                continue
            found = predictor.predict(candidate)
            if found.high_bytes <= limit:
                return Choice(name=name, preset=preset, prediction=found, gpu_bytes=gpu)
    *_, last = _candidates(preset, replace(job, checkpointing=True))
    least = predictor.predict(last)
    raise ConfigError(
        f"preset {name}: a micro-batch of one row needs {least.low_bytes / _GIB:.1f} to"
        f" {least.high_bytes / _GIB:.1f} GiB, and {limit / _GIB:.1f} GiB are to be used; try --lora-rank 16,"
        " --dtype bfloat16, a shorter --completion or --layout zero3"
    )


def _candidates(preset: Preset, job: Job) -> Iterator[Job]:
    """Yield jobs of the same update, the largest micro-batch first, and of each the largest rollout first."""
    rows = preset.group * preset.prompts
    while rows % job.ranks:
        rows += preset.group
    share = rows // job.ranks
    for batch in _divisors(share):
        if batch > preset.most_rows:
            continue
        accumulation = share // batch
        for rollout_batches in _divisors(accumulation):
            if batch * job.ranks * rollout_batches % preset.group == 0:
                yield replace(job, batch=batch, accumulation=accumulation, rollout_batches=rollout_batches)


def _divisors(number: int) -> list[int]:
    return [one for one in range(number, 0, -1) if number % one == 0]
