"""Save and restore what a trainer has accumulated for its next log line and its final average.

Covers the metric and completion tables of TRL, the pending loss of transformers and the count of trained
tokens. Called by `state.py`. Does not log anything.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact.encoding import Decoder, Encoder
from grpo_run.trainers.exact.format import LossState, SavedRankState
from grpo_run.trainers.upstream import trainer_names

IMAGES = "images"
"""Key of the completion table whose values are pictures."""


def save_tables(trainer: Any, rank: int, encoder: Encoder, warn: Callable[[str], None]) -> dict[str, Any]:
    """Return the encoded tables by attribute name; completions on rank 0 only, which logs them."""
    tables = {}
    for name in trainer_names.TABLES:
        table = getattr(trainer, name, None)
        if table is None or (name == trainer_names.COMPLETION_LOGS and rank):
            continue
        if name == trainer_names.COMPLETION_LOGS and table.get(IMAGES):
            warn("checkpoints do not contain images logged with completions; they contain the texts")
        tables[name] = {
            key: encoder(value, f"{name}[{key!r}]") for key, value in table.items() if key != IMAGES
        }
    return tables


def save_loss(trainer: Any, *, seconds: float, ended: bool) -> LossState | None:
    """Return the accumulated loss, or None if the trainer's loop has not begun.

    Args:
        seconds: training time so far, over all attempts.
        ended: the loop is over, and transformers has added the pending loss to the total.
    """
    if not hasattr(trainer, trainer_names.PENDING_LOSS):
        return None
    pending = float(getattr(trainer, trainer_names.PENDING_LOSS).item())
    total = float(getattr(trainer, trainer_names.TOTAL_LOSS))
    return LossState(
        pending=pending,
        total=total - pending if ended else total,
        last_logged_step=getattr(trainer, trainer_names.LAST_LOGGED_STEP),
        first_step=getattr(trainer, trainer_names.FIRST_STEP),
        seconds=seconds,
    )


def save_train_tokens(trainer: Any) -> int | float | None:
    """Return the number of trained tokens as a Python number, or None if the trainer does not count them."""
    value: Any = getattr(trainer, trainer_names.TRAIN_TOKENS, None)
    number: int | float | None = value.item() if hasattr(value, "item") else value
    return number


def restore(trainer: Any, state: SavedRankState, decoder: Decoder) -> None:
    """Restore the tables, the token count and the loss.

    Raises:
        CheckpointError: a table has another type than the trainer's.
    """
    for name, table in state.tables.items():
        if name in trainer_names.TABLES and hasattr(trainer, name):
            _fill(getattr(trainer, name), decoder(table), f"{decoder.source}: {name}")
    if state.train_tokens is not None and hasattr(trainer, trainer_names.TRAIN_TOKENS):
        setattr(trainer, trainer_names.TRAIN_TOKENS, state.train_tokens)
    if state.loss is not None and hasattr(trainer, trainer_names.PENDING_LOSS):
        _restore_loss(trainer, state.loss)


def _restore_loss(trainer: Any, loss: LossState) -> None:
    getattr(trainer, trainer_names.PENDING_LOSS).fill_(loss.pending)
    setattr(trainer, trainer_names.TOTAL_LOSS, loss.total)
    setattr(trainer, trainer_names.LAST_LOGGED_STEP, loss.last_logged_step)
    setattr(trainer, trainer_names.FIRST_STEP, loss.first_step)
    original = getattr(trainer, trainer_names.FINALIZE)

    @functools.wraps(original)
    def finalize(trial: Any, num_train_samples: Any, start_time: float) -> Any:
        # transformers averages over the steps of all attempts, so the time must cover all attempts too
        return original(trial, num_train_samples, start_time - loss.seconds)

    setattr(trainer, trainer_names.FINALIZE, finalize)


def close(trainer: Any) -> None:
    """Remove the wrapper that `restore` put around the trainer's finalize method."""
    trainer.__dict__.pop(trainer_names.FINALIZE, None)


def _fill(target: Any, value: Any, name: str) -> None:
    """Copy values into existing containers, which keep their types and maximum lengths."""
    if isinstance(target, dict) and isinstance(value, dict):
        for key, item in value.items():
            if item is None:  # the value could not be encoded
                continue
            try:
                present = target[key]  # a defaultdict creates the right container
            except KeyError:
                present = None
            if isinstance(present, (dict, list, deque)):
                _fill(present, item, f"{name}[{key!r}]")
            else:
                target[key] = item
    elif isinstance(target, (list, deque)) and isinstance(value, (list, deque)):
        target.clear()
        target.extend(value)
    else:
        raise CheckpointError(
            f"{name} is a {type(value).__name__} in the checkpoint, a {type(target).__name__} in the trainer"
        )
