"""Tools and environments that hang, die or answer nonsense: each is named with its line, and the run
finishes.
"""

from __future__ import annotations

import pytest
from support.references import undisturbed_command
from support.runs import SCRIPTS, Run, Runs, digest, line_of

SCRIPT = str(SCRIPTS / "tool_faults.py")
STEPS = ("--output-dir", "out", "--max-steps", "4", "--save-steps", "2")
full = pytest.mark.full
pytestmark = pytest.mark.timeout(240)


def launched(runs: Runs, fault: str, *options: str, script: tuple[str, ...] = ()) -> Run:
    return runs(
        *options, "--deadline-floor", "6", "--nproc-per-node", "2", SCRIPT, *STEPS, "--fault", fault, *script
    ).start()


def undisturbed_weights() -> str:
    return undisturbed_command([SCRIPT, "--output-dir", "out", *STEPS[2:]], ranks=2)


def masked(run: Run) -> int:
    return int(run.status()["masked"]["samples"].get("tool", 0))


def test_a_tool_that_hangs_once_costs_one_sample(runs: Runs) -> None:
    """It is interrupted in the rank, named with its line, and nothing is restarted."""
    run = launched(runs, "sleep", "--tool-timeout", "2").ended()
    (ended,) = run.events("tool_cancelled")
    where = f"tool_faults.py:{line_of(SCRIPT, 'sleeps')}"
    assert (ended["rank"], ended["tool"], ended["seconds"], ended["where"]) == (1, "tool search", 2.0, where)
    assert (
        f"rank 1: tool search was interrupted after 2 s (--tool-timeout) at {where}, usually" in run.printed()
    )
    assert run.status()["recoveries"] == []
    assert masked(run) == 1
    calls = run.status()["tools"]["calls"]
    assert calls["tool search"]["failures"] == 1
    assert calls["tool search"]["calls"] == calls["tool add"]["calls"] > 8
    assert {name: one["kind"] for name, one in calls.items()} == {
        "tool search": "tool", "tool add": "step", "reset of Sums": "reset", "boot of Sums": "boot",
    }  # fmt: skip


@full
@pytest.mark.parametrize(
    ("fault", "place", "name"),
    [
        ("loop", "tool", "tool search"),
        ("retry", "tool", "tool search"),
        ("sleep", "step", "tool add"),
        ("sleep", "reset", "reset of Sums"),
    ],
)
def test_a_call_that_does_not_return_is_ended_wherever_it_is(
    runs: Runs, fault: str, place: str, name: str
) -> None:
    """Its environment is not used again."""
    run = launched(runs, fault, "--tool-timeout", "2", script=("--place", place)).ended()
    (ended,) = run.events("tool_cancelled")
    assert (ended["rank"], ended["tool"]) == (1, name)
    assert run.status()["recoveries"] == []
    assert masked(run) == 1


@full
@pytest.mark.parametrize("fault", ["sleep", "error"])
def test_an_environment_that_does_not_boot_is_booted_once_more(runs: Runs, fault: str) -> None:
    """Nothing is lost by it."""
    run = launched(runs, fault, "--tool-timeout", "2", script=("--place", "boot", "--at", "3")).ended()
    assert "boot of Sums failed" in run.printed()
    assert run.status()["recoveries"] == []
    assert masked(run) == 0
    assert digest(run.folder / "out") == undisturbed_weights()


@full
@pytest.mark.parametrize(
    ("fault", "place"),
    [
        ("slow", "boot"),
        ("slow", "tool"),
        ("child", "tool"),
        ("garbage", "tool"),
        ("big", "tool"),
        ("error", "step"),
    ],
)
def test_what_returns_or_raises_is_left_alone(runs: Runs, fault: str, place: str) -> None:
    """TRL makes of it what it makes without us."""
    run = launched(runs, fault, "--tool-timeout", "5", script=("--place", place, "--at", "3")).ended()
    assert run.events("tool_cancelled") == []
    assert run.status()["recoveries"] == []
    assert masked(run) == 0
    if fault == "error":
        assert run.status()["tools"]["calls"]["tool add"]["failures"] == 1
    if fault in ("slow", "child"):
        assert digest(run.folder / "out") == undisturbed_weights()


@full
@pytest.mark.parametrize("fault", ["c", "gil", "segfault"])
def test_a_tool_that_cannot_be_interrupted_ends_the_attempt(runs: Runs, fault: str) -> None:
    """The verdict names it, and the weights are those of an undisturbed run."""
    run = launched(runs, fault, "--tool-timeout", "2").ended()
    (verdict,) = run.verdicts()
    assert verdict["culprits"] == [1]
    assert "tool search" in verdict["sentence"]
    assert [event["tool"] for event in run.events("tool_fault")] == ["tool search"]
    assert digest(run.folder / "out") == undisturbed_weights()


@full
def test_a_tool_in_which_two_attempts_have_ended_runs_in_a_worker(runs: Runs) -> None:
    """There it is killed, with its sample left out, and the run finishes."""
    run = launched(runs, "c", "--tool-timeout", "3", script=("--always",)).ended()
    assert len(run.verdicts()) == 2
    assert "tool search runs in a worker process from here on" in run.printed()
    assert run.status()["tools"]["moved"] == ["tool search"]
    ended = run.events("tool_cancelled")
    killed = [event for event in ended if event["attempt"] == 2]
    assert killed
    assert masked(run) == len(killed)
