"""Rewards that hang, crash or answer nonsense: the run goes on, and what was excluded is counted."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import psutil
import pytest
from support.references import undisturbed, undisturbed_command
from support.runs import SCRIPTS, Run, Runs, digest, line_of

SCRIPT = str(SCRIPTS / "reward_faults.py")
POOL = str(SCRIPTS / "stuck_pool.py")
WORDS = "6 (of 8) futures unfinished"
ADVANCES_SECONDS = 180.0
full = pytest.mark.full
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


@full
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


def stuck_pool(runs: Runs, *arguments: str, steps: int = 4, ranks: int = 1) -> Run:
    """A run of the script with the stuck pool."""
    return runs(
        "--deadline-floor", "4", "--nproc-per-node", str(ranks), POOL, "--output-dir", "out",
        "--max-steps", str(steps), *arguments,
    )  # fmt: skip


def check_the_pool_gets_what_it_can_do(run: Run, steps: int, ranks: int) -> None:
    """The function was moved; no sample was lost, and the weights are those of a pool that is never stuck."""
    assert len(run.events("incident")) == 2
    (moved,) = run.events("reward_moved")
    assert (moved["file"], moved["function"]) == (POOL, "verified")
    failed = run.events("reward_failed")
    assert failed
    assert {(event["kind"], event["masked"]) for event in failed} == {("timeout", 0)}
    assert run.events("sample_masked") == []
    healthy = [POOL, "--max-steps", str(steps), "--from-step", "1000"]
    assert digest(run.folder / "out") == undisturbed_command(healthy, ranks=ranks)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("from_step", "steps", "ranks"),
    [(1, 4, 1), pytest.param(3, 6, 2, marks=full), pytest.param(50, 54, 1, marks=full)],
)
def test_a_pool_that_is_too_slow_for_its_batch_loses_no_sample(
    runs: Runs, from_step: int, steps: int, ranks: int
) -> None:
    """`TimeoutError: 6 (of 8) futures unfinished`, raised in the first step as in the fiftieth: the user is
    told in these words.
    """
    run = stuck_pool(runs, "--from-step", str(from_step), steps=steps, ranks=ranks).start()
    run.ended(timeout_seconds=ADVANCES_SECONDS)
    check_the_pool_gets_what_it_can_do(run, steps, ranks)
    assert {event["step"] for event in run.events("incident")} == {from_step - 1}
    text = run.printed()
    assert f"raised TimeoutError in step {from_step} (phase reward): {WORDS}" in text
    assert f"has not returned in time 2 times at one step (TimeoutError: {WORDS})" in text
    assert f"reward function verified raised TimeoutError: {WORDS}: no sample masked" in text


@full
@pytest.mark.timeout(600)
def test_a_pool_whose_time_limit_is_tried_for_ever_loses_no_sample(runs: Runs) -> None:
    """Its function never returns, and the first wait is not announced as one of half an hour."""
    run = stuck_pool(runs, "--then", "retry").start()
    run.ended(timeout_seconds=ADVANCES_SECONDS)
    check_the_pool_gets_what_it_can_do(run, steps=4, ranks=1)
    assert {event["cause"] for event in run.events("incident")} == {"reward_stall"}
    assert "30 min" not in run.printed()


@full
@pytest.mark.timeout(300)
def test_a_pool_whose_time_limit_the_script_handles_is_its_own_affair(runs: Runs) -> None:
    run = stuck_pool(runs, "--then", "leave").start()
    run.ended(timeout_seconds=ADVANCES_SECONDS)
    assert run.events("incident") == run.events("reward_moved") == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("form", "from_step", "place"),
    [
        ("own", 1, " before the first step"),
        pytest.param("own", 3, "", marks=full),
        pytest.param("steps", 1, " in step 1 (phase forward_backward)", marks=full),
    ],
)
def test_a_reward_of_a_loop_by_hand_cannot_be_moved_and_is_named(
    runs: Runs, form: str, from_step: int, place: str
) -> None:
    """Nothing tells where it begins. The run ends at the second time, with the line and the script's words
    in one sentence.
    """
    run = stuck_pool(runs, "--form", form, "--from-step", str(from_step)).start()
    run.ended(93, timeout_seconds=ADVANCES_SECONDS)
    assert run.events("reward_moved") == []
    assert len(run.events("incident")) == 2
    line = line_of("stuck_pool.py", "the limit")
    *_, last = run.printed().splitlines()
    assert f"Rank 0 raised TimeoutError{place}: {WORDS} (stuck_pool.py:{line} in verified)." in last
    assert "Gave up: the same failure occurred again" in last


@full
@pytest.mark.timeout(300)
def test_a_loop_by_hand_that_has_progress_to_lose_is_tried_for_longer(runs: Runs) -> None:
    """A `TimeoutError` may be the network's, which comes back. It is named in the same words."""
    run = stuck_pool(runs, "--form", "steps", "--from-step", "3").start()
    run.until_event("incident", count=3, timeout_seconds=120)
    sentence = f"Rank 0 raised TimeoutError in step 3 (phase forward_backward): {WORDS}"
    assert {verdict["sentence"] for verdict in run.verdicts()} == {sentence}
    assert "files, the network or a hub may come back, which is tried for 10 min" in run.printed()


@full
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("form", "from_step", "place"),
    [
        ("own", 1, "in startup"),
        ("own", 3, "outside train()"),
        ("steps", 1, "in forward_backward"),
        ("steps", 3, "in forward_backward"),
    ],
)
def test_a_loop_by_hand_that_does_nothing_is_noticed_and_restarted(
    runs: Runs, form: str, from_step: int, place: str
) -> None:
    """Also before its first step: the hour that a start may take is for one that does something."""
    run = stuck_pool(runs, "--form", form, "--then", "retry", "--from-step", str(from_step)).start()
    run.until_event("attempt_started", count=2, timeout_seconds=90)
    (verdict,) = run.verdicts()
    assert f"Rank 0 has been {place} for" in verdict["sentence"]
    line = line_of("stuck_pool.py", "the limit")
    assert verdict["sentence"].endswith(f", at stuck_pool.py:{line} in verified.")
    assert "deadline 1 h" not in run.printed()


@full
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
