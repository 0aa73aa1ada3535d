"""Descriptions of calls of collectives, with real frames and tensors."""

from __future__ import annotations

import sys
from types import FunctionType
from typing import Any

import torch

from grpo_run.runtime.rank.collective_recorder import CallDescriptions


def test_a_call_that_was_described_is_not_encoded_again() -> None:
    """Another size or operation is. A script that pads each batch to another length fills no memory."""
    calls = CallDescriptions(capacity=10)
    tensors = [torch.ones(3), torch.ones(3), torch.ones(4)]
    first, second, third = (calls.describe("0", "allreduce", [one], sys._getframe()) for one in tensors)
    assert first is second
    assert first is not third
    assert len(calls) == 2
    for length in range(100):
        calls.describe("0", "allreduce", [torch.ones(length)], sys._getframe())
    assert len(calls) <= 10


def test_functions_of_different_files_or_lines_are_different_callers() -> None:
    """Also if one is at the address of another that was freed."""
    calls, tensor = CallDescriptions(), torch.ones(3)

    def template(describe: Any) -> Any:
        return describe()

    texts = set()
    for number in range(200):
        code = template.__code__.replace(co_filename=f"/script/{number % 100}.py", co_firstlineno=1 + number)
        description = FunctionType(code, globals())(
            lambda: calls.describe("0", "allreduce", [tensor], sys._getframe(1))
        )
        texts.add((description.texts, description.line))
        del code
    assert len(texts) == 200
