"""A hanging file system blocks only the drain worker: training continues and no work is lost."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
from support.freezer import Freezer
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest
from support.torture import verified_checkpoints
from support.whole_runs import PATCHED, resumed_at

STEPS = 40
STALL_SECONDS = 2.0
TIMES = (
    f'{{"STALL_SECONDS": {STALL_SECONDS}, "RETRY_SECONDS": 1.0, "STOP_SECONDS": 1.0, "WAIT_SECONDS": 3.0}}'
)


def launch(runs: Runs) -> Run:
    """Start a run whose drain timeouts are seconds instead of minutes."""
    return runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "ours",
        "--max-steps", str(STEPS), "--save-steps", "4", "--step-seconds", "0.1",
        program=PATCHED, environment={"TEST_DRAINS": TIMES},
    ).start()  # fmt: skip


def assert_only_discarded_are_missed(run: Run) -> None:
    """The last line names checkpoints that had to leave memory while the disk hung, and the newest one, which
    is on disk.
    """
    sentence = run.events("run_ended")[-1]["sentence"]
    assert "which the script scheduled" in sentence
    assert "memory was needed for newer ones" in sentence
    assert sentence.endswith(f"Last checkpoint: {run.cwd}/ours/checkpoint-{STEPS}.")


def drain_worker(run: Run) -> int:
    """Return the pid of the drain worker: the forkserver's child that is not a rank."""
    ranks = {event["pid"] for event in run.events("rank_started")}
    found = [
        child.pid
        for server in psutil.Process(run.process.pid).children()
        for child in server.children()
        if child.pid not in ranks
    ]
    assert len(found) == 1, found
    return found[0]


def stall(run: Run, hold: Callable[[int], object]) -> int:
    """Freeze the drain worker after its first checkpoint; return the step committed at the stall event."""
    run.until_event("checkpoint_published")
    hold(drain_worker(run))
    failed = run.until(lambda events: [e for e in events if e["event"] == "checkpoint_failed"])
    assert failed[0]["cause"] == "checkpoint_stall"
    return max(int(event["step"]) for event in run.events("step_committed"))


def published_after(run: Run, moment: float) -> list[dict[str, object]]:
    """Wait for a durable checkpoint published after `moment`."""
    found: list[dict[str, object]] = run.until(
        lambda events: [e for e in events if e["event"] == "checkpoint_published" and e["time"] > moment]
    )
    return found


def test_training_continues_while_the_disk_hangs(runs: Runs, tmp_path: Path) -> None:
    """The run warns, trains on with snapshots in memory, and drains again when the disk responds."""
    run = launch(runs)
    held: list[int] = []

    def stop(pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        held.append(pid)

    committed = stall(run, stop)
    run.until_step(committed + 6)
    assert max(event["step"] for event in run.events("checkpoint_staged")) >= committed + 4
    moment = time.time()
    os.kill(held[0], signal.SIGCONT)
    published_after(run, moment)
    run.ended(93)
    assert_only_discarded_are_missed(run)
    assert not run.status()["recoveries"]
    assert not run.status()["checkpoint_trouble"]
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", STEPS)
    assert f"checkpoint-{STEPS}" in verified_checkpoints(tmp_path / "ours")


def test_rank_killed_while_the_disk_hangs_resumes_from_memory(
    frozen: Freezer, runs: Runs, tmp_path: Path
) -> None:
    """A drain worker that cannot be killed is replaced, and the run resumes from the last snapshot.

    Its end waits for no process: the old drain worker, which shows the run's token, is not taken for a helper
        of the ranks.
    """
    run = launch(runs)
    committed = stall(run, frozen.freeze)
    run.until_step(committed + 3)
    run.kill(1)
    run.until_event("train_started", attempt=1, rank=0)
    last = max(event["step"] for event in run.events("step_committed") if event["attempt"] == 0)
    began = resumed_at(run, 1)
    assert began is not None
    assert began >= last - 1
    assert [event["attempt"] for event in run.events("attempt_started")] == [0, 1]
    # the new worker is not frozen: only the old process hung, not the disk
    published_after(run, run.events("attempt_started")[-1]["time"])
    run.ended(93)
    assert_only_discarded_are_missed(run)
    assert not run.events("processes_ended"), run.tail()
    assert "waiting for what the ranks have started" not in run.printed()
    assert digest(tmp_path / "ours") == undisturbed("grpo.py", STEPS)
    assert f"checkpoint-{STEPS}" in verified_checkpoints(tmp_path / "ours")
