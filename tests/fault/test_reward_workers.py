"""Rewards that hang, crash or answer nonsense: the run goes on, and what was excluded is counted."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from support.references import undisturbed
from support.runs import SCRIPTS, Run, Runs, digest

SCRIPT = str(SCRIPTS / "reward_faults.py")
KINDS = {
    "sleep": "timeout",
    "regex": "timeout",
    "ignore_sigterm": "timeout",
    "raise": "exception",
    "few": "output",
    "exit": "died",
}
"""Faults that fail a call, and the kind that is journaled."""


def processes_of(run: Run) -> list[tuple[int, str]]:
    """The processes that work in the run's folder, and zombies that its ranks have left."""
    ranks = {event["pid"] for event in run.events("rank_started")}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if process.pid in ranks or process.ppid() in ranks or process.cwd().startswith(str(run.folder)):
                found.append((process.pid, process.name()))
    return found


def check_nothing_is_left(run: Run) -> None:
    """Nothing of the run exists. multiprocessing's own helpers of the supervisor exit some milliseconds after
    it.
    """
    deadline = time.monotonic() + 10
    while (left := processes_of(run)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def launched(runs: Runs, fault: str, *, steps: int, one_in: int, workers: bool, ranks: int = 2) -> Run:
    options = ("--reward-workers", "1") if workers else ("--deadline-floor", "4")
    return runs(
        *options, "--reward-timeout", "30" if fault == "leak" else "1", "--nproc-per-node", str(ranks),
        SCRIPT, "--output-dir", "out",
        "--fault", fault, "--one-in", str(one_in), "--max-steps", str(steps), "--save-steps", "1000",
    ).start()  # fmt: skip


@pytest.mark.timeout(240)
def test_rewards_in_workers_that_hang_or_raise_cost_their_samples_only(runs: Runs) -> None:
    """Eight steps with a regular expression that holds the GIL: no restart, nothing is left."""
    run = launched(runs, "regex", steps=8, one_in=25, workers=True, ranks=1)
    run.ended()
    failed = run.events("reward_failed")
    assert failed
    assert run.events("incident") == []
    for event in failed:
        assert (event["function"], event["kind"]) == ("faulty", "timeout")
        assert len(event["samples"]) == event["masked"] < event["batch"]
    check_nothing_is_left(run)


@pytest.mark.timeout(300)
def test_an_unmodified_script_whose_reward_hangs_goes_on_after_two_recoveries(runs: Runs) -> None:
    """Threads that never return: `with ThreadPoolExecutor` waits for them although `as_completed` has given
    up.
    """
    run = launched(runs, "verified", steps=20, one_in=80, workers=False)
    run.ended()
    assert [event["failed_reward"]["function"] for event in run.events("incident")] == ["verified"] * 2
    (moved,) = run.events("reward_moved")
    assert (moved["file"], moved["function"]) == (SCRIPT, "verified")
    assert "reward function verified has not returned in time 2 times at one step" in run.printed()
    assert {event["function"] for event in run.events("reward_failed")} == {"verified"}
    assert max(event["step"] for event in run.events("step_committed")) == 20


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_an_expired_time_limit_moves_a_reward_too(runs: Runs) -> None:
    """`TimeoutError: 1 (of 4) futures unfinished`, raised at the same step again."""
    run = launched(runs, "verified_by_daemons", steps=20, one_in=30, workers=False)
    run.ended()
    assert len(run.events("incident")) == 2
    assert len(run.events("reward_moved")) == 1


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("fault", ["verified", "verified_by_daemons"])
def test_with_workers_no_recovery_is_needed(runs: Runs, fault: str) -> None:
    run = launched(runs, fault, steps=20, one_in=30, workers=True)
    run.ended()
    assert run.events("incident") == []
    assert run.events("reward_failed")


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("fault", [*KINDS, "leak", "nan", "fork", "child"])
def test_five_hundred_steps_finish_whatever_one_sample_in_fifty_does(runs: Runs, fault: str) -> None:
    run = launched(runs, fault, steps=500, one_in=50, workers=True, ranks=1)
    run.ended(timeout_seconds=3000)
    assert run.events("incident") == []
    kinds = {event["kind"] for event in run.events("reward_failed")}
    if fault in KINDS:
        assert KINDS[fault] in kinds
        assert sum(event["masked"] for event in run.events("reward_failed")) > 5
    elif fault == "nan":
        assert {event["reason"] for event in run.events("sample_masked")} >= {"nan"}
    elif fault == "leak":
        assert {event["masked"] for event in run.events("reward_failed")} <= {0}
    check_nothing_is_left(run)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("script", ["grpo.py", "rloo.py"])
@pytest.mark.parametrize("workers", [(), ("--reward-workers", "2")])
def test_without_a_failure_the_weights_are_torchruns(
    runs: Runs, tmp_path: Path, script: str, workers: tuple[str, ...]
) -> None:
    (
        runs(
            *workers,
            "--nproc-per-node",
            "2",
            str(SCRIPTS / script),
            "--output-dir",
            "ours",
            "--max-steps",
            "12",
        )
        .start()
        .ended()
    )
    assert digest(tmp_path / "ours") == undisturbed(script, 12)
