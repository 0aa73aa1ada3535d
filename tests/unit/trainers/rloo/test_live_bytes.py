"""The meter counts each live storage once, and raises torch's own error beyond its limit."""

from __future__ import annotations

import pytest
import torch

from grpo_run.trainers.rloo._live_bytes import LiveBytes
from grpo_run.watchdog.memory.error_patterns import recognize

FLOATS = 1 << 18
MIB = 1 << 20


def test_views_count_once_and_freed_tensors_no_more() -> None:
    meter = LiveBytes()
    with meter:
        with meter.phase("first"):
            held = torch.ones(FLOATS)
            view = held.view(2, -1)
            torch.ones(2 * FLOATS)
        with meter.phase("second"):
            total = view + 1
    assert meter.peaks["first"] == 3 * MIB
    assert meter.peaks["second"] == 2 * MIB == held.nbytes + total.nbytes
    assert meter.peak_bytes == 3 * MIB


def test_what_backward_passes_allocate_counts() -> None:
    meter = LiveBytes()
    weight = torch.ones(FLOATS, requires_grad=True)
    with meter:
        torch.autograd.backward((weight * 2).sum())
    assert meter.peak_bytes >= 2 * MIB
    assert weight.grad is not None


def test_the_series_keeps_the_highest_value_of_each_window() -> None:
    now = [0.0]
    meter = LiveBytes(clock=lambda: now[0])
    with meter, meter.phase("first"):
        torch.ones(FLOATS)
        now[0] = 1.0
        torch.ones(4)
    assert [(seconds, size, phase) for seconds, size, phase in meter.series if phase == "first"] == [
        (0.0, MIB, "first"), (1.0, 16, "first"),
    ]  # fmt: skip


def test_the_limit_raises_what_torch_raises_with_figures_that_are_understood() -> None:
    held = torch.ones(FLOATS)
    with (
        LiveBytes(limit_bytes=3 * MIB // 2),
        pytest.raises(torch.OutOfMemoryError, match=r"allocate 2.00 MiB") as caught,
    ):
        held.exp()
    assert "capacity of 1.50 MiB of which 1.50 MiB is free" in str(caught.value)
    assert recognize(["torch.OutOfMemoryError"], str(caught.value)) is not None
