"""What ranks report of exhausted memory, see the text file; and real tracebacks of torch."""

from __future__ import annotations

import traceback

import pytest
import torch
from support.builders.watchdog.report_shell import ReportShell
from support.transcripts import Story, stories

from grpo_run.watchdog.memory.shortage import Figures, MemoryPhase, described_in, memory_phase, usage_in
from grpo_run.watchdog.observation import Phase

STEP = (Phase.forward_backward,)


@stories(__file__, "reports.txt")
def test_reports(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(ReportShell(), word)


def test_a_verdict_without_figures_or_shortage_is_not_described() -> None:
    """Another release may have written it with values of other types."""
    assert described_in({"shortage": None}) == usage_in({"shortage": None}) == described_in({}) == ""
    assert Figures.from_json({"tried_bytes": "2", "free_bytes": 3}) == Figures(free_bytes=3)


def test_a_real_backward_pass_is_told_from_a_forward_pass() -> None:
    """torch's own frames, whatever this release calls them."""

    def fail(gradient: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    weight = torch.ones(3, requires_grad=True)
    loss = (weight * 2).sum()
    loss.register_hook(fail)
    run = loss.backward
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run()
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.backward

    class Model(torch.nn.Module):
        def forward(self, value: torch.Tensor) -> torch.Tensor:
            fail(None)
            return value

    with pytest.raises(torch.OutOfMemoryError) as raised:
        Model()(weight)
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.forward


def test_a_real_optimizer_step_is_told_from_a_backward_pass() -> None:
    """The board may still show the phase of both passes, as under DeepSpeed."""

    class Failing(torch.optim.SGD):
        def step(self, closure: object = None) -> None:  # type: ignore[override]
            raise torch.OutOfMemoryError("CUDA out of memory.")

    weight = torch.ones(3, requires_grad=True)
    run = Failing([weight]).step
    with pytest.raises(torch.OutOfMemoryError) as raised:
        run()
    assert memory_phase(STEP, "".join(traceback.format_exception(raised.value))) is MemoryPhase.optimizer
