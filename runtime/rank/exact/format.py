"""Files of the exact state in a checkpoint: per rank, one JSON and one safetensors file.

    checkpoint-N/grpo_run/rank{R}.json          `SavedRankState`
    checkpoint-N/grpo_run/rank{R}.safetensors   the tensors that it refers to, if any

Read and written by the other modules of this package. Does not access a trainer.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

import pydantic
import safetensors.torch
import torch
from safetensors import SafetensorError

from grpo_run.runtime.errors import CheckpointError

FOLDER = "grpo_run"
"""Folder in a checkpoint directory, next to the files of Hugging Face."""
SCHEMA = 1
MAX_JSON_BYTES = 1 << 30
"""Far above any real size of one rank's JSON file. A larger file is rejected before it is parsed."""


class _Model(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)


class Geometry(_Model):
    """How micro-steps are grouped into rollouts and optimizer steps."""

    steps_per_generation: int = pydantic.Field(ge=1)
    num_iterations: int = pydantic.Field(ge=1)
    accumulation: int = pydantic.Field(ge=1)
    """`gradient_accumulation_steps`."""

    @property
    def generate_every(self) -> int:
        """Micro-steps from one rollout to the next."""
        return self.steps_per_generation * self.num_iterations


class LossState(_Model):
    """The loss accumulated for the next log line and the final average; `seconds` of training time."""

    pending: float
    total: float
    last_logged_step: int
    first_step: int
    seconds: float


class RewardState(_Model):
    """The encoded state of one stateful reward function; `state` is None if it could not be encoded."""

    name: str
    state: Any = None


class CallbackState(_Model):
    """The encoded state of one callback, by class name and order.

    `state_dict` is what a callback with that method returned; `attributes` are the changed attributes of any
    other. `begun` are digests of those that are restored only if `on_train_begin` leaves the same again, as
    it left them; None where there was no such attribute.
    """

    name: str
    state_dict: Any = None
    attributes: dict[str, Any] = {}
    begun: dict[str, str | None] = {}


class SavedRankState(_Model):
    """The contents of `rank{R}.json`. Fields of type `Any` are encoded values (`encoding.py`)."""

    schema_version: int
    rank: int = pydantic.Field(ge=0)
    world_size: int = pydantic.Field(ge=1)
    step: int = pydantic.Field(ge=0)
    """The optimizer step of the checkpoint."""
    geometry: Geometry | None = None
    """None for trainers without rollouts."""
    micro_step: int | None = None
    buffered_inputs: Any = None
    """The micro-batches of the rollout in use."""
    tables: dict[str, Any] = {}
    """Trainer attributes that hold values for the next log line, by attribute name."""
    train_tokens: int | float | None = None
    loss: LossState | None = None
    sampler: Any = None
    epoch_rng: Any = None
    """The global random number generators at the start of the epoch."""
    rewards: list[RewardState] = []
    callbacks: list[CallbackState] = []
    script_stopped: bool = False
    """A callback of the script ended the call at this step."""
    epoch_ended: bool = False
    """The events at the end of the epoch have been processed."""
    evaluating: bool = False
    """The model was in evaluation mode, in which an evaluation leaves it until the next training step."""
    reference: Literal["replicated", "sharded"] | None = None
    gradient_order: list[int] | None = None
    guards: Any = None
    """What features keep, as plain JSON values."""
    loop: Any = None
    """What a hand-written loop keeps per rank; None for a Trainer."""

    @property
    def at_boundary(self) -> bool:
        """Whether the next micro-step generates a new rollout, or the trainer has no rollouts."""
        return self.geometry is None or (self.micro_step or 0) % self.geometry.generate_every == 0


def rank_state_path(folder: Path, rank: int) -> Path:
    """Return the path of a rank's JSON file in a checkpoint directory."""
    return folder / FOLDER / f"rank{rank}.json"


def write(folder: Path, state: SavedRankState, tensors: dict[str, torch.Tensor]) -> None:
    """Write one rank's files, mode 0600, into a checkpoint directory that is not published yet."""
    path = rank_state_path(folder, state.rank)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if tensors:
        write_tensors(path.with_suffix(".safetensors"), tensors)
    else:  # an earlier save of the same step may have written the file
        path.with_suffix(".safetensors").unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({**state.model_dump(), "has_tensors": bool(tensors)}, file)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Write a safetensors file, mode 0600."""
    # looked up in its module, where `runtime.rank.saving._spare_files` replaces it
    safetensors.torch.save_file(tensors, str(path))
    path.chmod(0o600)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return every tensor of a safetensors file, on the CPU.

    Raises:
        CheckpointError: the file is missing, truncated or not a safetensors file.
    """
    try:
        loaded: dict[str, torch.Tensor] = safetensors.torch.load_file(str(path), device="cpu")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return loaded


def read(folder: Path, rank: int) -> tuple[SavedRankState, dict[str, torch.Tensor]]:
    """Return one rank's state and its tensors.

    Raises:
        CheckpointError: a file is missing, truncated, of another schema version or of another rank.
    """
    path = rank_state_path(folder, rank)
    try:
        size_bytes = path.stat().st_size
        if size_bytes > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} is {size_bytes} bytes; the limit is {MAX_JSON_BYTES}")
        raw = json.loads(path.read_bytes())
        state = SavedRankState.model_validate(raw)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is not a valid rank state: {field}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if state.schema_version != SCHEMA:
        raise CheckpointError(
            f"{path} has schema version {state.schema_version}; this release supports {SCHEMA}"
        )
    if state.rank != rank:
        raise CheckpointError(f"{path} is the state of rank {state.rank}, not of rank {rank}")
    tensors = read_tensors(path.with_suffix(".safetensors")) if raw.get("has_tensors") else {}
    return state, tensors
