"""Fixtures that several packages' tests share."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.watchdog.slots import make_slot

from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.watchdog.observation import Slot


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Let torch compute in one thread: those of several workers would wait for each other on the same
    cores.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


@pytest.fixture
def here(tmp_path: Path, make_folder: Callable[[], Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory: `train.py` in it, no runs, also none of other tests in the user's registry."""
    monkeypatch.setenv("XDG_STATE_HOME", str(make_folder()))
    for name in list(os.environ):
        if name.startswith(("ACCELERATE_", "FSDP_", "OMP_")):
            monkeypatch.delenv(name)
    (tmp_path / "train.py").write_text("print('training')\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., RunConfig]:
    """Configuration of run-1, with its directory in `tmp_path`; keyword arguments replace fields."""

    def make(**changes: Any) -> RunConfig:
        fields: dict[str, Any] = {
            "run_id": "run-1", "run_directory": tmp_path, "target": "train.py", "module": False,
            "arguments": (), "command": ("train.py",), "cleanup_every": 0,
        }  # fmt: skip
        return RunConfig(**(fields | changes))

    return make


@pytest.fixture
def make_settings(tmp_path: Path, make_config: Callable[..., RunConfig]) -> Callable[..., RankSettings]:
    """Settings of a rank in the first attempt of run-1.

    Keyword arguments replace fields, the configuration's too.
    """

    def make(**changes: Any) -> RankSettings:
        own = {name: changes.pop(name) for name in list(changes) if name in RankSettings.model_fields}
        fields: dict[str, Any] = {
            "config": make_config(**changes), "attempt": 0, "run_started_at": 1000.0,
            "log": str(tmp_path / "rank0.log"), "stacks": str(tmp_path / "rank0.stacks"),
            "socket": str(tmp_path / "rank0.sock"),
            "error": str(tmp_path / "rank0.error.json"), "preloaded": True, "parent_pid": 1, "title": "rank",
        }  # fmt: skip
        return RankSettings(**(fields | own))

    return make


@pytest.fixture(name="make_slot")
def _make_slot() -> Callable[..., Slot]:
    """A slot of a rank in its first `train()` call, at step 7 of 100, in `generate` inside `data`."""
    return make_slot
