"""Encode Python values as JSON with type tags, and tensors by reference; decode them again.

Decoding executes no code, unlike a pickle: it accepts a closed list of types. Called by the other modules of
this package through `Encoder` and `Decoder`. Does not read or write files.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from grpo_run.runtime.errors import CheckpointError

TAG = "@"
"""Key of a JSON object that holds the type of an encoded value."""


class UnsupportedValueError(TypeError):
    """A value of a type that cannot be encoded; the message names the value and its type."""


def is_stateful(owner: Any) -> bool:
    """Whether an object of the script decides for itself what its state is."""
    return callable(getattr(owner, "state_dict", None)) and callable(getattr(owner, "load_state_dict", None))


def refill(present: Any, value: Any) -> bool:
    """Give a container the content of another one, and return whether it can have it: other objects may refer
    to it, and it keeps its type and its maximum length."""
    for kinds, add in (((list, deque), "extend"), (dict, "update"), (set, "update")):
        if isinstance(present, kinds) and isinstance(value, kinds):
            present.clear()
            getattr(present, add)(value)
            return True
    return False


class Encoder:
    """Encode the values of one rank's state. A value that cannot be encoded is reported and saved as None.

    Args:
        warn: called with a one-line message for each value that cannot be encoded.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self._warn = warn
        self.tensors: dict[str, torch.Tensor] = {}
        """Every tensor met so far, on the CPU, by the name that the encoded values use."""

    def __call__(self, value: Any, name: str) -> Any:
        """Return the encoded value, or None if it cannot be encoded.

        Args:
            name: what the value is, for the message.
        """
        try:
            return encode(value, self.tensors, name)
        except UnsupportedValueError as error:
            self._warn(f"{error}, which checkpoints cannot hold: after a recovery, {name} is not restored")
            return None


class Decoder:
    """Decode the values of one rank's state.

    Args:
        tensors: the tensors that were saved with the values, by name.
        device: the device of tensors that were not on the CPU when they were saved.
        source: path of the file, for error messages.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], device: torch.device, source: str) -> None:
        self._tensors = tensors
        self._device = device
        self.source = source

    def __call__(self, value: Any) -> Any:
        """Return the value that `encode` was given.

        Raises:
            CheckpointError: `value` is not the output of `encode`.
        """
        try:
            return self._decode(value)
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
            raise CheckpointError(f"{self.source} contains an invalid value: {error!r}") from error

    def _decode(self, value: Any) -> Any:
        decode = self._decode
        if isinstance(value, list):
            return list(map(decode, value))
        if not isinstance(value, dict):
            return value
        if TAG not in value:
            return {key: decode(item) for key, item in value.items()}
        match value[TAG]:
            case "tensor":
                tensor = self._tensors[value["name"]]
                return tensor if value["device"] == "cpu" else tensor.to(self._device)
            case "array":
                return self._tensors[value["name"]].numpy()
            case "tuple":
                return tuple(decode(value["items"]))
            case "bytes":
                return bytes.fromhex(value["hex"])
            case "complex":
                return complex(*value["items"])
            case "set":
                return set(decode(value["items"]))
            case "frozenset":
                return frozenset(decode(value["items"]))
            case "deque":
                return deque(decode(value["items"]), maxlen=value["maxlen"])
            case "dict":
                return {decode(key): decode(item) for key, item in value["items"]}
            case unknown:
                raise ValueError(f"unknown tag {unknown!r}")


def encode(value: Any, tensors: dict[str, torch.Tensor], name: str) -> Any:
    """Return a value as JSON types, with type tags.

    Args:
        tensors: receives a CPU copy of each tensor in the value, under a new name.
        name: what the value is, for the error message.

    Raises:
        UnsupportedValueError: the value contains something other than numbers, strings, tensors, arrays and
            containers of these.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, bytes):
        return {TAG: "bytes", "hex": value.hex()}
    if isinstance(value, complex):
        return {TAG: "complex", "items": [value.real, value.imag]}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, tensors)
    if isinstance(value, np.generic):
        return encode(value.item(), tensors, name)
    if isinstance(value, np.ndarray):
        try:
            tensor = torch.from_numpy(value)
        except TypeError as error:
            raise UnsupportedValueError(f"{name} is an array of {value.dtype}") from error
        return {**_encode_tensor(tensor, tensors), TAG: "array"}
    if isinstance(value, list):
        return [encode(item, tensors, f"{name}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, (tuple, deque)):
        items = [encode(item, tensors, f"{name}[{index}]") for index, item in enumerate(value)]
        if isinstance(value, tuple):
            return {TAG: "tuple", "items": items}
        return {TAG: "deque", "maxlen": value.maxlen, "items": items}
    if isinstance(value, (set, frozenset)):
        # their order depends on the process, and the encoded value is compared with one of another process
        items = sorted((encode(item, tensors, f"an item of {name}") for item in value), key=json.dumps)
        return {TAG: "frozenset" if isinstance(value, frozenset) else "set", "items": items}
    if isinstance(value, dict):
        if all(type(key) is str for key in value) and TAG not in value:
            return {key: encode(item, tensors, f"{name}[{key!r}]") for key, item in value.items()}
        pairs = [
            [encode(key, tensors, f"a key of {name}"), encode(item, tensors, f"{name}[{key!r}]")]
            for key, item in value.items()
        ]
        return {TAG: "dict", "items": pairs}
    raise UnsupportedValueError(f"{name} is a {type(value).__qualname__}")


def _encode_tensor(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    name = f"t{len(tensors)}"
    # a copy, because safetensors rejects tensors that share memory, such as slices
    tensors[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    return {TAG: "tensor", "name": name, "device": tensor.device.type}
