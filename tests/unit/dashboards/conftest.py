"""Fixtures that build slots and statuses of a run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.runtime.record.history import Checkpoint, History, Recovery
from grpo_run.runtime.record.status import RunStatus
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank


@pytest.fixture
def make_slot() -> Callable[..., Slot]:
    """Build the slot of a healthy rank at step 7, last updated at 995 s."""

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
def make_status() -> Callable[..., RunStatus]:
    """Build the status of a running run at step 7 of 100, with one recovered fault and the given slots.

    The other ranks wait for rank 0. A step takes 2 s.
    """

    def make(*slots: Slot | None, **changes: Any) -> RunStatus:
        history = History(
            run_id="night", state="running", step=7, target_steps=100, attempts=2, first_time=0.0,
            last_time=100.0, reward=0.5, warnings=3, failures_without_progress=1,
            checkpoint=Checkpoint(step=5, path="out/checkpoint-5", verified=True),
            snapshot_step=7,
            recoveries=[
                Recovery(
                    cause="signal", rank=1, step=6, action="restart", detection_seconds=0.25,
                    recovery_seconds=2.5, lost_steps=1,
                )
            ],
        )  # fmt: skip
        for step in range(8):
            history.steps.commit(0, step, 2.0 * step)
        fields: dict[str, Any] = {
            "run_id": "night", "state": "running", "sentence": "Running.", "history": history,
            "slots": slots, "supervisor_pid": 4711, "read_at_seconds": 1000.0,
            "awaited": AwaitedRank(
                rank=0, phase=Phase.generate, since_seconds=996.0, deadline_at_seconds=1056.0, busy=None,
                waiters=(1,),
            ),
        }  # fmt: skip
        return RunStatus(**(fields | changes))

    return make
