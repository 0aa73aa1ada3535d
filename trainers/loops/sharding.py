"""Convert state dictionaries to what a file holds and back: the local shards of distributed tensors.

Called by `state.py`. The trees contain only types that `torch.load(weights_only=True)` accepts, so that what was saved
can be loaded. Does no communication.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from grpo_run.runtime.errors import ConfigError

LOCAL = "grpo_run.local_shard"
"""The only key of the dictionary that stands for a distributed tensor: the shard of the rank that wrote it."""


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
