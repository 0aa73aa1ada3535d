"""A tool in a worker returns what it returns in the rank, and one that hangs or dies is ended."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from support.runs import alive

from grpo_run.runtime.features.agent_tools._outages import CallEndedError, is_outage
from grpo_run.runtime.features.agent_tools._worker import ToolError, ToolWorker

LIMIT_SECONDS = 60.0


def made() -> Any:
    """A function that is pickled by value, as those of a script are."""
    calls: list[int] = []

    def tool(kind: str, value: Any = None) -> Any:
        calls.append(1)
        if kind == "hang":
            started = subprocess.Popen(["sleep", "600"])
            with open(value, "w") as file:
                file.write(str(started.pid))
            time.sleep(600)
        if kind == "die":
            os._exit(3)
        if kind == "raise":
            raise KeyError(value)
        if kind == "await":

            async def later() -> Any:
                return value

            return later()
        return len(calls) if kind == "count" else threading.Lock() if kind == "lock" else value

    return tool


@pytest.fixture
def worker() -> Iterator[ToolWorker]:
    found = ToolWorker(made(), lambda: None)
    yield found
    found.close()


def test_a_call_returns_or_raises_what_the_tool_does(worker: ToolWorker) -> None:
    """It keeps its globals between two calls; a result that cannot be sent is a failure of the tool."""
    assert worker.call({"kind": "return", "value": "x" * 10_000_000}, LIMIT_SECONDS) == "x" * 10_000_000
    assert worker.call({"kind": "await", "value": 4}, LIMIT_SECONDS) == 4
    with pytest.raises(ToolError, match="'own'") as own:
        worker.call({"kind": "raise", "value": "own"}, LIMIT_SECONDS)
    assert is_outage(own.value, ["KeyError"])
    assert not is_outage(own.value, ["ValueError"])
    with pytest.raises(ToolError, match="pickle"):
        worker.call({"kind": "lock"}, LIMIT_SECONDS)
    assert worker.call({"kind": "count"}, LIMIT_SECONDS) == 5


def test_a_worker_that_hangs_or_dies_is_replaced(worker: ToolWorker, tmp_path: Any) -> None:
    """What it has started is killed with it."""
    file = tmp_path / "child"
    worker.call({"kind": "count"}, LIMIT_SECONDS)  # it has started
    with pytest.raises(CallEndedError, match="no answer within 1 s"):
        worker.call({"kind": "hang", "value": str(file)}, 1.0)
    deadline = time.monotonic() + 10
    while alive([int(file.read_text())]) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive([int(file.read_text())]) == []
    with pytest.raises(CallEndedError) as died:
        worker.call({"kind": "die"}, LIMIT_SECONDS)
    assert died.value.how.startswith("killed (its process has")
    assert worker.call({"kind": "count"}, LIMIT_SECONDS) == 1


def test_a_tool_that_holds_a_lock_cannot_be_moved() -> None:
    """It is known before anything is started."""
    lock = threading.Lock()
    with pytest.raises(TypeError, match="pickle"):
        ToolWorker(lambda: lock.acquire(), lambda: None)
