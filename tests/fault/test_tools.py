"""Tools and environments that hang, die or answer nonsense: each is named with its line, and the run
finishes.
"""

from __future__ import annotations

import json

import pytest
from support.references import undisturbed_command
from support.runs import SCRIPTS, Run, Runs, digest, line_of

SCRIPT = str(SCRIPTS / "tool_faults.py")
STEPS = ("--output-dir", "out", "--max-steps", "4", "--save-steps", "2")
SLOW = str(SCRIPTS / "slow_tools.py")
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


def test_a_tool_that_hangs_once_costs_nothing(runs: Runs) -> None:
    """It is interrupted in the rank, named with its line, and its call is made once more."""
    run = launched(runs, "sleep", "--tool-timeout", "2").ended()
    (ended,) = run.events("tool_cancelled")
    where = f"tool_faults.py:{line_of(SCRIPT, 'sleeps')}"
    assert (ended["rank"], ended["tool"], ended["seconds"], ended["where"]) == (1, "tool search", 2.0, where)
    assert (
        f"rank 1: tool search was interrupted after 2 s (--tool-timeout) at {where}, usually" in run.printed()
    )
    assert run.status()["recoveries"] == []
    assert masked(run) == 0
    assert digest(run.folder / "out") == undisturbed_weights()
    calls = run.status()["tools"]["calls"]
    assert (calls["tool search"]["failures"], calls["tool search"]["repeated"]) == (1, 1)
    assert calls["tool search"]["calls"] == calls["tool add"]["calls"] + 1 > 9
    assert {name: one["kind"] for name, one in calls.items()} == {
        "tool search": "tool", "tool add": "step", "reset of Sums": "reset", "boot of Sums": "boot",
        "get_reward of Sums": "reward",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "place", "name"),
    [
        ("loop", "tool", "tool search"),
        pytest.param("retry", "tool", "tool search", marks=full),
        ("sleep", "step", "tool add"),
        pytest.param("sleep", "reset", "reset of Sums", marks=full),
        ("sleep", "reward", "get_reward of Sums"),
    ],
)
def test_a_call_that_does_not_return_is_ended_wherever_it_is(
    runs: Runs, fault: str, place: str, name: str
) -> None:
    """It is made once more. For an environment that is in another one, which was brought to where it was."""
    run = launched(runs, fault, "--tool-timeout", "2", script=("--place", place)).ended()
    (ended,) = run.events("tool_cancelled")
    assert (ended["rank"], ended["tool"], ended["masked"]) == (1, name, False)
    assert run.status()["recoveries"] == []
    assert ("it is made once more, in a new environment" in run.printed()) is (place != "tool")
    assert masked(run) == 0
    assert digest(run.folder / "out") == undisturbed_weights()


def zeros(run: Run) -> int:
    """Samples whose reward was 0 because they were shown the outage."""
    return sum(json.loads((run.folder / f"zeros-{rank}").read_text()) for rank in range(2))


def outlasted(runs: Runs, place: str, seconds: float) -> Run:
    """A run in the middle of which the place fails for so long on one rank, and goes on afterwards."""
    script = (
        "--place", place, "--outage-seconds", str(seconds), "--max-steps", str(round(4 + seconds)),
        # turns so short that a failure can be shown
        "--settings", json.dumps({"max_completion_length": 60, "generation_kwargs": {"max_new_tokens": 8}}),
    )  # fmt: skip
    run = launched(runs, "outage", script=script).ended()
    assert run.status()["recoveries"] == []
    assert masked(run) > 0
    calls = run.status()["tools"]["calls"]
    assert sum(one["repeated"] for one in calls.values()) > 0
    return run


def test_no_sample_of_an_outage_has_the_reward_0(runs: Runs) -> None:
    """Each that was shown it is left out of the loss."""
    run = outlasted(runs, "tool", 6.0)
    assert masked(run) == zeros(run) > 0


@full
@pytest.mark.parametrize("place", ["tool", "step", "reset", "reward"])
def test_a_run_outlasts_a_minute_without_its_sandbox(runs: Runs, place: str) -> None:
    """Whatever of it is away: no zero is trained on, and nothing is restarted."""
    run = outlasted(runs, place, 60.0)
    assert masked(run) >= zeros(run)
    assert (zeros(run) > 0) is (place in ("tool", "step"))


@full
def test_a_repeated_step_draws_the_same_numbers(runs: Runs) -> None:
    """Tools from Python's generator, and environments from the seed of their sample, of which no two are
    alike.
    """
    run = launched(runs, "none", script=("--draws",)).ended()
    drawn = [line for rank in range(2) for line in (run.folder / f"seeds-{rank}").read_text().splitlines()]
    assert len(set(drawn)) == len(drawn) > 16
    weights = digest(run.folder / "out")
    killed = runs(
        "--inject", "kill@rank1:step3", "--nproc-per-node", "2", SCRIPT, "--output-dir", "again", *STEPS[2:],
        "--draws", name="killed",
    ).start().ended()  # fmt: skip
    assert len(killed.status()["recoveries"]) == 1
    assert digest(killed.folder / "again") == weights


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
    """There it is killed, the call is made once more in another one, and the run finishes."""
    run = launched(runs, "c", "--tool-timeout", "3", script=("--always",)).ended()
    assert len(run.verdicts()) == 2
    assert "tool search runs in a worker process from here on" in run.printed()
    assert run.status()["tools"]["moved"] == ["tool search"]
    ended = run.events("tool_cancelled")
    killed = [event for event in ended if event["attempt"] == 2]
    assert killed
    assert masked(run) == sum(event["masked"] for event in killed) == 0  # each one hangs in its sixth call
    assert run.status()["tools"]["calls"]["tool search"]["repeated"] >= len(killed)


KINDS = (
    "sleep", "child", "cpu", "http_server", "file_lock", "alarm", "async_sleep", "boot", "reset", "step",
    "reward",
)  # fmt: skip


@full
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_slow_tool_is_left_alone(runs: Runs, kind: str) -> None:
    """Without a limit of the user's, though it does nothing for longer than the hang detector's floor."""
    run = runs(
        "--deadline-floor", "2", "--nproc-per-node", "2", SLOW, *STEPS, "--kind", kind
    ).start().ended()  # fmt: skip
    assert run.verdicts() == []
    assert run.events("tool_cancelled") == []
    assert masked(run) == 0
    calls = run.status()["tools"]["calls"].values()
    assert sum(one["failures"] + one["repeated"] for one in calls) == 0
    assert max(one["seconds"] for one in calls) > 3
    assert digest(run.folder / "out") == undisturbed_command(
        [SLOW, "--output-dir", "out", *STEPS[2:]], ranks=2
    )
