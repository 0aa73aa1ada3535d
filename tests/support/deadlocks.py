"""One long run with an injected deadlock every few steps, and one row of results for each.

A fault is addressed by kind, rank, step and phase.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from faults import fault

from support.runs import SCRIPTS, Runs
from support.trainer_and_loop import TRAINER

PHASES = (
    "data", "forward_backward", "score", "generate", "reward", "optimizer", "vote", "checkpoint",
)  # fmt: skip
"""Every phase of a training step. `eval` and `idle` are not part of one, and `startup` has no process group.
"""
FIRST_STEP, STEPS_APART = 8, 6
"""Even, like the saved steps, and far enough apart for a newer checkpoint and a few healthy steps between two
faults."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One fault and its verdict."""

    kind: str
    phase: str
    rank: int
    step: int
    detection_seconds: float
    verdict: dict[str, Any]

    @property
    def names_the_rank(self) -> bool:
        """Whether the one culprit is named, or none where the two ranks' records cannot tell which is
        wrong.
        """
        return bool(
            self.verdict["culprits"] == [self.rank]
            or (self.verdict["culprits"] == [] and "do not tell which" in self.verdict["sentence"])
        )


@dataclass(frozen=True, kw_only=True)
class Deadlock:
    """A fault to inject."""

    kind: str
    rank: int
    phase: str


def campaign(runs: Runs, faults: Sequence[Deadlock], *, ranks: int, name: str) -> list[Row]:
    """Run one script with these faults a few steps apart, and return a row for each."""
    steps = [FIRST_STEP + STEPS_APART * index for index in range(len(faults))]
    words = [
        word
        for one, step in zip(faults, steps, strict=True)
        for word in fault(one.kind, rank=one.rank, step=step, phase=one.phase)
    ]
    run = runs(
        *words, "--cleanup-every", "2", "--nproc-per-node", str(ranks), str(SCRIPTS / TRAINER),
        "--output-dir", f"{name}-out", "--max-steps", str(steps[-1] + 4), "--save-steps", "2",
        "--save-total-limit", "2", "--per-device-train-batch-size", "4", name=name,
    ).start().ended(timeout_seconds=60 + 15 * len(faults))  # fmt: skip
    rows = []
    incidents = run.events("incident")
    for one, step in zip(faults, steps, strict=True):
        injected = [e for e in run.events("fault_injected") if e["step"] == step]
        assert len(injected) == 1, (one, step, run.tail())
        found = [e for e in incidents if e["time"] > injected[0]["time"]][:1]
        assert found, (one, step, run.tail())
        rows.append(
            Row(
                kind=one.kind,
                phase=one.phase,
                rank=one.rank,
                step=step,
                detection_seconds=found[0]["detection_seconds"],
                verdict=json.loads((Path(found[0]["incident"]) / "verdict.json").read_text()),
            )
        )
    assert len(incidents) == len(faults), [e["sentence"] for e in incidents]
    return rows
