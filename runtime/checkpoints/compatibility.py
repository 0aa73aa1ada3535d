"""Decide whether a checkpoint fits this run: the same model shape, and a world size that can load it.

Transformers loads weights with missing names allowed, so a different model may load in part and train on.
Replicated state (DDP) loads at any world size, and the data order is preserved if an optimizer step takes as
many samples as before. Sharded state (ZeRO, FSDP) loads only at the world size that wrote it. Called when a
checkpoint is saved and when a run resumes. Pure. Does not check for an unfinished rollout (see
`runtime.rank.exact`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from blake3 import blake3

NamedShape = tuple[str, Sequence[int], str]
"""Name, shape and data type (`float32`) of one parameter."""
REPLICATED_LAYOUTS = (None, "ddp")
"""Layouts in which every rank holds the full state. None if not known."""
_SHOWN_DIFFERENCES = 3


@dataclass(frozen=True, kw_only=True)
class SavedTensor:
    """Data type (safetensors' name, such as `BF16`) and shape of one tensor in a checkpoint."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class BatchGeometry:
    """How the samples of one optimizer step are distributed."""

    ranks: int
    per_device: int
    accumulation: int

    @property
    def samples(self) -> int:
        """Samples per optimizer step, over all ranks."""
        return self.ranks * self.per_device * self.accumulation

    def __str__(self) -> str:
        return (
            f"{_count_ranks(self.ranks)} x per_device_train_batch_size {self.per_device}"
            f" x gradient_accumulation_steps {self.accumulation} = {self.samples} samples per optimizer step"
        )


def named_shapes(parameters: Iterable[tuple[str, Any]]) -> tuple[NamedShape, ...]:
    """Return name, full shape and type of each named parameter of torch."""
    return tuple(
        # under ZeRO-3 a parameter is empty and its shape is in `ds_shape`
        (name, tuple(getattr(one, "ds_shape", one.shape)), str(one.dtype).removeprefix("torch."))
        for name, one in parameters
    )


def digest_model_shape(parameters: Iterable[NamedShape]) -> str:
    """Return a digest of every parameter's name, shape and type, independent of their order."""
    rows = sorted([name, [int(length) for length in shape], dtype] for name, shape, dtype in parameters)
    return blake3(json.dumps(rows, separators=(",", ":")).encode()).hexdigest()


def describe_model_difference(parameters: Iterable[NamedShape], saved: Mapping[str, SavedTensor]) -> str:
    """Describe how a model differs from saved weights with another model shape digest.

    Args:
        parameters: the model's parameters.
        saved: tensors in the checkpoint. Tied weights may be absent; empty if the weights are sharded.
    """
    shapes = {name: tuple(int(length) for length in shape) for name, shape, _ in parameters}
    changed = [
        f"{name} has shape {list(saved[name].shape)} in the checkpoint and {list(shape)} in the model"
        for name, shape in sorted(shapes.items())
        if name in saved and saved[name].shape != shape
    ]
    if changed:
        return _first_few(changed)
    extra = [f"{name} is only in the checkpoint" for name in sorted(set(saved) - set(shapes))]
    if extra:
        return _first_few(extra)
    missing = [f"{name} is only in the model" for name in sorted(set(shapes) - set(saved))] if saved else []
    return _first_few(missing) if missing else "parameter names or types differ"


def _first_few(phrases: Sequence[str]) -> str:
    more = len(phrases) - _SHOWN_DIFFERENCES
    return ", ".join(phrases[:_SHOWN_DIFFERENCES]) + (f" and {more} more" if more > 0 else "")


def explain_world_size_mismatch(
    name: str,
    *,
    written_by: int,
    layout: str | None,
    written_batch: BatchGeometry | None,
    current_batch: BatchGeometry | None,
    ranks: int,
) -> str | None:
    """Return why a checkpoint does not fit this world size, with settings that do, or None if it fits.

    Args:
        name: the checkpoint's name, for the message.
        written_by: number of ranks that wrote it.
        layout: how its state is distributed over ranks; None if unknown.
        written_batch: the batch it was written with; None if unknown.
        current_batch: this run's batch; None if unknown.
        ranks: number of ranks of this run.
    """
    if written_by == ranks:
        return None
    if layout not in REPLICATED_LAYOUTS:
        return (
            f"{name} holds {layout} state sharded over {_count_ranks(written_by)}, but this run has {ranks}:"
            f" start {_count_ranks(written_by)}"
        )
    if written_batch is None or current_batch is None:
        return (
            f"{name} was written by {_count_ranks(written_by)}, but this run has {ranks}, and the batch it"
            f" was written with is unknown: start {_count_ranks(written_by)}"
        )
    if written_batch.samples == current_batch.samples:
        return None
    return (
        f"{name} was written with {written_batch}, but this run has {current_batch}:"
        f" {_suggest_batch(written_batch.samples, current_batch, written_by)}"
    )


def _suggest_batch(samples: int, current: BatchGeometry, written_by: int) -> str:
    settings = []
    if samples % (current.ranks * current.accumulation) == 0:
        settings.append(f"per_device_train_batch_size={samples // (current.ranks * current.accumulation)}")
    if samples % (current.ranks * current.per_device) == 0:
        settings.append(f"gradient_accumulation_steps={samples // (current.ranks * current.per_device)}")
    fitting_ranks, remainder = divmod(samples, current.per_device * current.accumulation)
    start = f"start {_count_ranks(written_by if remainder else fitting_ranks)}"
    if remainder:
        start += " with the batch it was written with"
    return f"set {' or '.join(settings)}, or {start}" if settings else start


def describe_world_size_change(name: str, *, written_by: int, ranks: int, samples: int) -> str:
    """Return the notice for a run that resumes at another world size.

    Args:
        samples: samples per optimizer step, the same before and after.
    """
    return (
        f"{name} was written by {_count_ranks(written_by)}, this run has {ranks}: every optimizer step takes"
        f" the same {samples} samples in the same order; random numbers (generation, dropout) differ"
    )


def _count_ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
