"""When padding is reported: columns that no row of any batch uses, not that of short rows to a long one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace._padding import Padded, PaddingWatch, wasteful


class Model:
    """Is called with a mask, as a model of transformers."""

    def __call__(self, input_ids: torch.Tensor, **kwargs: Any) -> None:
        """Do nothing."""


def watched(batches: list[tuple[int, int, int]], steps: int, *, rollouts: int = 0) -> Padded | None:
    """What is found when each step has these batches: rows, width, and the length of the longest row.

    The other rows have half of it.
    """
    reached: list[int] = []

    class Watched(Model):
        pass

    watch = PaddingWatch(lambda: len(reached), lambda key: None)
    watch.watch(Watched)
    while len(reached) < steps:
        reached.append(1)
        for rows, width, longest in batches:
            mask = torch.zeros(rows, width, dtype=torch.long)
            mask[:, : longest // 2] = 1
            mask[0, :longest] = 1
            Watched()(torch.zeros_like(mask), attention_mask=mask)
    return watch.found(rollouts)


def test_padding_to_the_longest_possible_is_found() -> None:
    """With the share of real tokens."""
    found = watched([(8, 1024, 174)] * 2, 5)
    assert found is not None
    assert (found.width, found.longest, found.batches) == (1024, 174, 10)
    assert 0 < found.share < 0.2


@pytest.mark.parametrize(
    ("batches", "steps", "rollouts"),
    [
        ([(64, 1024, 1024)] * 2, 20, 0),
        ([(8, 1024, 174)] * 20, 4, 0),
        ([(4, 16, 7)] * 2, 20, 0),
        ([(2, width, 30) for width in range(100, 160, 10)], 10, 0),
        ([(2, 512, 100)] * 2, 10, 1),
    ],
    ids=["to the longest row", "in four steps", "to a multiple of 8", "of many widths", "of one rollout"],
)
def test_other_padding_is_not(batches: list[tuple[int, int, int]], steps: int, rollouts: int) -> None:
    """Few columns are lost, or the longest row may be in another micro-batch, or may still come."""
    assert watched(batches, steps, rollouts=rollouts) is None


def test_padding_of_many_rollouts_is_found() -> None:
    assert watched([(2, 512, 100)] * 2, 10, rollouts=5) is not None


def test_a_decoding_step_does_not_count() -> None:
    """Its mask is longer than its input."""
    watch = PaddingWatch(lambda: 1, lambda key: None)

    class Watched(Model):
        pass

    watch.watch(Watched)
    for _ in range(20):
        Watched()(torch.zeros(2, 1), attention_mask=torch.zeros(2, 512))
    assert watch.found(0) is None
    assert wasteful([], rollouts=None) is None
