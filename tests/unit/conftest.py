"""Fixtures that several packages' tests share."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    """Let torch compute in one thread: those of several workers would wait for each other on the same
    cores.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)


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


@pytest.fixture
def make_slot() -> Callable[..., Slot]:
    """A slot of a rank in its first `train()` call, at step 7 of 100, in `generate` inside `data`."""

    def make(rank: int, **changes: Any) -> Slot:
        fields: dict[str, Any] = {
            "rank": rank, "local_rank": rank, "pid": 100 + rank, "attempt": 0, "state": RankState.training,
            "phases": (
                OpenPhase(phase=Phase.data, since_seconds=980.0),
                OpenPhase(phase=Phase.generate, since_seconds=990.0),
            ),
            "train_call": 1, "step": 7, "target_steps": 100, "voted_step": 7, "voted_at_seconds": 979.0,
            "committed_step": 7, "train_started_seconds": 900.0, "resumed_step": 0,
            "last_progress_seconds": 995.0, "writes": 50, "tokens_generated": 4096, "rewards_scored": 64,
            "votes": 7, "vote_wait_seconds": 1.5, "cleanup_runs": 2, "cleanup_seconds": 0.25,
            "checkpoint_step": 5, "checkpoint_seconds": 0.5,
        }  # fmt: skip
        logged = {
            "reward": 0.5, "completion_length": 128.0, "loss": 0.125, "grad_norm": 2.0, "learning_rate": 1e-6,
            "reward_std": 0.25, "zero_variance_groups": 0.5, "truncated_completions": 0.125, "kl": 0.01,
            "entropy": 1.5,
            "clip_ratio": 0.0,
        }  # fmt: skip
        logged |= {field: changes.pop(field) for field in LOGGED_FIELDS if field in changes}
        values = tuple(logged.get(field, math.nan) for field in LOGGED_FIELDS)
        return Slot(logged=values, **(fields | changes))

    return make
