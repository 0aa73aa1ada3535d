"""The objects of a loop's `state`: what they are, who saves them, and their files in a checkpoint.

    checkpoint-N/model.pt               `model.state_dict()`, without the prefix of DistributedDataParallel
    checkpoint-N/model.rank1.pt         the same of rank 1, where ranks differ

Modules and optimizers have files of their own. With DistributedDataParallel every rank holds the same, so
rank 0 writes them; otherwise every rank writes its own: local shards with FSDP2, and whatever else a script
keeps per rank. Files contain only types that `torch.load(weights_only=True)` accepts; the local shards of
distributed tensors are converted to them and back without communication. Everything else is in the rank's
own file (`_rank_state.py`). Called by `run.py`.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

from grpo_run.runtime.checkpoints.compatibility import NamedShape, digest_model_shape, named_shapes
from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.exact.callback_state import GENERATORS
from grpo_run.runtime.rank.exact.encoding import is_stateful

LOCAL = "grpo_run.local_shard"
"""The only key of the dictionary that stands for a distributed tensor: the shard of the rank that wrote
it.
"""


def is_sharded(value: Any) -> bool:
    """Whether a value is a distributed tensor (`DTensor`), of which each rank holds a shard."""
    # only a script that has imported the module can have one
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, module.DTensor)


def to_saved(value: Any, name: str) -> Any:
    """Return a state dictionary as it is saved; tensors are not copied.

    Args:
        name: what the value is, for the error message.

    Raises:
        ConfigError: it contains something other than tensors, numbers, strings and containers of these.
    """
    if value is None or isinstance(value, (bool, int, float, str, bytes, torch.dtype, torch.device)):
        return value
    if is_sharded(value):
        return {LOCAL: value.to_local().detach()}
    if type(value) in (torch.Tensor, torch.nn.Parameter):
        return value.detach()
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        items = {key: to_saved(item, f"{name}[{key!r}]") for key, item in value.items()}
        if not isinstance(value, OrderedDict):
            return items
        ordered = OrderedDict(items)
        if hasattr(value, "_metadata"):  # versions of modules, which `load_state_dict` reads
            ordered._metadata = value._metadata  # type: ignore[attr-defined]
        return ordered
    if isinstance(value, (list, tuple)):
        saved = [to_saved(item, f"{name}[{index}]") for index, item in enumerate(value)]
        return saved if isinstance(value, list) else tuple(saved)
    if isinstance(value, set):
        return {to_saved(item, f"an item of {name}") for item in value}
    raise ConfigError(f"{name} is a {type(value).__qualname__}, which a checkpoint of a loop cannot hold")


def from_saved(value: Any, rebuild: Callable[[torch.Tensor], Any]) -> Any:
    """Return what `to_saved` was given.

    Args:
        rebuild: makes a distributed tensor from the local shard.
    """
    if isinstance(value, dict):
        if set(value) == {LOCAL}:
            return rebuild(value[LOCAL])
        for key, item in value.items():
            value[key] = from_saved(item, rebuild)
        return value
    if isinstance(value, (list, tuple)):
        items = [from_saved(item, rebuild) for item in value]
        return items if isinstance(value, list) else tuple(items)
    return value


def like(template: Any, local: torch.Tensor) -> Any:
    """Return a distributed tensor with the shape and placements of `template` and this local shard."""
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local.to(template.to_local().device),
        template.device_mesh,
        template.placements,
        run_check=False,
        shape=template.shape,
        stride=template.stride(),
    )


def module_from_saved(saved: dict[str, Any], present: dict[str, Any]) -> dict[str, Any]:
    """Return the state dictionary of a module, with the shards laid out as in its present one."""
    for name, value in saved.items():
        if isinstance(value, dict) and set(value) == {LOCAL}:
            saved[name] = like(present[name], value[LOCAL])
    return saved


def optimizer_from_saved(saved: dict[str, Any], parameters: Sequence[Any]) -> dict[str, Any]:
    """Return the state dictionary of an optimizer, with each parameter's shards laid out as the parameter.

    Args:
        parameters: of all groups, in their order.
    """
    for index, state in saved["state"].items():
        template = parameters[index] if isinstance(index, int) and index < len(parameters) else None
        saved["state"][index] = from_saved(state, lambda local, template=template: like(template, local))  # type: ignore[misc]
    return saved


REPLICATED, SHARDED, PER_RANK = "ddp", "fsdp2", "per-rank"
"""Layouts, as manifests record them: equal on all ranks, distributed tensors, or anything else that ranks
keep.
"""


class LoopState:
    """The `state` of a loop on one rank.

    Args:
        entries: the script's dictionary. Plain values are read from it when a checkpoint is taken, and set in
            it when one is loaded.

    Raises:
        ConfigError: an entry cannot be saved, or not by every rank for itself.
    """

    def __init__(self, entries: MutableMapping[str, Any], *, rank: int, world_size: int) -> None:
        self.entries = entries
        self.modules: dict[str, torch.nn.Module] = {}
        """Without DistributedDataParallel around them."""
        self.wrapped: dict[str, DistributedDataParallel] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        self.others: dict[str, Any] = {}
        """Objects with `state_dict` and `load_state_dict`, saved by each rank."""
        self.generators: dict[str, Any] = {}
        self.rank = rank
        self.world_size = world_size
        for key, value in entries.items():
            self._sort(key, value)
        if world_size == 1 or not (set(self.modules) - set(self.wrapped)):
            self.layout = REPLICATED
        elif any(is_sharded(parameter) for parameter in self.parameters()):
            self.layout = SHARDED
        else:
            self.layout = PER_RANK

    def _sort(self, key: str, value: Any) -> None:
        if not isinstance(key, str) or not key:
            raise ConfigError(f"state of a loop: the key {key!r} is not a name")
        if (problem := _refusal(value)) is not None:
            raise ConfigError(f"state[{key!r}] of a loop: {problem}")
        if isinstance(value, torch.nn.Module):
            if isinstance(value, DistributedDataParallel):
                self.wrapped[key] = value
                value = value.module
            self.modules[key] = value
        elif isinstance(value, torch.optim.Optimizer):
            self.optimizers[key] = value
        elif isinstance(value, tuple(GENERATORS)):
            self.generators[key] = value
        elif is_stateful(value):
            self.others[key] = value

    @property
    def values(self) -> dict[str, Any]:
        """The plain values, as the script's dictionary has them now."""
        objects = {*self.modules, *self.optimizers, *self.others, *self.generators}
        return {key: value for key, value in self.entries.items() if key not in objects}

    def parameters(self) -> Iterator[Any]:
        """Yield the parameters of all modules."""
        for module in self.modules.values():
            yield from module.parameters()

    def named_shapes(self) -> tuple[NamedShape, ...]:
        """Return name, full shape and type of every parameter."""
        return named_shapes(
            (f"{key}.{name}", parameter)
            for key, module in self.modules.items()
            for name, parameter in module.named_parameters()
        )

    def description(self) -> dict[str, Any]:
        """Return the fields of `Identity` that describe the model and how it is spread over ranks."""
        shapes = self.named_shapes()
        return {"layout": self.layout, "model_shape": digest_model_shape(shapes) if shapes else None}

    def size_bytes(self) -> int:
        """Return the approximate size of a checkpoint over all ranks: weights, and two moments per trained
        weight.
        """
        return sum(self._file_bytes().values()) * (self.world_size if self.layout == PER_RANK else 1)

    def large_files(self) -> dict[str, int]:
        """Return about the size of each file that this rank writes, by name."""
        return {} if self.layout == REPLICATED and self.rank != 0 else self._file_bytes()

    def _file_bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for key, module in self.modules.items():
            found[self._name(key)] = sum(one.nbytes for one in module.parameters())
        for key, optimizer in self.optimizers.items():
            trained = (
                one for group in optimizer.param_groups for one in group["params"] if one.requires_grad
            )
            found[self._name(key)] = 2 * sum(one.nbytes for one in trained)
        return found

    def write(self, folder: Path) -> None:
        """Write the files of this rank.

        Raises:
            ConfigError: an object's state contains what a checkpoint cannot hold.
        """
        if self.layout == REPLICATED and self.rank != 0:
            return
        owners: dict[str, Any] = {**self.modules, **self.optimizers}
        for key, owner in owners.items():
            torch.save(to_saved(owner.state_dict(), f"the state of {key!r}"), folder / self._name(key))

    def load(self, folder: Path) -> None:
        """Load the files into the script's modules and optimizers.

        Raises:
            CheckpointError: a file is missing or is not of this object.
        """
        for key, module in self.modules.items():
            saved = self._read(folder, key)
            with _fitting(key, folder):
                module.load_state_dict(module_from_saved(saved, module.state_dict()))
        for key, optimizer in self.optimizers.items():
            saved = self._read(folder, key)
            parameters = [one for group in optimizer.param_groups for one in group["params"]]
            with _fitting(key, folder):
                optimizer.load_state_dict(optimizer_from_saved(saved, parameters))

    def _name(self, key: str) -> str:
        rank = "" if self.layout == REPLICATED else f".rank{self.rank}"
        return f"{quote(key, safe=' ')}{rank}.pt"

    def _read(self, folder: Path, key: str) -> Any:
        try:
            return torch.load(folder / self._name(key), map_location="cpu", weights_only=True)
        except OSError as error:
            raise CheckpointError(
                f"{folder} does not contain state[{key!r}] of the loop: {error.strerror}; use the state that"
                " was saved, or start another run with --run-id"
            ) from error


@contextmanager
def _fitting(key: str, folder: Path) -> Iterator[None]:
    """Name the entry and the checkpoint if a state dictionary does not fit."""
    try:
        yield
    except (RuntimeError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder} does not fit state[{key!r}]: {error}") from error


def _refusal(value: Any) -> str | None:
    """Return why an entry cannot be saved by every rank for itself, or None."""
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(value).__mro__}
    inner = getattr(value, "optimizer", None)  # accelerate's wrapper
    names |= {f"{base.__module__}.{base.__qualname__}" for base in type(inner).__mro__}
    if any(name.startswith("deepspeed.") or ".DeepSpeed" in name for name in names):
        return (
            "DeepSpeed saves and loads its state with collectives of its own; use a Trainer, whose"
            " checkpoints of DeepSpeed are exact, or shard with FSDP2 (fully_shard)"
        )
    if any(name.endswith(".ZeroRedundancyOptimizer") for name in names):
        return (
            "ZeroRedundancyOptimizer collects its state on one rank; use FSDP2 (fully_shard) or DDP with a"
            " plain optimizer"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if (
        fsdp is not None
        and isinstance(value, torch.nn.Module)
        and any(isinstance(module, fsdp.FullyShardedDataParallel) for module in value.modules())
    ):
        return (
            "FullyShardedDataParallel (FSDP1) flattens parameters, so a rank cannot save its part of the"
            " state for itself; use FSDP2 (torch.distributed.fsdp.fully_shard)"
        )
    return None
