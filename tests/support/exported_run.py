"""A run directory as a supervisor writes it, with a value for everything that is exported."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.board.memory_area import MemoryAreaWriter
from grpo_run.runtime.features.masking.events import MaskingReason
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.runtime.memory.host_last_sample import LastSample
from grpo_run.watchdog.memory.host_sample import GpuSample, HostSample, LimitUse, ProcessMemory
from grpo_run.watchdog.observation import Phase, RankState
from grpo_run.watchdog.rank_metrics import LOGGED_FIELDS
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from support.journal import event


def fill_memory(area: MemoryAreaWriter) -> None:
    """Publish memory of a rank with a GPU of 80 GiB; every figure has a value."""
    totals, own = area.totals, area.figures(Phase.generate)
    for name in set(totals.__slots__) - {"phases"}:
        setattr(totals, name, 2**30)
    totals.has_device, totals.capacity_bytes, totals.retries, totals.ooms = 1, 80 * 2**30, 3, 1
    own.peak_allocated_bytes, own.peak_resident_bytes = 60 * 2**30, 9 * 2**30
    area.publish(Phase.generate)


HOST_SAMPLE = HostSample(
    at=time.time(),
    limits=(
        LimitUse(
            name="the machine", limit_bytes=64 << 30, usage_bytes=40 << 30, working_set_bytes=30 << 30,
            shared_bytes=1 << 30
        ),
    ),
    ranks={0: ProcessMemory(anonymous_bytes=5 << 30, file_bytes=1 << 30, shared_bytes=1 << 20)},
    data_workers_bytes=1 << 30,
    other_helpers_bytes=1 << 20,
    supervisor_bytes=1 << 28,
    staging_bytes=1 << 30,
    shm_used_bytes=1 << 30,
    shm_total_bytes=32 << 30,
    full_pressure=0.01,
    kills=0,
    gpus=(
        GpuSample(
            index=0, utilization=0.9, used_bytes=70 << 30, total_bytes=80 << 30, temperature_celsius=88,
            power_watts=650.5, throttled=("thermal",), uncorrected_errors=1,
        ),
        GpuSample(index=1, observable=False),
    ),
)  # fmt: skip
"""Host memory of a machine of 64 GiB and two GPUs, one of them lost; every figure has a value."""


class ExportedRun:
    """A run directory as a supervisor with two ranks writes it in the middle of a run.

    Rank 0 is generating at step 8; rank 1 was restarted and has not written to the board yet, and is waited
    for.

    Args:
        folder: of the runs.
        run_id: of this one.
        eventful: nobody is waited for, rank 0 reports all that it can, and everything that is counted can be
            counted on.
    """

    def __init__(self, folder: Path, run_id: str, *, eventful: bool = False) -> None:
        self.directory = RunDirectory(path=folder / run_id)
        self.directory.create()
        self.directory.write_run({"run_id": run_id})
        self.broken = False
        self._checkpoint = 6
        self._lock = self.directory.acquire()
        self._reader = run_reader(self.directory)
        self._journal = Journal(self.directory.journal, run_id)
        self.board = Board.create(self.directory.board, 2)
        self._write_history()
        self.board.begin_attempt(1)
        self._eventful = eventful
        slot = self._slot = self.board.writer(0, rank=0, pid=os.getpid(), attempt=1)
        slot.state = RankState.training
        slot.train_call, slot.target_steps, slot.voted_step, slot.votes = 1, 50, 8, 3
        slot.tokens_generated, slot.vote_wait_seconds = 4096, 1.25
        slot.prompt_tokens, slot.prompt_length, slot.ended_eos = 512.0, 64.0, 8.0
        slot.log({"loss": 0.5})
        if eventful:
            slot.log(dict.fromkeys(LOGGED_FIELDS, 0.75))
            self._write_rare_events()
        slot.replace(Phase.data)
        slot.enter(Phase.generate)
        slot.publish()
        fill_memory(slot.memory_area)
        LastSample(self.directory.host_memory).write(HOST_SAMPLE)
        now = time.monotonic()
        if not eventful:
            self.board.write_awaited(
                AwaitedRank(
                    rank=0, phase=Phase.generate, since_seconds=now, deadline_at_seconds=now + 600.0,
                    busy=None, waiters=(1,)
                )
            )  # fmt: skip

    def _write(self, name: str, **fields: Any) -> None:
        self._journal.write(event(name, **fields))

    def _write_history(self) -> None:
        write = self._write
        write("run_started")
        self._journal.attempt = 0
        write("attempt_started")
        write("train_started", rank=0, step=0, train_call=1, target_steps=50)
        for step in range(1, 8):
            write("step_committed", step=step, train_call=1)
            write("step_logged", rank=0, step=step, reward=step / 8)
        write(
            "checkpoint_published", step=6, train_call=1, path="out/checkpoint-6", verified=True,
            size_bytes=2**30, seconds=2.5,
        )  # fmt: skip
        write("incident", step=7, cause="signal", culprit=1, detection_seconds=0.25, signature="9")
        write("action", action="restart")
        self._journal.attempt = 1
        write("attempt_started")
        write("train_started", rank=0, step=6, train_call=1, target_steps=50)
        for step in (7, 8):
            write("step_committed", step=step, train_call=1)
            write(
                "step_logged",
                rank=0,
                step=step,
                reward=step / 8,
                reward_functions={"length": {"mean": step / 4, "std": 0.5}},
            )
        write("state_changed", to="running")

    def _write_rare_events(self) -> None:
        write = self._write
        write("checkpoint_staged", step=8, train_call=1)
        write("guard_tripped", step=8, guard="nonfinite", response="roll-back")
        write("rollout_server_started", pid=os.getpid(), port=8000, log="rollout-server.log")
        write("rollout_server_ready", seconds=9.0)
        write("memory_short", step=8)

    def count_on(self) -> None:
        """Let everything happen once more that is counted while a run goes on."""
        write = self._write
        write("sample_masked", rank=0, step=8, reason=MaskingReason.failed.value, count=1)
        write("incident", step=8, cause="signal", culprit=1, detection_seconds=0.25, signature="9")
        write("action", action="restart")
        write("rollout_weights_sent", rank=0, step=8, version="8", seconds=0.5)
        write("rollout_made", rank=0, step=8, samples=8, origin="meant")
        self._checkpoint += 1
        write("checkpoint_published", step=self._checkpoint, train_call=1, path="out", verified=True)
        write("state_changed", to="running")
        self._slot.ended_eos += 1
        self._slot.publish()

    def read(self) -> RunStatus:
        """Read the status of the directory, like a reader outside the supervisor."""
        if self.broken:
            raise OSError("the run directory cannot be read")
        positions = {0: {"0": (12, 12), "1": (3, 3)}, 1: {"0": (12, 10), "1": (3, 3)}}
        return replace(self._reader.read(), collectives=positions)

    def close(self) -> None:
        """Release the lock."""
        os.close(self._lock)
