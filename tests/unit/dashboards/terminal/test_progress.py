"""The progress line of `grpo-run launch`."""

from __future__ import annotations

from typing import Any

import pytest

from grpo_run.dashboards.terminal.progress import count, progress_line
from grpo_run.runtime.record.history import Checkpoint, History, Recovery
from grpo_run.runtime.record.status import RunStatus


def status(state: str = "running", ranks: int = 2, **fields: Any) -> RunStatus:
    """A run with these fields in its history."""
    return RunStatus(
        run_id="night", state=state, sentence="", history=History(**fields), slots=(None,) * ranks, supervisor_pid=1
    )  # fmt: skip


def test_nothing_is_shown_before_the_first_step() -> None:
    """No step has been committed yet."""
    assert progress_line(status()) == ""


def recovery(seconds: float | None) -> Recovery:
    """A fault, recovered or not."""
    return Recovery(cause="signal", rank=1, step=7, action="restart", recovery_seconds=seconds)


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"step": 7}, "step 7 · 2 ranks"),
        ({"step": 7, "target_steps": 40}, "step 7/40 · 2 ranks"),
        ({"step": 7, "reward": 0.5236, "loss": 0.1}, "step 7 · reward 0.524 · 2 ranks"),
        ({"step": 7, "loss": 2.25}, "step 7 · loss 2.250 · 2 ranks"),
        ({"step": 7, "snapshot_step": 6}, "step 7 · 2 ranks · snapshot 6"),
        (
            {"step": 7, "checkpoint": Checkpoint(step=5, path="x", verified=True)},
            "step 7 · 2 ranks · checkpoint 5",
        ),
        (
            {"step": 7, "snapshot_step": 6, "checkpoint": Checkpoint(step=5, path="x", verified=True)},
            "step 7 · 2 ranks · snapshot 6",
        ),
        (
            {"step": 7, "snapshot_step": 4, "checkpoint": Checkpoint(step=5, path="x", verified=True)},
            "step 7 · 2 ranks · checkpoint 5",
        ),
        ({"step": 7, "train_call": 2, "snapshot_step": 50}, "step 7 · 2 ranks"),
        (
            {
                "step": 7,
                "train_call": 2,
                "checkpoint": Checkpoint(step=5, path="x", verified=True, train_call=1),
            },
            "step 7 · 2 ranks",
        ),
        ({"step": 7, "recoveries": [recovery(None)]}, "step 7 · 2 ranks"),
        ({"step": 7, "recoveries": [recovery(1.0)]}, "step 7 · 2 ranks · 1 fault recovered"),
        ({"step": 7, "recoveries": [recovery(1.0)] * 2}, "step 7 · 2 ranks · 2 faults recovered"),
    ],
)
def test_every_known_fact_is_shown(fields: dict[str, Any], line: str) -> None:
    """Steps, the last reward or else the loss, ranks, snapshot, checkpoint and faults."""
    assert progress_line(status(**fields)) == line


@pytest.mark.parametrize("state", ["suspect", "collecting", "recovering", "stopping"])
def test_the_line_says_why_training_stands_still(state: str) -> None:
    """A state other than running is named first."""
    line = progress_line(status(state, step=7))
    assert line.endswith("step 7 · 2 ranks")
    assert not line.startswith("step")


def test_the_line_fits_80_columns() -> None:
    """The line has every fact and large numbers."""
    line = progress_line(
        status(
            step=12345, target_steps=20000, reward=-0.5, snapshot_step=12340, recoveries=[recovery(1.0)] * 2,
            checkpoint=Checkpoint(step=12000, path="x", verified=True),
        )
    )  # fmt: skip
    assert len(line) <= 80


def test_one_is_singular() -> None:
    """`1 rank`, `2 ranks`."""
    assert (count(1, "rank"), count(2, "rank"), count(0, "step")) == ("1 rank", "2 ranks", "0 steps")
