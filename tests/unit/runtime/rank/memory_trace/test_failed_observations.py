"""A trace that fails ends, says so once, and leaves the script alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from grpo_run.runtime.rank.memory_trace import tracer
from grpo_run.runtime.rank.memory_trace._census import Ledger
from grpo_run.runtime.rank.memory_trace._finding import TraceFinding
from grpo_run.runtime.rank.memory_trace._padding import PaddingWatch
from grpo_run.runtime.rank.memory_trace._sites import SiteRecorder


def fails(*_: Any) -> None:
    """An observation that meets what nobody thought of."""
    raise AttributeError("'_Holder' object has no attribute 'is_meta'")


@pytest.mark.parametrize(
    ("owner", "name"),
    [(PaddingWatch, "_count"), (Ledger, "observe"), (SiteRecorder, "_note")],
    ids=["a mask", "a census", "an operator"],
)
def test_the_script_goes_on_and_one_line_says_what_has_failed(
    monkeypatch: pytest.MonkeyPatch, no_history: Any, owner: type, name: str
) -> None:
    """What the script computes is what it computes without a trace, and no mode of ours stays active."""
    monkeypatch.setattr(tracer, "SHARE", 1e9)
    monkeypatch.setattr(owner, name, fails)

    class Model(torch.nn.Linear):
        """Takes a mask, as models of transformers do."""

        def __call__(self, values: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.linear(values, self.weight)

    found: list[TraceFinding] = []
    warnings: list[str] = []
    trace = tracer.MemoryTrace(found.append, no_history, warnings.append)
    trace.begin()
    trace.padding.watch(Model)
    model, kept = Model(4, 4), []
    try:
        for step in range(1, 12):
            values = torch.ones(4, 4)
            assert torch.equal(model(values, attention_mask=torch.ones(4, 4)), values @ model.weight.T)
            kept.append(torch.ones(64, 64))  # suspicious, so operators are watched
            trace.step_ended(step)
    finally:
        trace.end()
    assert not is_in_torch_dispatch_mode()
    assert len(warnings) == 1
    assert "--memory-trace has failed and ends; the run goes on: AttributeError: '_Holder'" in warnings[0]
    assert "test_failed_observations.py:" in warnings[0]


def test_what_the_script_itself_raises_reaches_it(no_history: Any) -> None:
    """Only looks are guarded."""

    class Model:
        """Fails as a script's model may."""

        def __call__(self) -> None:
            raise ValueError("the script's own")

    trace = tracer.MemoryTrace(pytest.fail, no_history, pytest.fail)
    trace.padding.watch(Model)
    model: Callable[[], None] = Model()
    with pytest.raises(ValueError, match="the script's own"):
        model()
