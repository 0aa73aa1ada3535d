"""What `grpo-run plan` prints of a prediction; see `plan_output.txt`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from support.builders.command_shell import leaves
from support.predictions import GIB, a_prediction, a_report
from support.transcripts import Story, stories

from grpo_run.cli.planning.output import print_plan, verdict
from grpo_run.cli.planning.report import as_json
from grpo_run.runtime.planning.prediction import PredictedPhase

MIB = 1 << 20


class PlanShell:
    """Predictions written out by hand, and what is printed of them."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def plan(self, **changes: Any) -> str:
        """What is printed of a report with these changes, and the widest line."""
        print_plan(a_report(**changes))
        text = self.capsys.readouterr().out
        lines = [line for line in text.splitlines() if line.strip()]
        return "\n".join([*lines, f"({max(map(len, lines))} columns)"])

    def plan_json(self) -> str:
        """The report as JSON."""
        return "\n".join(f"{way} {one!r}" for way, one in leaves(as_json(a_report())))

    def verdict(self, gpu: str) -> str:
        """Whether the job fits into so many GiB."""
        return verdict(a_report(gpu_bytes=int(float(gpu) * GIB)))

    def small(self) -> str:
        """A job of a few MiB."""
        held = {"weights": 3.0 * MIB, "activations": 1.5 * MIB}
        size = 4.5 * MIB
        memory = PredictedPhase(traced=held, allocated_bytes=size, low_bytes=size, high_bytes=size)
        return self.plan(prediction=a_prediction(phases={"backward": memory}, terms=[]))

    def adapter(self, trained: str) -> str:
        """A job that trains so many parameters of an adapter."""
        job = replace(a_prediction().job, lora_rank=8)
        return self.plan(prediction=a_prediction(job=job, trained_parameters=int(trained)))

    def sft(self) -> str:
        """A job of SFT."""
        job = replace(a_prediction().job, algorithm="sft", prompt=0, completion=1024)
        return self.plan(prediction=a_prediction(job=job))


@stories(__file__, "plan_output.txt")
def test_output(story: Story, word: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every story of the file."""
    story.check(PlanShell(capsys), word)
