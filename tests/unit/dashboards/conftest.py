"""Fixtures that build slots and statuses of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from support.journal import event

from grpo_run.runtime.history.events import CheckpointPublished
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Checkpoint, Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.history.wall_states import WallStates
from grpo_run.runtime.launching.reading import history_parts
from grpo_run.watchdog.memory.host_sample import GpuSample, HostSample, LimitUse, ProcessMemory
from grpo_run.watchdog.memory.phase_memory import PhaseMemory, RankMemory
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Histogram


def measured(rank: int) -> RankMemory:
    """What a rank with a GPU has measured: 70 GiB at most, in forward and backward passes."""
    gib = 2**30
    phases = {
        phase: PhaseMemory(
            readings=7, peak_allocated_bytes=highest * gib, peak_reserved_bytes=(highest + 1) * gib,
            allocated_bytes=20 * gib, reserved_bytes=75 * gib, inactive_split_bytes=2 * gib, retries=1,
            peak_resident_bytes=(3 + rank) * gib, resident_bytes=2 * gib,
        )
        for phase, highest in zip(
            Phase, (20, 21, 60, 20, 50, 70, 65, 20, 20, 40, 20, 20, 20, 20), strict=True
        )
    }  # fmt: skip
    return RankMemory(
        has_device=True, capacity_bytes=80 * gib, readings=91, spent_ns=5 * 10**8, allocated_bytes=20 * gib,
        reserved_bytes=75 * gib, inactive_split_bytes=2 * gib, resident_bytes=2 * gib,
        peak_allocated_bytes=70 * gib, peak_reserved_bytes=75 * gib, retries=13, ooms=2, released_bytes=0,
        freed_bytes=0, phases=phases,
    )  # fmt: skip


def sampled(ranks: Iterable[int]) -> HostSample:
    """A sample of the host's memory, with every figure known."""
    rank = ProcessMemory(anonymous_bytes=40, file_bytes=30, shared_bytes=20, pinned_bytes=10)
    limit = LimitUse(name="the memory cgroup /job", limit_bytes=1000, usage_bytes=900, working_set_bytes=800)
    return HostSample(
        at=199.0, limits=(limit,), ranks=dict.fromkeys(ranks, rank), data_workers_bytes=1,
        other_helpers_bytes=2,
        supervisor_bytes=3, staging_bytes=4, shm_used_bytes=5, shm_total_bytes=6, full_pressure=0.25,
        gpus=(
            GpuSample(
                index=0, utilization=0.9, used_bytes=70, total_bytes=80, temperature_celsius=60,
                power_watts=650.5, throttled=("power",), uncorrected_errors=1,
            ),
        ),
    )  # fmt: skip


@pytest.fixture
def make_status() -> Callable[..., RunStatus]:
    """Build the status of a running run at step 7 of 100, with one recovered fault and the given slots.

    The other ranks wait for rank 0. A step takes 2 s.
    """

    def make(*slots: Slot | None, **changes: Any) -> RunStatus:
        history = History(
            run_id="night", state="running", step=7, target_steps=100, attempts=2,
            wall=WallStates(first=0.0, last=100.0), parts=tuple(history_parts()),
            reward=0.5, warnings=3,
            checkpoint=Checkpoint(step=5, path="out/checkpoint-5", verified=True),
            snapshot_step=7,
            recoveries=[
                Recovery(
                    cause="signal", rank=1, step=6, action="restart", detection_seconds=0.25,
                    recovery_seconds=2.5, lost_steps=1,
                )
            ],
        )  # fmt: skip
        history.rewards.logged["length"] = {"mean": 0.5, "std": 0.25}
        for one in (
            event("growth_found", phase="generate", factor=1.4, sentence="steps get slower"),
            event("rollout_server_started", pid=4712, port=8000, log="rollout-server.log"),
        ):
            for part in history.parts:
                if isinstance(one, part.EVENTS):
                    part.apply(one)
        for step in range(8):
            history.steps.commit(0, step, 2.0 * step)
        published = CheckpointPublished(step=6, path="out", time=90.0, size_bytes=2**20, seconds=3.0)
        history.checkpoints.apply_published(published)
        fields: dict[str, Any] = {
            "run_id": "night", "state": "running", "sentence": "Running.", "history": history,
            "slots": slots, "supervisor_pid": 4711, "read_at_seconds": 1000.0,
            "memory": tuple(measured(slot.rank) if slot is not None else None for slot in slots),
            "host_memory": sampled([slot.rank for slot in slots if slot is not None]),
            "phases": tuple({Phase.generate: Histogram().with_value(8.0)} for _ in slots),
            "awaited": AwaitedRank(
                rank=0, phase=Phase.generate, since_seconds=996.0, deadline_at_seconds=1056.0, busy=None,
                waiters=(1,),
            ),
            "collectives": {0: {"0": (9, 8)}, 1: {"0": (9, 7)}},
        }  # fmt: skip
        return RunStatus(**(fields | changes))

    return make
