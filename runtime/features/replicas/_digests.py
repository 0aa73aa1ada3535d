"""Which ranks differ, by the digests of tensors that they hold in common.

Tensors that are spread over ranks have no second copy and are left out. The digests are those of
`runtime/rank/tensor_digests.py`. Used by `rank.py`. Does not communicate.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from grpo_run.runtime.rank.tensor_digests import bits_of
from grpo_run.runtime.rank.vote import from_bits, to_bits

MOST_PARTS = 4096
"""Of a tensor whose digests are compared to find the element that differs."""
FAR = 4.0
"""How much further than the nearest rank's a value is from the right one, if the rank was wrong."""

Gather = Callable[[list[int]], list[list[int]]]


def tensors_in_common(models: Iterable[Any], optimizers: Iterable[Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and tensors of parameters, and of the moments that optimizers keep for them.

    Args:
        models: torch modules.
        optimizers: torch optimizers, or wrappers with `state`. One that keeps its state by other keys than
            the parameters, as those that spread it over ranks do, adds nothing.
    """
    states = [state for one in optimizers if isinstance(state := getattr(one, "state", None), Mapping)]
    for number, model in enumerate(models):
        prefix = f"{number}." if number else ""
        for name, parameter in model.named_parameters():
            if _is_spread(parameter):
                continue
            yield prefix + name, parameter
            for state in states:
                moments = state.get(parameter)
                for key, value in moments.items() if isinstance(moments, Mapping) else ():
                    if getattr(value, "shape", None) == parameter.shape and not _is_spread(value):
                        yield f"{key} of {prefix}{name}", value


def minority(values: Sequence[int]) -> tuple[int, ...]:
    """Return the positions whose value differs from that of more than half of all; empty without one."""
    value, count = Counter(values).most_common(1)[0]
    if 2 * count <= len(values):
        return ()
    return tuple(position for position, one in enumerate(values) if one != value)


def differing_element(tensor: Any, gather: Gather) -> tuple[int, tuple[int, ...]]:
    """Return the position of the element in which ranks differ most, and the bits of each rank's value.

    Args:
        tensor: that differs between ranks.
        gather: returns every rank's values, by rank; called twice, on all ranks alike.
    """
    import torch

    with torch.no_grad():
        bits = bits_of(tensor)
        length = -(-bits.numel() // MOST_PARTS)
        sums = [int(part.sum(dtype=torch.int64)) for part in bits.split(length)]
        columns = zip(*gather(sums), strict=True)
        first = next(number for number, column in enumerate(columns) if len(set(column)) > 1) * length
        values = tensor.detach().reshape(-1)[first : first + length].double().tolist()
    found = list(zip(*gather([to_bits(value) for value in values]), strict=True))
    different = [number for number, column in enumerate(found) if len(set(column)) > 1]
    worst = max(different, key=lambda number: _spread(found[number]), default=0)
    return first + worst, found[worst]


def element(tensor: Any, position: int) -> float:
    """Return one element of a tensor."""
    return float(tensor.detach().reshape(-1)[position])


def far_from(value: float, bits: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks whose value is far from the right one, compared with the nearest rank.

    A wrong value on one rank changes the gradients of all in later steps, so no rank may have the right one.

    Args:
        value: the right one.
        bits: of the value of each rank.
    """
    distances = [_distance(from_bits(one), value) for one in bits]
    nearest = min(distances)
    return tuple(rank for rank, distance in enumerate(distances) if distance > FAR * nearest)


def _distance(first: float, second: float) -> float:
    distance = abs(first - second)
    return math.inf if math.isnan(distance) else distance


def _spread(bits: Sequence[int]) -> float:
    values = [from_bits(one) for one in bits]
    return max(_distance(values[0], value) for value in values)


def _is_spread(tensor: Any) -> bool:
    # a DTensor has its part by this method; ZeRO-3 leaves parameters empty, and offloading has none
    return (
        hasattr(tensor, "to_local") or not hasattr(tensor, "numel") or tensor.numel() == 0 or tensor.is_meta
    )
