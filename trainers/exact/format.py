"""How one rank's part of the exact state lies on disk: JSON for structure and numbers, safetensors for tensors.

Nothing here is executed when it is read, as a pickle would be: what a file may hold is a closed list of tagged
types. Written and read by `state.py`. Knows nothing of trainers.
"""

from __future__ import annotations

import json
import os
from collections import deque
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pydantic
import safetensors.torch
import torch
from safetensors import SafetensorError

from grpo_run.runtime.errors import CheckpointError

FOLDER = "grpo_run"
"""Beside Hugging Face's files in a checkpoint directory."""
SCHEMA = 1
MAX_JSON_BYTES = 1 << 30
"""No rank's structure is near this size; a file that is was not written here."""
TAG = "@"


class NotPlain(TypeError):
    """A value that has no form on disk; the message says where it is and what it is."""


class _Part(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(frozen=True, extra="ignore", strict=True)


class Geometry(_Part):
    """How rollouts, micro-steps and optimizer steps fit together."""

    steps_per_generation: int = pydantic.Field(ge=1)
    num_iterations: int = pydantic.Field(ge=1)
    accumulation: int = pydantic.Field(ge=1)

    @property
    def generate_every(self) -> int:
        """Micro-steps from one rollout to the next."""
        return self.steps_per_generation * self.num_iterations


class LossState(_Part):
    """What the Trainer has added up for its next log line and its final average. `seconds` is training time so far."""

    pending: float
    total: float
    last_logged_step: int
    first_step: int
    seconds: float


class RewardState(_Part):
    """A stateful reward function's own state, in tagged form; `state` is null when it could not be written."""

    name: str
    state: Any = None


class RankState(_Part):
    """`rank{R}.json`. What is `Any` is in tagged form (`decode`)."""

    schema_version: int
    rank: int = pydantic.Field(ge=0)
    world_size: int = pydantic.Field(ge=1)
    step: int = pydantic.Field(ge=0)
    """The optimizer step the checkpoint was made at."""
    geometry: Geometry | None = None
    """None for trainers that make no rollouts."""
    micro_step: int | None = None
    buffered_inputs: Any = None
    tables: dict[str, Any] = {}
    """Attributes that gather numbers for the next log line, by name."""
    train_tokens: int | float | None = None
    loss: LossState | None = None
    sampler: Any = None
    epoch_rng: Any = None
    rewards: list[RewardState] = []
    reference: Literal["replicated", "sharded"] | None = None
    gradient_order: list[int] | None = None

    @property
    def at_boundary(self) -> bool:
        """The next micro-step makes a new rollout, or there are none."""
        return self.geometry is None or (self.micro_step or 0) % self.geometry.generate_every == 0


def encode(value: Any, tensors: dict[str, torch.Tensor], where: str) -> Any:
    """The tagged form of a value.

    Args:
        tensors: gets the tensors met on the way, on the CPU, under new names.
        where: what the value is, for the error.

    Raises:
        NotPlain: it holds something that is not a number, text, tensor, array or a container of these.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors)
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, where)
    if isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(value)
        except TypeError as error:
            raise NotPlain(f"{where} is an array of {value.dtype}") from error
        return {**_encode_tensor(tensor, tensors), TAG: "array"}
    if isinstance(value, list):
        return [encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (tuple, deque)):
        items = [encode(item, tensors, f"{where}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {TAG: "tuple", "items": items}
        return {TAG: "deque", "maxlen": value.maxlen, "items": items}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: encode(item, tensors, f"{where}[{key!r}]") for key, item in value.items()}
        pairs = [
            [encode(key, tensors, f"a key of {where}"), encode(item, tensors, f"{where}[{key!r}]")]
            for key, item in value.items()
        ]
        return {TAG: "dict", "items": pairs}
    raise NotPlain(f"{where} is a {type(value).__qualname__}")


def _encode_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    name = f"t{len(tensors)}"
    # a copy: slices of one tensor share its memory, which safetensors refuses
    tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {TAG: "tensor", "name": name, "device": tensor.device.type}


def decode(value: Any, tensors: dict[str, torch.Tensor], device: torch.device, where: str) -> Any:
    """The value of a tagged form.

    Args:
        device: where tensors go that were not on the CPU.
        where: the file, for the error.

    Raises:
        CheckpointError: it is not what `encode` writes.
    """
    try:
        return _decode(value, tensors, device)
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        raise CheckpointError(f"{where} does not hold what was written there: {error!r}") from error


def _decode(value: Any, tensors: dict[str, torch.Tensor], device: torch.device) -> Any:
    if isinstance(value, list):
        return [_decode(item, tensors, device) for item in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {key: _decode(item, tensors, device) for key, item in value.items()}
    match value[TAG]:
        case "tensor":
            tensor = tensors[value["name"]]
            return tensor if value["device"] == "cpu" else tensor.to(device)
        case "array":
            return tensors[value["name"]].numpy()
        case "tuple":
            return tuple(_decode(value["items"], tensors, device))
        case "deque":
            return deque(_decode(value["items"], tensors, device), maxlen=value["maxlen"])
        case "dict":
            return {
                _decode(key, tensors, device): _decode(item, tensors, device) for key, item in value["items"]
            }
        case unknown:
            raise ValueError(f"unknown tag {unknown!r}")


def json_path(folder: Path, rank: int) -> Path:
    """A rank's structure and numbers, in a checkpoint directory."""
    return folder / FOLDER / f"rank{rank}.json"


def write(folder: Path, state: RankState, tensors: dict[str, torch.Tensor]) -> None:
    """Write one rank's files into a checkpoint directory that is not published yet. Mode 0600."""
    path = json_path(folder, state.rank)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    if tensors:
        write_tensors(path.with_suffix(".safetensors"), tensors)
    else:  # an earlier save of the same step may have had some
        path.with_suffix(".safetensors").unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump({**state.model_dump(), "has_tensors": bool(tensors)}, file)


def write_tensors(path: Path, tensors: dict[str, torch.Tensor]) -> None:
    """One safetensors file, called through its module, where staging takes hold of it."""
    safetensors.torch.save_file(tensors, str(path))
    if path.exists():  # staging may write it later, and sees to the mode
        path.chmod(0o600)


def read_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a file, on the CPU.

    Raises:
        CheckpointError: it is missing, cut short or no such file.
    """
    try:
        loaded: dict[str, torch.Tensor] = safetensors.torch.load_file(str(path), device="cpu")
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    return loaded


def read(folder: Path, rank: int) -> tuple[RankState, dict[str, torch.Tensor]]:
    """One rank's state and its tensors.

    Raises:
        CheckpointError: a file is missing, cut short, of another release or not ours.
    """
    path = json_path(folder, rank)
    try:
        size = path.stat().st_size
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path} has {size} bytes; no rank's state is that large")
        raw = json.loads(path.read_bytes())
        state = RankState.model_validate(raw)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{path} is not a rank's state: {place}: {first['msg']}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    if state.schema_version != SCHEMA:
        raise CheckpointError(f"{path} has schema {state.schema_version}, this release knows {SCHEMA}")
    if state.rank != rank:
        raise CheckpointError(f"{path} is the state of rank {state.rank}, not of rank {rank}")
    tensors = read_tensors(path.with_suffix(".safetensors")) if raw.get("has_tensors") else {}
    return state, tensors
