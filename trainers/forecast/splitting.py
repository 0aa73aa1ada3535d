"""Compute one micro-batch in several passes with the same gradient: divide its rows, combine losses and metrics.

The pieces' losses are weighted so that their sum is the loss of the whole micro-batch: by the share of rows where the loss is a mean
over rows, by 1 where it is a sum over tokens divided by a number of the whole rollout. All passes but the last are
differentiated at once, without communication; the caller differentiates the last one, as it does a whole micro-batch. Called by
`attach.py`. Does not decide how often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_run.trainers.forecast.decision import rows_of_pieces
from grpo_run.trainers.upstream import trainer_names, training_passes

LOWEST, HIGHEST = ("_min", "/min"), ("_max", "/max")
"""Ends of the names of metrics that are no means."""


def split_rows(inputs: Mapping[str, Any], rows: int, pieces: int) -> list[tuple[dict[str, Any], float]]:
    """Return the pieces of a micro-batch in order, each with its share of the rows.

    What has one entry per row is divided; a number of the whole rollout stays as it is in every piece.
    """
    parts, begin = [], 0
    for count in rows_of_pieces(rows, pieces):
        chosen = slice(begin, begin + count)
        part = {name: value[chosen] if _has_rows(value, rows) else value for name, value in inputs.items()}
        parts.append((part, count / rows))
        begin += count
    return parts


def _has_rows(value: Any, rows: int) -> bool:
    shape: Any = getattr(value, "shape", None)
    if shape is not None:
        return len(shape) > 0 and int(shape[0]) == rows
    return isinstance(value, list | tuple) and len(value) == rows


def split_loss(
    trainer: Any,
    compute_loss: Callable[..., Any],
    model: Any,
    inputs: Mapping[str, Any],
    rows: int,
    pieces: int,
    *,
    sums: bool,
    scaled: bool,
    keywords: Mapping[str, Any],
) -> Any:
    """Return a loss with the value of the whole micro-batch, and the gradient of its last piece; the others are accumulated.

    Args:
        compute_loss: of the trainer.
        rows: of the micro-batch.
        sums: the loss is a sum over tokens, divided by a number of the whole rollout; else a mean over rows.
        scaled: `compute_loss` divides by the number of accumulated micro-batches; else the caller does.
        keywords: further arguments of `compute_loss`.
    """
    parts = split_rows(inputs, rows, pieces)
    divisor = 1 if scaled else getattr(trainer, training_passes.ACCUMULATION)
    total: Any = 0.0
    with one_entry_each(trainer, [share for _, share in parts]):
        for part, share in parts[:-1]:
            with trainer.accelerator.no_sync(model):
                loss = compute_loss(model, part, **keywords) * (1.0 if sums else share)
                trainer.accelerator.backward(loss / divisor)
            total = total + loss.detach()
            del loss
        last, share = parts[-1]
        return compute_loss(model, last, **keywords) * (1.0 if sums else share) + total


@contextmanager
def one_entry_each(trainer: Any, shares: Sequence[float]) -> Iterator[None]:
    """Replace what the pieces have logged in the block by one entry, as a whole micro-batch would have logged."""
    before = {name: len(values) for name, values in _logged(trainer).items()}
    yield
    for name, values in _logged(trainer).items():
        at = before.get(name, 0)
        if len(values) - at == len(shares):
            values[at:] = [joined(name, values[at:], shares)]


def _logged(trainer: Any) -> Mapping[str, list[float]]:
    table: Mapping[str, list[float]] = getattr(trainer, trainer_names.METRICS)["train"]
    return table


def joined(name: str, values: Sequence[float], shares: Sequence[float]) -> float:
    """Return the value of a metric for a micro-batch from those of its pieces: the mean by rows, or the extreme."""
    valid = [(value, share) for value, share in zip(values, shares, strict=True) if not math.isnan(value)]
    if not valid:
        return math.nan
    if name.endswith(LOWEST):
        return min(value for value, _ in valid)
    if name.endswith(HIGHEST):
        return max(value for value, _ in valid)
    return sum(value * share for value, share in valid) / sum(share for _, share in valid)
