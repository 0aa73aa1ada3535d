"""A trace that fails ends, says so once, and leaves the script alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_run.runtime.features.memory_trace import _tracer


def fails(*_: Any) -> None:
    """An observation that meets what nobody thought of."""
    raise AttributeError("'_Holder' object has no attribute 'is_meta'")


def test_the_script_goes_on_and_one_line_says_what_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the script computes is what it computes without a trace."""
    monkeypatch.setattr(_tracer, "SHARE", 1e9)
    monkeypatch.setattr(_tracer, "find_holder", fails)
    warnings: list[str] = []
    trace = _tracer.MemoryTrace(pytest.fail, warnings.append)
    kept = []
    for step in range(1, 32):
        kept.append(torch.ones(64, 64) @ torch.ones(64, 64))
        assert torch.equal(kept[-1], torch.full((64, 64), 64.0))
        trace.step_ended(step)
    assert len(warnings) == 1
    assert "--memory-trace has failed and ends; the run goes on: AttributeError: '_Holder'" in warnings[0]
    assert "test_failed_observations.py:" in warnings[0]
