"""Resume the exact state of a checkpoint at another world size, rollout setting or micro-batch size.

For another world size: at the end of a rollout the state is the same on all ranks or belongs to no rank;
inside a rollout each rank holds its part. `resharded` is a pure decision. `runtime/rank/resuming/` decides
whether weights and optimizer can be resharded.

For another micro-batch size, for example after memory ran out, the number of ranks stays the
same. The counter of micro-steps is scaled, and buffered micro-batches are joined and split again by TRL's
own functions: the rows keep their order, so each optimizer step has the rows that it would have had. Called
by `state.py`, `_trainer_state.py` and `runtime/rank/resuming/_fit.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.runtime.rank.exact import format
from grpo_run.runtime.rank.exact.format import Geometry, SavedRankState


class ReshardError(UsageError):
    """A checkpoint cannot be resumed with this number of ranks, or with these rollout settings."""


def resharded(states: Sequence[SavedRankState], world_size: int, geometry: Geometry | None) -> SavedRankState:
    """Return the state that each of `world_size` ranks starts from.

    It is rank 0's state, for what is the same on all ranks. The next micro-step must generate a new rollout.

    Args:
        states: of all ranks that saved the checkpoint, by rank.
        geometry: of the resuming run; None if it is not known yet or there are no rollouts.

    Raises:
        ReshardError: the state belongs to the ranks that saved it.
    """
    first = states[0]
    checkpoint = f"the checkpoint of step {first.step}, saved by {first.world_size} ranks,"
    if not all(state.at_boundary for state in states):
        raise ReshardError(
            f"{checkpoint} is inside a rollout that is spread over its ranks; resume with"
            f" {first.world_size} ranks and the same rollout settings, or from a checkpoint at the end of a"
            " rollout (--resume-from)"
        )
    if world_size != first.world_size:
        # with the random state of rank 0, all ranks would generate the same completions
        first = first.model_copy(update={"epoch_rng": None})
        if first.reference == "sharded":
            raise ReshardError(f"{checkpoint} contains a synced reference model in {first.world_size} shards")
        if any(state.rewards != first.rewards for state in states):
            raise ReshardError(f"{checkpoint} contains reward functions with a different state on each rank")
    if geometry is None or first.geometry is None or first.micro_step is None:
        return first.model_copy(update={"buffered_inputs": None})
    old = first.geometry
    if old.generate_every * geometry.accumulation != geometry.generate_every * old.accumulation:
        raise ReshardError(
            f"{checkpoint} has {old.generate_every} micro-steps per rollout with"
            f" gradient_accumulation_steps={old.accumulation}; this run has {geometry.generate_every} with"
            f" {geometry.accumulation}: change steps_per_generation and gradient_accumulation_steps by"
            " the same factor"
        )
    rollouts = first.micro_step // old.generate_every
    return first.model_copy(
        update={
            "buffered_inputs": None,
            "micro_step": rollouts * geometry.generate_every,
            "geometry": geometry,
        }
    )


def resharding_problem(folder: Path, world_size: int) -> str | None:
    """Return why `world_size` ranks cannot resume the exact state of a checkpoint, or None."""
    if not (folder / format.FOLDER).is_dir():
        return (
            f"{folder} was saved without grpo-run and lacks the position of each rank in its rollout and data"
        )
    try:
        first, _ = format.read(folder, 0)
        if first.world_size == world_size:
            return None
        resharded(read_all(folder, first), world_size, None)
    except (CheckpointError, ReshardError) as error:
        return str(error)
    return None


def read_all(folder: Path, first: SavedRankState) -> list[SavedRankState]:
    """Return the states of all ranks, given that of rank 0.

    Raises:
        CheckpointError: a rank's file is missing or invalid.
    """
    return [first, *(format.read(folder, rank)[0] for rank in range(1, first.world_size))]


def regrouped(state: SavedRankState, geometry: Geometry | None) -> SavedRankState:
    """Return a rank's state with the counter and the geometry of the resuming run. The buffer stays as it was
    saved.

    Raises:
        ReshardError: micro-batches of the resuming run do not divide the optimizer steps and rollouts as
            before.
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
            f"the checkpoint of step {state.step} has {_text(old)}{where}; this run has {_text(geometry)}:"
            " change steps_per_generation and gradient_accumulation_steps by the same factor"
        )
    return state.model_copy(update={"micro_step": micro_step, "geometry": geometry})


def resplit(buffer: Sequence[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """Return the rows of a rollout's micro-batches in `count` micro-batches of equal size.

    Raises:
        CheckpointError: the rows cannot be divided so.
    """
    # a script with rollouts has imported TRL; images of several models are stored by image or by tile
    from trl.trainer.utils import split_pixel_values_by_grid, split_tensor_dict, unsplit_pixel_values_by_grid

    parts = [split_pixel_values_by_grid(part) for part in buffer]
    whole = {name: _joined([part[name] for part in parts]) for name in parts[0]}
    rows = next(len(value) for value in whole.values() if isinstance(value, torch.Tensor) and value.ndim)
    if rows % count:
        raise CheckpointError(f"a rollout of {rows} rows cannot be divided into {count} micro-batches")
    return [unsplit_pixel_values_by_grid(part) for part in split_tensor_dict(whole, count)]


def _joined(values: Sequence[Any]) -> Any:
    """Join what the micro-batches of a rollout have under one name; a number is of the whole rollout."""
    first = values[0]
    if first is None or (isinstance(first, torch.Tensor) and first.ndim == 0):
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat(list(values))
    return [row for value in values for row in value]


def _text(geometry: Geometry) -> str:
    return (
        f"{geometry.generate_every} micro-steps per rollout with"
        f" gradient_accumulation_steps={geometry.accumulation}"
    )
