"""Resume the exact state of a rank with another micro-batch size, for example after a change of the memory plan.

The counter of micro-steps is scaled, and within a rollout the buffered micro-batches are joined and split again by TRL's own
functions: the rows keep their order, so each optimizer step has the rows that it would have had. The number of ranks stays
the same; `resharding.py` handles another one. Called by `state.py` and `rollout.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact.format import Geometry, SavedRankState
from grpo_run.trainers.exact.geometry.resharding import ReshardError


def regrouped(state: SavedRankState, geometry: Geometry | None) -> SavedRankState:
    """Return a rank's state with the counter and the geometry of the resuming run. The buffer stays as it was saved.

    Raises:
        ReshardError: micro-batches of the resuming run do not divide the optimizer steps and rollouts as before.
    """
    old = state.geometry
    if geometry is None or old is None or state.micro_step is None:
        return state.model_copy(update={"buffered_inputs": None, "geometry": geometry})
    if old == geometry:
        return state
    same_rollouts = old.generate_every * geometry.accumulation == geometry.generate_every * old.accumulation
    micro_step, rest = divmod(state.micro_step * geometry.accumulation, old.accumulation)
    if not same_rollouts or (
        not state.at_boundary and (rest or old.num_iterations != geometry.num_iterations)
    ):
        where = "" if state.at_boundary else ", and is inside a rollout"
        raise ReshardError(
            f"the checkpoint of step {state.step} has {_text(old)}{where}; this run has {_text(geometry)}: change"
            " steps_per_generation and gradient_accumulation_steps by the same factor"
        )
    return state.model_copy(update={"micro_step": micro_step, "geometry": geometry})


def resplit(buffer: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows of a rollout's micro-batches in `count` micro-batches of equal size.

    Raises:
        CheckpointError: the rows cannot be divided so.
    """
    # imports TRL, which a script with rollouts has imported
    from grpo_run.trainers.upstream.rollout_splitting import join_images, split_images, split_rows

    parts = [split_images(part) for part in buffer]
    whole = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    rows = next(len(value) for value in whole.values() if isinstance(value, torch.Tensor) and value.ndim)
    if rows % count:
        raise CheckpointError(f"a rollout of {rows} rows cannot be divided into {count} micro-batches")
    return [join_images(part) for part in split_rows(whole, count)]


def _joined(values: Sequence[Any]) -> Any:
    """Join what the micro-batches of a rollout have under one name; a number is of the whole rollout."""
    first = values[0]
    if first is None or (isinstance(first, torch.Tensor) and first.ndim == 0):
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    return [row for value in values for row in value]


def _text(geometry: Geometry) -> str:
    return f"{geometry.generate_every} micro-steps per rollout with gradient_accumulation_steps={geometry.accumulation}"
