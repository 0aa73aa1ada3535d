"""Save and restore the parts of a trainer's state that its own checkpoints lack. Called by `state.py`.

- log state: TRL's metric and completion tables, the pending loss of transformers, the count of trained
  tokens.
- reference model: one that is synced with the policy (`sync_ref_model`). Each rank reads and writes what it
  holds: its shard under ZeRO-3 and FSDP, the full model where it is replicated. No collective is needed.
  Reference models that do not change are ignored.
- reward functions with `state_dict` and `load_state_dict`, also inside wrappers. Reward models are skipped:
  training does not change the state of a `torch.nn.Module` reward.
- rollout in use (GRPO and RLOO): the micro-step counter and the buffered micro-batches. One rollout can
  serve several optimizer steps, so a checkpoint can lie inside one.

Logs nothing.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact import format
from grpo_run.runtime.rank.exact.encoding import Decoder, Encoder, is_stateful, refill
from grpo_run.runtime.rank.exact.format import Geometry, LossState, RewardState, SavedRankState
from grpo_run.runtime.rank.exact.geometry import resplit
from grpo_run.runtime.upstream import tensor_files, trainer_names

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
        first_step=getattr(trainer, trainer_names.FIRST_STEP, 0),
        seconds=seconds,
    )


def save_train_tokens(trainer: Any) -> int | float | None:
    """Return the number of trained tokens as a Python number, or None if the trainer does not count them."""
    value: Any = getattr(trainer, trainer_names.TRAIN_TOKENS, None)
    number: int | float | None = value.item() if hasattr(value, "item") else value
    return number


def restore_log_state(trainer: Any, state: SavedRankState, decoder: Decoder) -> None:
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
    if hasattr(trainer, trainer_names.FIRST_STEP):
        setattr(trainer, trainer_names.FIRST_STEP, loss.first_step)
    original = getattr(trainer, trainer_names.FINALIZE)

    @functools.wraps(original)
    def finalize(trial: Any, num_train_samples: Any, start_time: float) -> Any:
        # transformers averages over the steps of all attempts, so the time must cover all attempts too
        return original(trial, num_train_samples, start_time - loss.seconds)

    setattr(trainer, trainer_names.FINALIZE, finalize)


def close(trainer: Any) -> None:
    """Remove the wrapper that `restore_log_state` put around the trainer's finalize method."""
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
    elif not refill(target, value):
        raise CheckpointError(
            f"{name} is a {type(value).__name__} in the checkpoint, a {type(target).__name__} in the trainer"
        )


Kind = Literal["replicated", "sharded"]


def synced(trainer: Any) -> Any | None:
    """Return the trainer's reference model if training changes it, else None."""
    model = getattr(trainer, "ref_model", None)
    return model if model is not None and getattr(trainer.args, "sync_ref_model", False) else None


def _local(parameter: Any) -> tuple[torch.Tensor, bool]:
    """Return this rank's part of a parameter, and whether it is a shard."""
    # ZeRO-3, a DTensor of FSDP 2, a FlatParameter of FSDP 1
    sharded = any(hasattr(parameter, name) for name in ("ds_tensor", "to_local", "_local_shard"))
    return tensor_files.local_part(parameter).detach(), sharded


def reference_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's file in a checkpoint directory."""
    return folder / format.FOLDER / f"reference{rank}.safetensors"


def save_reference_model(model: Any, folder: Path, rank: int) -> Kind:
    """Write this rank's shard; of a replicated model, rank 0 writes the only file."""
    local = {name: _local(parameter) for name, parameter in model.named_parameters()}
    kind: Kind = "sharded" if any(sharded for _, sharded in local.values()) else "replicated"
    if kind == "sharded" or rank == 0:
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, (tensor, _) in local.items()}
        format.write_tensors(reference_path(folder, rank), tensors)
    return kind


def load_reference_model(model: Any, folder: Path, rank: int, kind: Kind) -> None:
    """Load this rank's part.

    Raises:
        CheckpointError: the file does not fit the model.
    """
    path = reference_path(folder, rank if kind == "sharded" else 0)
    tensors = format.read_tensors(path)
    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        name = min(tensors.keys() ^ parameters.keys())
        raise CheckpointError(f"{path} does not fit the reference model: only one of them has {name}")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if hasattr(parameter, "ds_tensor") and parameter.ds_status.name != "NOT_AVAILABLE":
                parameter.partition(has_been_updated=False)  # else DeepSpeed keeps using the gathered copy
            target, _ = _local(parameter)
            if target.shape != tensors[name].shape:
                raise CheckpointError(
                    f"{path} does not fit the reference model: {name} has shape"
                    f" {tuple(tensors[name].shape)} in the file and {tuple(target.shape)} in the model"
                )
            target.copy_(tensors[name])


MAX_WRAPPERS = 100
"""Wrappers around a function; more would be a cycle."""


def stateful_rewards(trainer: Any) -> list[tuple[str, Any]]:
    """Return name and object of each stateful reward function, in order."""
    found = []
    functions = getattr(trainer, "reward_funcs", None)
    for function in functions if isinstance(functions, list) else []:
        inner, wrappers = function, 0
        while not is_stateful(inner) and hasattr(inner, "__wrapped__") and wrappers < MAX_WRAPPERS:
            inner, wrappers = inner.__wrapped__, wrappers + 1
        if is_stateful(inner) and not isinstance(inner, torch.nn.Module):
            found.append((getattr(function, "__name__", type(inner).__name__), inner))
    return found


def save_reward_state(trainer: Any, encoder: Encoder) -> list[RewardState]:
    """Return the encoded states."""
    return [
        RewardState(name=name, state=encoder(function.state_dict(), f"the state of reward {name}"))
        for name, function in stateful_rewards(trainer)
    ]


def load_reward_state(trainer: Any, saved: Sequence[RewardState], decoder: Decoder) -> str | None:
    """Load the states into the script's reward functions.

    Returns:
        None, or a warning if the script's functions are not those that were saved; then nothing is loaded.
    """
    functions = stateful_rewards(trainer)
    saved_names, names = [reward.name for reward in saved], [name for name, _ in functions]
    if saved_names != names:
        return (
            f"the checkpoint contains states of the reward functions {saved_names}, but the script has"
            f" {names}: their states are not restored"
        )
    for (_, function), reward in zip(functions, saved, strict=True):
        if reward.state is not None:
            function.load_state_dict(decoder(reward.state))
    return None


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


def save_rollout(trainer: Any, encoder: Encoder) -> dict[str, Any]:
    """Return the fields `geometry`, `micro_step` and `buffered_inputs` of `SavedRankState`."""
    geometry = geometry_of(trainer)
    if geometry is None:
        return {}
    micro_step, buffered = getattr(trainer, trainer_names.MICRO_STEP), None
    if micro_step % geometry.generate_every:  # at a boundary the buffer is used up
        buffered = encoder(getattr(trainer, trainer_names.BUFFERED_INPUTS), "the rollout in use")
    return {"geometry": geometry, "micro_step": micro_step, "buffered_inputs": buffered}


def restore_rollout(
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
