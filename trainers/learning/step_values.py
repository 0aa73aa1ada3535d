"""Reads the values of a step that the learning guards judge: raw loss, gradient norm, and logged metrics.

transformers' log shows 0 for a loss that is NaN, and a metric only every `logging_steps` steps; both are read at
their source here. `read_steps` wraps two public methods for the length of a `train()` call; nothing is changed. Called
by `hooks/train_call.py`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from grpo_run.trainers.patches import override_attributes
from grpo_run.trainers.upstream import tensor_files, trainer_names
from grpo_run.watchdog.learning.observations import StepValues

METRICS: Mapping[str, str] = {
    "reward": "reward",
    "zero_variance": "frac_reward_zero_std",
    "kl": "kl",
    "entropy": "entropy",
    "capped": "completions/clipped_ratio",
}
"""Names of `StepValues`, and those under which TRL's GRPO and RLOO collect them. All are means over all ranks."""


class StepReader:
    """What the step in progress has shown so far."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss_is_finite = True
        self._norm: Any = None
        self._lengths: dict[str, int] = {}

    def begin_step(self) -> None:
        """Note what has been collected for the next log line before this step."""
        table = self._table()
        self._lengths = {name: len(table.get(key, ())) for name, key in METRICS.items()}

    def note_loss(self, loss: Any) -> None:
        """Note the raw loss of a micro-batch."""
        # transformers reads this value next, so reading it here adds no device synchronization
        if hasattr(loss, "isfinite") and not _is_finite(loss):
            self._loss_is_finite = False

    def note_norm(self, norm: Any) -> None:
        """Note the norm of the gradient, which may still be computed on the device."""
        self._norm = norm

    def take(self) -> StepValues:
        """Return what the step has shown."""
        finite, norm = self._loss_is_finite, self._norm
        self._loss_is_finite, self._norm = True, None
        if finite and norm is not None:
            finite = _is_valid_norm(norm)
        accelerator = self._trainer.accelerator
        # a scaler looks for its scale; without one, DeepSpeed skips such a step too, and its samples would be lost
        if not finite and accelerator.mixed_precision == "fp16" and accelerator.optimizer_step_was_skipped:
            finite = True
        table = self._table()
        values: dict[str, float] = {}
        for name, key in METRICS.items():
            new = [one for one in table.get(key, ())[self._lengths.get(name, 0) :] if math.isfinite(one)]
            if new:
                values[name] = fmean(new)
        return StepValues(finite=finite, **values)

    def _table(self) -> Mapping[str, list[float]]:
        tables = getattr(self._trainer, trainer_names.METRICS, None)
        found = tables.get("train") if isinstance(tables, Mapping) else None
        return found if isinstance(found, Mapping) else {}


@contextmanager
def read_steps(trainer: Any, reader: StepReader) -> Iterator[None]:
    """Pass the losses and the norms of the gradient to the reader for the length of the block."""
    training_step, accelerator = trainer.training_step, trainer.accelerator
    clip = accelerator.clip_grad_norm_

    @functools.wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        reader.note_loss(loss)
        return loss

    @functools.wraps(clip)
    def clip_and_note(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        reader.note_norm(norm)
        return norm

    with (
        override_attributes(trainer, training_step=step),
        override_attributes(accelerator, clip_grad_norm_=clip_and_note),
    ):
        yield


def _is_finite(value: Any) -> bool:
    if value.numel() == 1:
        return math.isfinite(value.item())  # on a CPU torch's three operations take 18 µs, this 0.2 µs
    return bool(value.isfinite().all())


def _is_valid_norm(norm: Any) -> bool:
    """Whether a norm is finite. DeepSpeed returns -1 for one that is not."""
    if not hasattr(norm, "isfinite"):
        return math.isfinite(norm) and norm >= 0
    local = tensor_files.local_part(norm)
    return bool(_is_finite(local)) and bool((local >= 0).all())
