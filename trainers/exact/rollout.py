"""Save and restore the rollout in use: the micro-step counter and the buffered micro-batches.

GRPO and RLOO only. One rollout can serve several optimizer steps, so a checkpoint can lie inside a rollout.
Called by `state.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact.encoding import Decoder, Encoder
from grpo_run.trainers.exact.format import Geometry, SavedRankState
from grpo_run.trainers.exact.geometry.regrouping import resplit
from grpo_run.trainers.upstream import trainer_names


def geometry_of(trainer: Any) -> Geometry | None:
    """Return how the trainer groups micro-steps, or None for a trainer without rollouts."""
    steps = getattr(trainer.args, "steps_per_generation", None)
    iterations = getattr(trainer, "num_iterations", None)
    if not isinstance(getattr(trainer, trainer_names.MICRO_STEP, None), int) or not steps or not iterations:
        return None
    return Geometry(
        steps_per_generation=steps,
        num_iterations=iterations,
        accumulation=trainer.args.gradient_accumulation_steps,
    )


def save(trainer: Any, encoder: Encoder) -> dict[str, Any]:
    """Return the fields `geometry`, `micro_step` and `buffered_inputs` of `SavedRankState`."""
    geometry = geometry_of(trainer)
    if geometry is None:
        return {}
    micro_step, buffered = getattr(trainer, trainer_names.MICRO_STEP), None
    if micro_step % geometry.generate_every:  # at a boundary the buffer is used up
        buffered = encoder(getattr(trainer, trainer_names.BUFFERED_INPUTS), "the rollout in use")
    return {"geometry": geometry, "micro_step": micro_step, "buffered_inputs": buffered}


def restore(
    trainer: Any,
    state: SavedRankState,
    decoder: Decoder,
    warn: Callable[[str], None],
    *,
    saved: Geometry | None = None,
) -> None:
    """Restore the micro-step counter and, inside a rollout, the buffered micro-batches.

    Args:
        saved: the geometry with which the buffer was saved; None for that of the trainer.

    Raises:
        CheckpointError: the buffer does not have one entry per step of a generation.
    """
    geometry = geometry_of(trainer)
    if geometry is None or state.micro_step is None:
        return
    setattr(trainer, trainer_names.MICRO_STEP, state.micro_step)
    if state.at_boundary:
        return
    buffer = decoder(state.buffered_inputs)
    if buffer is None:
        warn(
            f"{decoder.source} does not contain the rollout in use, because it could not be saved:"
            " a new rollout is generated, and the results differ from an uninterrupted run"
        )
        return
    count = (saved or geometry).steps_per_generation
    if not isinstance(buffer, list) or len(buffer) != count:
        raise CheckpointError(f"{decoder.source} does not contain a rollout of {count} micro-batches")
    if count != geometry.steps_per_generation:
        buffer = resplit(buffer, geometry.steps_per_generation)
    setattr(trainer, trainer_names.BUFFERED_INPUTS, buffer)
