"""Every flipped bit is found, whatever the type; and the element and the rank are found by it."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from support.vote_groups import run_ranks, thread_votes

from grpo_run.runtime.features.replicas._digests import (
    differing_element,
    element,
    far_from,
    minority,
    tensors_in_common,
)
from grpo_run.runtime.rank.tensor_digests import digests
from grpo_run.runtime.rank.vote import from_bits, to_bits

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.complex64]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (7,), (5, 3)], ids=str)
def test_each_flipped_bit_changes_the_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of each element, in a tensor that is not contiguous as well."""
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype).t() if len(shape) == 2 else (
        torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    )  # fmt: skip
    (before,) = digests([tensor])
    copy = tensor.clone().reshape(-1)
    real = torch.view_as_real(copy).reshape(-1) if dtype.is_complex else copy
    bits = real.view(BITS[real.element_size()])
    for position in range(bits.numel()):
        for bit in range(8 * bits.element_size()):
            mask = torch.tensor(1 << bit if bit < 8 * bits.element_size() - 1 or bits.dtype == torch.uint8
                                else -(1 << bit), dtype=bits.dtype)  # fmt: skip
            bits[position] ^= mask
            assert digests([copy]) != [before]
            bits[position] ^= mask
    assert digests([copy]) == [before]


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ([5, 5, 5], ()), ([5, 6], ()), ([5, 6, 5], (1,)), ([7, 5, 5, 6, 5], (0, 3)), ([5, 5, 6, 6], ()),
        ([1, 2, 3], ()),
    ],
)  # fmt: skip
def test_only_a_majority_is_right(values: list[int], ranks: tuple[int, ...]) -> None:
    """Half of the ranks are none."""
    assert minority(values) == ranks


@pytest.mark.parametrize("size", [1, 9, 4097, 100_000])
def test_the_element_that_differs_most_is_found(size: int) -> None:
    """Ranks exchange a bounded number of values, whatever the size."""
    votes = thread_votes(2)
    tensors = [torch.ones(size), torch.ones(size)]
    where = size * 2 // 3
    tensors[1].view(torch.int32)[where] ^= 1 << 29
    found = run_ranks(
        *(lambda rank=rank: differing_element(tensors[rank], votes[rank].gather) for rank in range(2))
    )
    assert found[0] == found[1]
    position, bits = found[0]
    assert position == where
    assert [from_bits(one) for one in bits] == [element(one, where) for one in tensors]


@pytest.mark.parametrize(
    ("values", "ranks"),
    [
        ((1.0, 9.0), (1,)),  # rank 0 has the right value
        ((1.001, 9.0), (1,)),  # its gradients were wrong meanwhile
        ((1.001, 1.002), ()),
        ((1.001, math.nan), (1,)),
        ((math.inf, 1.5), (0,)),
        ((2.0, 0.0), ()),
    ],
)
def test_the_rank_that_is_far_from_the_repetition_was_wrong(
    values: tuple[float, ...], ranks: tuple[int, ...]
) -> None:
    """None is named if none is much further."""
    assert far_from(1.0, [to_bits(value) for value in values]) == ranks


def test_parameters_and_their_moments_are_held_in_common() -> None:
    """Not the state that an optimizer keeps by other keys, nor counters, nor what is spread over ranks."""
    model = torch.nn.Linear(2, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    names = [name for name, _ in tensors_in_common([model], [optimizer])]
    of_weight = ["weight", "exp_avg of weight", "exp_avg_sq of weight"]
    assert names == [*of_weight, *(name.replace("weight", "bias") for name in of_weight)]
    assert [name for name, _ in tensors_in_common([model, model], [SimpleNamespace(state={0: 1}), None])] == [
        "weight", "bias", "1.weight", "1.bias",
    ]  # fmt: skip
    model.bias = torch.nn.Parameter(torch.zeros(0))
    assert [name for name, _ in tensors_in_common([model], [])] == ["weight"]
