"""Digests of tensors: of what ranks hold in common, and of what a rank holds of a call.

A digest is the sum of a tensor's bits, read as integers, modulo 2**64: it does not depend on the order of
additions, and a flipped bit changes it always. Used by features that compare replicas, a step with its
replay, or the runs of a rehearsal. Does not communicate.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_run.runtime.upstream import tensor_files


def digests(tensors: Sequence[Any]) -> list[int]:
    """Return the digest of each tensor. Waits for their devices, once for each."""
    import torch

    sums: dict[Any, list[tuple[int, Any]]] = {}
    with torch.no_grad():
        for position, tensor in enumerate(tensors):
            total = bits_of(tensor).sum(dtype=torch.int64)
            sums.setdefault(total.device, []).append((position, total))
        found = [0] * len(tensors)
        for parts in sums.values():
            values = torch.stack([total for _, total in parts]).tolist()
            for (position, _), value in zip(parts, values, strict=True):
                found[position] = value
    return found


def combined(values: Sequence[int]) -> int:
    """Return one number of 63 bits for several digests."""
    packed = struct.pack(f"<{len(values)}q", *values)
    return int.from_bytes(hashlib.blake2b(packed, digest_size=8).digest(), "little") >> 1


def digest_of_weights(models: Iterable[Any]) -> str:
    """Return a digest of the parameters and buffers that this rank holds; "" if it holds none."""
    tensors = [one for model in models for one in (*model.parameters(), *model.buffers())]
    held = [local for one in tensors if (local := tensor_files.local_part(one)).numel()]
    return f"{combined(digests(held)):016x}" if held else ""


def bits_of(tensor: Any) -> Any:
    """Return the elements of a tensor as integers of the same bits."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(integers[flat.element_size()])


def tensors_of_rank(models: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield what this rank holds of parameters and of optimizers' states, with names; of a tensor that is
    spread over ranks, its part.

    Args:
        models: torch modules.
        optimizers: torch optimizers, or wrappers with `state`.
    """
    names: dict[int, str] = {}
    for number, model in enumerate(models):
        prefix = f"{number}." if number else ""
        for name, parameter in model.named_parameters():
            names.setdefault(id(parameter), prefix + name)
            yield from _held(prefix + name, parameter)
    for optimizer in optimizers:
        states = getattr(optimizer, "state", None)
        for number, (key, state) in enumerate(states.items() if isinstance(states, Mapping) else ()):
            # ZeRO keeps its state by flat parts of all parameters
            of = names.get(id(key), f"part {number}")
            for name, value in state.items() if isinstance(state, Mapping) else ():
                yield from _held(f"{name} of {of}", value)


def _held(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    local = tensor_files.local_part(tensor)
    if hasattr(local, "element_size") and local.numel() and not local.is_meta:
        yield name, local
