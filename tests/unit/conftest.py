"""Fixtures that several packages' tests share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.launch.rank_settings import RankSettings


@pytest.fixture
def make_settings(tmp_path: Path) -> Callable[..., RankSettings]:
    """Settings of a rank in the first attempt of run-1."""

    def make(**changes: Any) -> RankSettings:
        fields: dict[str, Any] = {
            "run_id": "run-1", "run_directory": str(tmp_path), "target": "train.py", "module": False,
            "arguments": (), "attempt": 0, "first_attempt": True, "run_started_at": 1000.0,
            "log": str(tmp_path / "rank0.log"), "stacks": str(tmp_path / "rank0.stacks"),
            "socket": str(tmp_path / "rank0.sock"),
            "error": str(tmp_path / "rank0.error.json"), "preloaded": True, "parent_pid": 1, "title": "rank",
        }  # fmt: skip
        return RankSettings(**(fields | changes))

    return make
