"""All processes of a run are killed at once at random moments; the same command resumes each time."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest
from support.whole_runs import attempts, kill_all, remaining_state, resumed_at

from grpo_run.runtime.errors import EXIT_FINISHED

KILLS = 25
STEP_SECONDS = 0.05
SPREAD_SECONDS = 0.35
"""A kill follows an event within this time: two to four steps, which include a snapshot and its draining."""
WEIGHTS = {
    "step_committed": 8,
    "checkpoint_staged": 8,
    "run_started": 1,
    "attempt_started": 2,
    "train_started": 1,
}
"""Events that kills follow, with weights: mostly saves, sometimes a start or a resume."""


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_whole_runs_killed_at_random_moments(runs: Runs, tmp_path: Path) -> None:
    """Each launch resumes from the newest verified checkpoint and loses at most one step."""
    steps = 7 + 3 * KILLS
    arguments = ("--max-steps", str(steps), "--save-steps", "2", "--save-total-limit", "2")
    run = runs(
        "--nproc-per-node", "2", "--snapshot-every", "1", str(SCRIPTS / "grpo.py"), "--output-dir", "ours",
        *arguments, "--step-seconds", str(STEP_SECONDS),
    )  # fmt: skip
    dice, output, expected = random.Random(KILLS), tmp_path / "ours", {0: 0}
    behind: list[int] = []
    for kill in range(1, KILLS + 1):
        run.start()
        event = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        await_event(run, event, supervisor=kill, least=3 * kill)
        time.sleep(dice.uniform(0.0, SPREAD_SECONDS))
        kill_all(run)
        left = remaining_state(run, output)
        assert left.newest >= left.committed - 1, f"kill {kill}: {left}"
        behind.append(max(0, left.committed - left.newest))
        expected[attempts(run)] = left.newest
    run.start().ended(EXIT_FINISHED)
    assert digest(output) == undisturbed("grpo.py", steps)
    for attempt, step in expected.items():
        resumed = resumed_at(run, attempt)
        assert resumed in (None, step), f"attempt {attempt} began at {resumed}, not {step}\n{run.tail()}"
    print(
        f"\n| all processes of a run of {steps} steps killed at random moments | {KILLS} | weights equal;"
        f" lost steps: {behind.count(0)} times 0, {behind.count(1)} times 1 |"
    )


def await_event(run: Run, name: str, *, supervisor: int, least: int) -> None:
    """Wait for an event of the n-th supervisor; an event with a step must have reached step `least`."""

    def seen(events: list[dict[str, Any]]) -> bool:
        starts = [index for index, event in enumerate(events) if event["event"] == "run_started"]
        if len(starts) < supervisor:
            return False
        mine = [event for event in events[starts[supervisor - 1] :] if event["event"] == name]
        return any(name == "train_started" or (event.get("step") or least) >= least for event in mine)

    run.until(seen, timeout_seconds=120.0)
