"""`examples/agent.py`: the example of the guide trains through its tools."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import Runs

EXAMPLE = str(Path(__file__).parents[2] / "examples" / "agent.py")


@pytest.mark.full
def test_the_example_of_an_agent_calls_its_tools(runs: Runs) -> None:
    """None fails, and none is ended."""
    run = runs("--nproc-per-node", "2", "--tool-timeout", "30", EXAMPLE).start().ended()
    calls = run.status()["tools"]["calls"]
    assert {name for name, one in calls.items() if one["calls"]} == {
        "tool square", "tool guess", "boot of Game", "reset of Game", "get_reward of Game",
    }  # fmt: skip
    assert sum(one["failures"] for one in calls.values()) == 0
    assert run.events("tool_cancelled") == []
