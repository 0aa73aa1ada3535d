"""State that the calls of one attempt share."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_run.runtime.rank.step.guard import AttemptState


def test_two_calls_with_one_output_directory_are_warned_of(session: Any, tmp_path: Path) -> None:
    """The paths may be spelled differently."""
    guard = AttemptState(session)
    (tmp_path / "link").symlink_to(tmp_path / "out")
    guard.begin_call("GRPOTrainer", tmp_path / "out")
    guard.begin_call("GRPOTrainer", tmp_path / "link")
    (warning,) = session.notified
    assert "was used by an earlier train() call" in warning
