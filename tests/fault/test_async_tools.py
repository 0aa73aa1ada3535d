"""Tools and environments in AsyncGRPO's process of the rollouts: bounded, named, and no lesson."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.async_rollouts.serving import serving
from support.runs import SCRIPTS, Run, Runs

pytestmark = [pytest.mark.full, pytest.mark.timeout(400)]
SECONDS = 120.0


@pytest.fixture
def url() -> Iterator[str]:
    """Start the server that answers without a model."""
    with serving() as address:
        yield address


def ran(runs: Runs, url: str, fault: str, *options: str) -> Run:
    run = runs(
        "--nproc-per-node", "2", *options, str(SCRIPTS / "async_prompts.py"), "--agent", "--server", url,
        "--prompts", "400", "--output-dir", "out", "--num-generations", "2", "--max-steps", "40",
        "--per-device-train-batch-size", "4", "--save-steps", "1000", environment={"AGENT_FAULT": fault},
    ).start().ended(timeout_seconds=SECONDS)  # fmt: skip
    assert run.status()["recoveries"] == []
    return run


@pytest.mark.parametrize(
    ("place", "name", "again"),
    [
        ("tool", "tool search", True),
        ("async_tool", "tool look_up", True),
        ("step", "tool add", False),
        ("reset", "reset of Sums", False),
        ("reward", "get_reward of Sums", False),
        ("boot", "boot of Sums", True),
    ],
)
def test_a_call_that_does_not_return_is_left_behind(
    runs: Runs, url: str, place: str, name: str, again: bool
) -> None:
    """It is made again, or its conversation is left out; the run goes on."""
    run = ran(runs, url, f"sleep:{place}:4", "--tool-timeout", "2")
    assert f"{name} failed" in run.printed() or [
        (one["tool"], one["seconds"], one["masked"]) for one in run.events("tool_cancelled")
    ] == [(name, 2.0, not again)]
    calls = run.status()["tools"]["calls"]
    assert calls[name]["failures"] == 1
    assert {one["kind"] for one in calls.values()} == {"tool", "step", "boot", "reset", "reward"}
