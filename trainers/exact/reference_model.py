"""The local part of a reference model that follows the policy (`sync_ref_model`), which no checkpoint of TRL holds.

Each rank reads and writes what it has in memory: the shard under ZeRO-3 and FSDP, the whole where it is replicated.
No collective is needed for either. Called by `state.py`. Reference models that never change are not looked at.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers import upstream
from grpo_run.trainers.exact import format

Kind = Literal["replicated", "sharded"]


def synced(trainer: Any) -> Any | None:
    """The trainer's reference model, if training changes it."""
    model = getattr(trainer, "ref_model", None)
    return model if model is not None and getattr(trainer.args, "sync_ref_model", False) else None


def _local(parameter: Any) -> tuple[torch.Tensor, bool]:
    """What this rank holds of a parameter, and whether it is a shard."""
    # ZeRO-3, a DTensor of FSDP 2, a FlatParameter of FSDP 1
    shard = any(hasattr(parameter, name) for name in ("ds_tensor", "to_local", "_local_shard"))
    return upstream.local_part(parameter).detach(), shard


def path(folder: Path, rank: int) -> Path:
    """Where a rank's part lies in a checkpoint directory."""
    return folder / format.FOLDER / f"reference{rank}.safetensors"


def save(model: Any, folder: Path, rank: int) -> Kind:
    """Write this rank's part; of a replicated model, rank 0 writes for all."""
    parts = {name: _local(parameter) for name, parameter in model.named_parameters()}
    kind: Kind = "sharded" if any(shard for _, shard in parts.values()) else "replicated"
    if kind == "sharded" or rank == 0:
        tensors = {name: part.to("cpu", copy=True).contiguous() for name, (part, _) in parts.items()}
        format.write_tensors(path(folder, rank), tensors)
    return kind


def load(model: Any, folder: Path, rank: int, kind: Kind) -> None:
    """Put this rank's part back.

    Raises:
        CheckpointError: the file does not fit the model.
    """
    file = path(folder, rank if kind == "sharded" else 0)
    tensors = format.read_tensors(file)
    parameters = dict(model.named_parameters())
    if tensors.keys() != parameters.keys():
        odd = min(tensors.keys() ^ parameters.keys())
        raise CheckpointError(f"{file} does not fit the reference model: {odd} is in one of them only")
    with torch.no_grad():
        for name, parameter in parameters.items():
            if hasattr(parameter, "ds_tensor") and parameter.ds_status.name != "NOT_AVAILABLE":
                parameter.partition(has_been_updated=False)  # or the gathered copy would go on being used
            target, _ = _local(parameter)
            if target.shape != tensors[name].shape:
                raise CheckpointError(
                    f"{file} does not fit the reference model: {name} has {tuple(target.shape)} here and"
                    f" {tuple(tensors[name].shape)} there"
                )
            target.copy_(tensors[name])
