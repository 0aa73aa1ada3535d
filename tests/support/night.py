"""A run directory of a night: steps, checkpoints, and faults that repeat steps. No process runs."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from grpo_run.runtime.history.run_directory import RunDirectory

BEGAN = 1_790_000_000.0
STEP_SECONDS = 4.0
SNAPSHOTS = 10
"""Steps between snapshots, from which a fault resumes."""


def write_night(
    root: Path, *, steps: int, faults: tuple[int, ...] = (57,), sentence: str = ""
) -> RunDirectory:
    """Write `root/runs/night`, which has finished.

    Args:
        steps: how many.
        faults: the last steps that were completed before a rank was killed.
        sentence: of the verdicts.
    """
    run = RunDirectory(path=root / "runs" / "night")
    run.create()
    versions = {"torch": "2.13.0", "trl": "1.16.0"}
    run.write_run({
        "run_id": "night", "typed": ["--nproc-per-node", "2", "train.py"], "working_directory": "/home/me",
        "inputs": {"versions": versions, "environment": {"SECRET": "digest"}},
    })  # fmt: skip
    with open(run.journal, "w", encoding="utf-8") as file:
        now, attempt = BEGAN, -1

        def write(event: str, seconds: float = 0.0, **fields: Any) -> None:
            nonlocal now
            now += seconds
            header = {"time": now, "monotonic": now - BEGAN, "run": "night", "attempt": attempt}
            file.write(json.dumps({**header, "rank": None, "step": None, "event": event, **fields}) + "\n")

        def start(step: int) -> None:
            nonlocal attempt
            attempt += 1
            write("attempt_started", attempt=attempt, world_size=2)
            write("train_started", 6.0, rank=0, step=step, train_call=1, target_steps=steps)

        write("run_started")
        start(0)
        step, left = 0, list(faults)
        while step < steps:
            step += 1
            reward = 1 - math.exp(-step / 100) + (5.0 if step == 77 else 0.0)
            write("step_logged", STEP_SECONDS, rank=0, step=step, train_call=1, reward=reward,
                  loss=0.1 * math.sin(step), completion_length=100 + step % 7)  # fmt: skip
            write("step_committed", step=step, train_call=1, target_steps=steps, committed_at=now)
            if left and step == left[0]:
                left.pop(0)
                number = len(faults) - len(left)
                write("incident", 1.0, step=step, train_call=1, cause="signal", culprit=1, signature="s",
                      incident=str(run.incidents / f"{number:04d}-signal"), detection_seconds=0.5,
                      failed_at=now - 0.5, sentence=sentence or "Rank 1 was killed by SIGKILL.")  # fmt: skip
                write("action", action="restart", reason="from a snapshot")
                write("attempt_ended", cause="signal", action="restart")
                step = step // SNAPSHOTS * SNAPSHOTS
                start(step)
        write("train_ended", rank=0, step=steps, train_call=1)
        write("run_ended", 2.0, exit_code=0, completed=True, stopped=False, sentence="")
    return run
