"""Descriptions of calls of collectives, with real frames and tensors."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType

import torch

from grpo_run.runtime.board.collective_log import Description
from grpo_run.runtime.rank.collective_recorder import CallDescriptions


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


def test_a_function_at_the_address_of_a_freed_one_is_another_caller() -> None:
    """Code objects are told apart by their address, so each that was seen is kept."""
    calls = CallDescriptions()
    tensor = torch.ones(3)
    texts = set()

    def template(describe: Callable[[], Description]) -> Description:
        return describe()

    for number in range(200):
        code = template.__code__.replace(co_filename=f"/script/{number}.py")
        call = FunctionType(code, globals())
        texts.add(call(lambda: calls.describe("0", "allreduce", [tensor], sys._getframe(1))).texts)
        del code, call
    assert len(texts) == 200
