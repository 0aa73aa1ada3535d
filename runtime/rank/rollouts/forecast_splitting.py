"""Train a rollout that would not fit in smaller passes with the same gradient.

`TrainerPasses` is called around three methods of GRPO's and RLOO's trainers. After a rollout has been
generated, and before it is scored, all ranks decide (`forecast.py`). Scoring then takes as many rows at once
as a piece has, and `compute_loss`, which `training_step` calls, takes a micro-batch in pieces. The losses of
the pieces are weighted so that their sum is the loss of the whole: by the share of rows where the loss is a
mean over rows, by 1 where it is a sum over tokens divided by a number of the whole rollout. All passes but
the last are differentiated at once, without communication; the caller differentiates the last one.

`runtime/rank/hooks/_rollout_hooks.py` puts its methods around the trainer's, outside the phases of
generation. Evaluation is left alone, and without forecasts the trainer stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from grpo_run.runtime.rank.rollouts._forecast_fit import rows_of_pieces
from grpo_run.runtime.rank.rollouts.forecast import Forecasts, GeneratedRollout
from grpo_run.runtime.rank.step.step_vote import StepVote
from grpo_run.runtime.upstream import rollout_names, trainer_names

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
    """Return a loss with the value of the whole micro-batch, and the gradient of its last piece; the others
    are accumulated.

    Args:
        compute_loss: of the trainer.
        rows: of the micro-batch.
        sums: the loss is a sum over tokens, divided by a number of the whole rollout; else a mean over rows.
        scaled: `compute_loss` divides by the number of accumulated micro-batches; else the caller does.
        keywords: further arguments of `compute_loss`.
    """
    parts = split_rows(inputs, rows, pieces)
    divisor = 1 if scaled else getattr(trainer, rollout_names.ACCUMULATION)
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
    """Replace what the pieces have logged in the block by one entry, as a whole micro-batch would have
    logged.
    """
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
    """Return the value of a metric for a micro-batch from those of its pieces: the mean by rows, or the
    extreme.
    """
    valid = [(value, share) for value, share in zip(values, shares, strict=True) if not math.isnan(value)]
    if not valid:
        return math.nan
    if name.endswith(LOWEST):
        return min(value for value, _ in valid)
    if name.endswith(HIGHEST):
        return max(value for value, _ in valid)
    return sum(value * share for value, share in valid) / sum(share for _, share in valid)


class TrainerPasses:
    """What is called around the passes of one trainer.

    Args:
        step_vote: its vote is collected before ranks exchange what they need.
    """

    def __init__(self, trainer: Any, forecasts: Forecasts, step_vote: StepVote) -> None:
        self._trainer = trainer
        self._forecasts = forecasts
        self._step_vote = step_vote
        self._sums = getattr(trainer, "loss_type", None) in rollout_names.SUMS

    def forecast_rollout(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Generate a rollout, and decide with all ranks in how many pieces it is trained."""
        generated = original(*args, **kwargs)
        if self._trainer.model.training:
            self._decide(rollout_names.padded_length(self._trainer, generated))
        return generated

    def score_in_pieces(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Score with no more rows at once than a piece has; a loss computes its log-probabilities without
        `batch_size`.
        """
        at, pieces = rollout_names.BATCH_SIZE, self._forecasts.pieces
        given = args[at] if len(args) > at else kwargs.get("batch_size")
        if not given or pieces is None or not self._trainer.model.training:
            return original(*args, **kwargs)
        rows = rows_of_pieces(given, pieces)[0]
        tokens = args[1] if len(args) > 1 else kwargs.get("input_ids")
        if tokens is not None:
            self._forecasts.passed("score", (min(rows, len(tokens)), int(tokens.shape[1])))
        with self._unless_raised():
            if len(args) > at:
                return original(*args[:at], rows, *args[at + 1 :], **kwargs)
            return original(*args, **{**kwargs, "batch_size": rows})

    def train_in_pieces(
        self, original: Any, model: Any, inputs: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Compute the loss of a micro-batch in pieces."""
        import torch

        trainer, forecasts = self._trainer, self._forecasts
        size = rollout_names.size_of(inputs)
        if size is None or args or not trainer.model.training or not torch.is_grad_enabled():
            return original(model, inputs, *args, **kwargs)
        rows, length = size
        if forecasts.pieces is None:  # resumed inside a rollout
            self._decide(length)
        pieces = min(forecasts.pieces or 1, rows)
        beside = pieces > 1 or getattr(trainer, rollout_names.ACCUMULATION) > 1
        forecasts.passed("pass", (rows_of_pieces(rows, pieces)[0], length), beside_gradients=beside)
        with self._unless_raised():
            if pieces == 1:
                return original(model, inputs, **kwargs)
            return split_loss(
                trainer, original, model, inputs, rows, pieces,
                sums=self._sums, scaled=bool(getattr(trainer, rollout_names.LOSS_IS_SCALED)),
                keywords=kwargs,
            )  # fmt: skip

    @contextmanager
    def _unless_raised(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._forecasts.failed()
            raise

    def _decide(self, length: int) -> None:
        """Decide, with all ranks, how the micro-batches of the rollout in use are split, from here to its
        end.
        """
        args, step = self._trainer.args, self._trainer.state.global_step + 1
        every = args.steps_per_generation * self._trainer.num_iterations
        used = getattr(self._trainer, trainer_names.MICRO_STEP) % every
        self._step_vote.collect()
        self._forecasts.begin(
            GeneratedRollout(
                number=getattr(self._trainer, trainer_names.MICRO_STEP) - used,
                rows=args.per_device_train_batch_size,
                length=length,
                accumulates=args.gradient_accumulation_steps > 1,
                steps=(step, step + max(1, -(-(every - used) // args.gradient_accumulation_steps)) - 1),
            )
        )
