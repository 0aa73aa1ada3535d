"""Resume the exact state of a checkpoint at another world size or with other rollout settings.

At the end of a rollout, the state is the same on all ranks or belongs to no rank; inside a rollout, each rank
holds its part. `resharded` is a pure decision. `resuming.choice` decides whether weights and optimizer can be
resharded. Called by `state.py` and by `resuming`.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.trainers.exact import format
from grpo_run.trainers.exact.format import Geometry, SavedRankState


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
