"""Prometheus and promtool, and what they answer.

Both have to be on PATH (package `prometheus` on Debian and Ubuntu).
"""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

DEADLINE_SECONDS = 60.0


def tool(name: str) -> str:
    """Return the path of a Prometheus binary.

    Fail if it is missing, because no other test checks the rules.
    """
    path = shutil.which(name)
    if path is None:
        pytest.fail(
            f"{name} is not on PATH; install it with"
            " `apt-get install -y --no-install-recommends prometheus` and disable the service that it starts"
        )
    return path


def promtool(*arguments: str) -> str:
    """Run promtool and return its output; fail with its output if it fails."""
    done = subprocess.run(
        [tool("promtool"), *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def eventually(check: Callable[[], Any], what: str) -> Any:
    """Repeat a check until its result is true; fail at the deadline."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline:
        result = check()
        if result:
            return result
        time.sleep(0.1)
    return pytest.fail(f"no {what} within {DEADLINE_SECONDS} s")


def query(client: httpx.Client, expression: str) -> list[dict[str, Any]]:
    """Return the instant vector of a query; fail with the error message of Prometheus."""
    answer = client.get("/api/v1/query", params={"query": expression}).json()
    assert answer["status"] == "success", f"{expression}: {answer.get('error')}"
    result = answer["data"]["result"]
    assert isinstance(result, list)
    return result


def values(client: httpx.Client, expression: str, label: str) -> dict[str, float]:
    """Return the values of a query by one of its labels."""
    return {item["metric"].get(label, ""): float(item["value"][1]) for item in query(client, expression)}
