"""The private names of torch that a memory trace uses exist and mean what it needs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
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


def test_the_private_functions_of_the_cuda_allocator_take_these_arguments() -> None:
    """A torch without CUDA has their Python parts and the names of the others."""
    recording = inspect.signature(torch.cuda.memory._record_memory_history).parameters
    assert {"enabled", "context", "stacks", "max_entries"} <= set(recording)
    assert all(
        one.default is not one.empty
        for one in inspect.signature(torch.cuda.memory._snapshot).parameters.values()
    )
    stubs = Path(torch._C.__file__).with_name("_C") / "__init__.pyi"
    assert "def _cuda_isHistoryEnabled() -> _bool" in stubs.read_text()
    from torch._dynamo import trace_rules

    assert "torch._C._cuda_attach_out_of_memory_observer" in inspect.getsource(trace_rules)


def test_an_observer_is_attached_only_where_torch_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is called with four numbers."""
    attached: list[Any] = []
    called: list[None] = []
    monkeypatch.setattr(torch._C, "_cuda_attach_out_of_memory_observer", attached.append, raising=False)
    memory_names.CudaAllocator().observe_out_of_memory(lambda: called.append(None))
    attached[0](0, 1 << 20, 1 << 30, 0)
    assert called == [None]
    monkeypatch.delattr(torch._C, "_cuda_attach_out_of_memory_observer")
    memory_names.CudaAllocator().observe_out_of_memory(lambda: None)
    assert len(attached) == 1
