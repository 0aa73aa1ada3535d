"""State that the calls of one attempt share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.rank.step.guard import AttemptState


def test_calls_are_numbered_from_1(session: Any, tmp_path: Path) -> None:
    """The number identifies a call in manifests and in the journal."""
    guard = AttemptState(session)
    calls = [guard.begin_call("GRPOTrainer", tmp_path / name) for name in ("a", "b")]
    assert [(call.ordinal, call.trainer_class) for call in calls] == [
        (1, "GRPOTrainer"), (2, "GRPOTrainer"),
    ]  # fmt: skip
    assert session.notified == []


def test_two_calls_with_one_output_directory_are_warned_of(session: Any, tmp_path: Path) -> None:
    """The paths may be spelled differently."""
    guard = AttemptState(session)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    guard.begin_call("GRPOTrainer", tmp_path / "out")
    guard.begin_call("GRPOTrainer", tmp_path / "link")
    (warning,) = session.notified
    assert "was used by an earlier train() call" in warning


def test_snapshots_are_created_once(session: Any, tmp_path: Path) -> None:
    """They require a staging directory."""
    assert AttemptState(session).snapshots is None
    session.config = replace(session.config, snapshot_directory=tmp_path / "memory")
    guard = AttemptState(session)
    assert guard.snapshots is not None
    assert guard.snapshots is guard.snapshots
