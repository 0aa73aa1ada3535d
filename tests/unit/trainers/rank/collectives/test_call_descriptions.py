"""Descriptions of calls of collectives, with real frames and tensors."""

from __future__ import annotations

import sys

import torch

from grpo_run.trainers.rank.collectives.call_descriptions import CallDescriptions


def test_a_call_that_was_described_is_not_encoded_again() -> None:
    """Another size or operation is."""
    calls = CallDescriptions()
    tensors = [torch.ones(3), torch.ones(3), torch.ones(4)]
    first, second, third = (calls.describe("0", "allreduce", [one], sys._getframe()) for one in tensors)
    assert first is second
    assert first is not third
    assert len(calls) == 2


def test_many_sizes_do_not_grow_the_memory() -> None:
    """A script pads each batch to another length."""
    calls = CallDescriptions(capacity=10)
    for length in range(100):
        calls.describe("0", "allreduce", [torch.ones(length)], sys._getframe())
    assert len(calls) <= 10
