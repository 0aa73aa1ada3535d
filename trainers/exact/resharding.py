"""Whether and how a checkpoint's exact state is gone on from with another number of ranks, or other rollout settings.

At the end of a rollout what ranks hold is alike or belongs to no rank; inside one, each holds its part. The numbers are
pure decisions (`carried`); whether the weights and optimizer can be spread anew is decided elsewhere (`choice.py`).
Called by `state.py` and, through it, by the choice of a checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.trainers.exact import format
from grpo_run.trainers.exact.format import Geometry, RankState


class ReshapeError(UsageError):
    """A checkpoint cannot be gone on from with this number of ranks, or with these rollout settings."""


def carried(states: Sequence[RankState], world_size: int, geometry: Geometry | None) -> RankState:
    """The state that each of `world_size` ranks starts from, after a run of `len(states)` ranks.

    Rank 0's, for what is alike on all ranks. The next micro-step has to make a new rollout.

    Args:
        geometry: of the run that goes on; None where it is not known yet or there are no rollouts.

    Raises:
        ReshapeError: the state is bound to its ranks.
    """
    first = states[0]
    at = f"the checkpoint of step {first.step}, of {first.world_size} ranks,"
    if not all(state.at_boundary for state in states):
        raise ReshapeError(
            f"{at} lies inside a rollout that each rank holds a part of; go on with {first.world_size} ranks and the"
            " same rollout settings, or from a checkpoint at the end of a rollout (--resume-from)"
        )
    if world_size != first.world_size:
        # one rank's numbers on all ranks would make the same completions everywhere
        first = first.model_copy(update={"epoch_rng": None})
        if first.reference == "sharded":
            raise ReshapeError(f"{at} holds a synced reference model in {first.world_size} shards")
        if any(state.rewards != first.rewards for state in states):
            raise ReshapeError(f"{at} holds reward functions with a state of their own on each rank")
    if geometry is None or first.geometry is None or first.micro_step is None:
        return first.model_copy(update={"buffered_inputs": None})
    old = first.geometry
    if old.generate_every * geometry.accumulation != geometry.generate_every * old.accumulation:
        raise ReshapeError(
            f"{at} has {old.generate_every} micro-steps a rollout with gradient_accumulation_steps={old.accumulation},"
            f" and now there would be {geometry.generate_every} with {geometry.accumulation}: change"
            " steps_per_generation and gradient_accumulation_steps by the same factor"
        )
    rollouts = first.micro_step // old.generate_every
    return first.model_copy(
        update={
            "buffered_inputs": None,
            "micro_step": rollouts * geometry.generate_every,
            "geometry": geometry,
        }
    )


def can_reshape(folder: Path, world_size: int) -> str | None:
    """Why a checkpoint cannot be gone on from with `world_size` ranks; None when it can, as far as this state goes."""
    if not (folder / format.FOLDER).is_dir():
        return f"{folder} was saved without grpo-run and does not tell where each rank was"
    try:
        first, _ = format.read(folder, 0)
        if first.world_size == world_size:
            return None
        carried(read_all(folder, first), world_size, None)
    except (CheckpointError, ReshapeError) as error:
        return str(error)
    return None


def read_all(folder: Path, first: RankState) -> list[RankState]:
    """The states of all ranks, rank 0's given.

    Raises:
        CheckpointError: a rank's file is missing or strange.
    """
    return [first, *(format.read(folder, rank)[0] for rank in range(1, first.world_size))]
