"""The private names of torch that a memory trace uses exist and mean what it needs."""

from __future__ import annotations

import torch

from grpo_run.runtime.upstream import memory_names


def test_saved_tensors_are_read_without_unpacking() -> None:
    """Of operators and of custom functions; nothing is left after a backward pass."""

    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, value: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(value)  # type: ignore[attr-defined]
            return value * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return gradient * 2

    value = torch.zeros(8, requires_grad=True)
    own, doubled = value.exp(), Double.apply(value)
    assert [one.shape for one in memory_names.saved_by(own.grad_fn)] == [(8,)]
    assert [one.shape for one in memory_names.saved_by(doubled.grad_fn)] == [(8,)]
    (own + doubled).sum().backward()
    assert list(memory_names.saved_by(own.grad_fn)) == []
    assert list(memory_names.saved_by(doubled.grad_fn)) == []


def test_the_innermost_dispatch_mode_is_known() -> None:
    """None without one."""
    from torch.utils.flop_counter import FlopCounterMode

    assert memory_names.current_dispatch_mode() is None
    with FlopCounterMode(display=False):
        assert memory_names.current_dispatch_mode() is not None
