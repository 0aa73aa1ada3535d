"""Kill all processes of a run at once, and read what the next attempt can resume from."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.publishing import clean_partial_directories
from grpo_run.runtime.checkpoints.search import find_candidates, snapshot_directories
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.ownership import recorded_areas
from support.runs import Run, alive, descendants, special

PATCHED = special("patched")
"""`Run(program=PATCHED)` reads its drain timeouts from TEST_DRAINS."""
GONE_SECONDS = 20.0


def processes(run: Run) -> list[int]:
    """Return the pids of supervisor, forkserver, ranks and drain worker."""
    return [run.process.pid, *descendants(run.process.pid)]


def kill_all(run: Run) -> None:
    """Send SIGKILL to every process at once; return when all have exited."""
    pids = processes(run)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    run.process.wait(GONE_SECONDS)
    deadline = time.monotonic() + GONE_SECONDS
    while left := alive(pids):
        assert time.monotonic() < deadline, f"processes {left} survive SIGKILL"
        time.sleep(0.01)


def memory_of(run: Run) -> Path:
    """Return the staging directory of a run; a finished run removes it."""
    (path, *_) = recorded_areas(json.loads((run.directory / "run.json").read_text()))
    return path


@dataclass(frozen=True, kw_only=True)
class RemainingState:
    """Steps of a run's newest snapshot, newest verified checkpoint and highest committed step."""

    snapshot: int
    durable: int
    committed: int

    @property
    def newest(self) -> int:
        return max(self.snapshot, self.durable)


def remaining_state(run: Run, output: Path) -> RemainingState:
    """Read a run without processes; every checkpoint and snapshot on disk must verify."""
    directories = (output, *snapshot_directories(output))
    for directory in directories:
        clean_partial_directories(directory)
    durable = 0
    for candidate in find_candidates(*directories):
        assert candidate.manifest is not None, f"{candidate.path}: {candidate.problem}"
        verify_digests(candidate.path, candidate.manifest.files)
        durable = max(durable, candidate.step)
    snapshots = StagingArea(memory_of(run)).snapshots()
    committed = max((event["step"] for event in run.events("step_committed")), default=0)
    return RemainingState(
        snapshot=snapshots[0][0].step if snapshots else 0, durable=durable, committed=committed
    )  # fmt: skip


def resumed_at(run: Run, attempt: int) -> int | None:
    """Return the step that an attempt started at, None if it did not start to train."""
    for event in run.events("train_started"):
        if event["attempt"] == attempt and event["rank"] == 0:
            return int(event["step"])
    return None


def attempts(run: Run) -> int:
    """Return the number of attempts."""
    return len({event["attempt"] for event in run.events("attempt_started")})
