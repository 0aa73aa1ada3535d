"""Save and restore a reference model that is synced with the policy (`sync_ref_model`).

TRL's checkpoints do not contain it. Each rank reads and writes what it holds: its shard under ZeRO-3 and
FSDP, the full model where it is replicated. No collective is needed. Called by `state.py`. Ignores reference
models that do not change.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact import format
from grpo_run.trainers.upstream import tensor_files

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


def save(model: Any, folder: Path, rank: int) -> Kind:
    """Write this rank's shard; of a replicated model, rank 0 writes the only file."""
    local = {name: _local(parameter) for name, parameter in model.named_parameters()}
    kind: Kind = "sharded" if any(sharded for _, sharded in local.values()) else "replicated"
    if kind == "sharded" or rank == 0:
        tensors = {name: tensor.to("cpu", copy=True).contiguous() for name, (tensor, _) in local.items()}
        format.write_tensors(reference_path(folder, rank), tensors)
    return kind


def load(model: Any, folder: Path, rank: int, kind: Kind) -> None:
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
