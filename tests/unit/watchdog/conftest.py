"""Factories for slots, errors and exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.watchdog.observation import Exit, OpenPhase, Phase, RankError, RankState, Slot


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
            "votes": 7, "vote_wait_seconds": 1.5, "hygiene_runs": 2, "hygiene_seconds": 0.25,
            "checkpoint_step": 5, "checkpoint_seconds": 0.5, "reward": 0.5, "completion_length": 128.0,
            "loss": 0.125, "grad_norm": 2.0, "learning_rate": 1e-6,
        }  # fmt: skip
        return Slot(**(fields | changes))

    return make


@pytest.fixture
def make_error() -> Callable[..., RankError]:
    """An exception of the user's script, raised at wall time 1000 s."""

    def make(**changes: Any) -> RankError:
        fields: dict[str, Any] = {
            "type": "ZeroDivisionError",
            "message": "division by zero",
            "traceback": "Traceback (most recent call last): ...",
            "location": ("/home/user/train.py", 12, "reward"),
            "wall_time": 1000.0,
        }
        return RankError(**(fields | changes))

    return make


@pytest.fixture
def make_exit() -> Callable[..., Exit]:
    """A rank that exited first, with code 1."""

    def make(rank: int, **changes: Any) -> Exit:
        fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": 0}
        if changes.get("signal") is not None:
            fields["exit_code"] = None
        return Exit(**(fields | changes))

    return make
