"""A tool and an environment for `async_prompts.py --agent`, of which one has a fault.

TRL's process of the rollouts imports this module, and is told by the variable `AGENT_FAULT` what happens in
which call of which place: `sleep:tool:6`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from typing import Any

import agent
from trl.experimental.async_grpo import async_rollout_worker

FAULT, PLACE, AT = os.environ.get("AGENT_FAULT", "none:none:0").split(":")
LONG_SECONDS = 600.0
AWAY_SECONDS = 3.0
counts = {place: itertools.count(1) for place in ("tool", "async_tool", "boot", "reset", "step", "reward")}
away_until = 0.0


def visit(place: str) -> None:
    """Cause the fault if it is due."""
    global away_until
    number = next(counts[place])
    if place != PLACE:
        return
    if FAULT == "outage":
        if number == int(AT):
            away_until = time.monotonic() + AWAY_SECONDS
        if time.monotonic() < away_until:
            raise ConnectionError("away")
    elif number == int(AT):
        if FAULT == "error":
            raise ConnectionError("away")
        if FAULT == "own_error":
            raise ValueError("there is no such number")
        time.sleep(LONG_SECONDS if FAULT == "sleep" else 2.5)  # sleeps


class Sums(agent.Sums):
    """An environment whose tools add and remember, and whose own methods call one another."""

    def __init__(self) -> None:
        visit("boot")

    def reset(self, **row: Any) -> None:
        """Begin a rollout."""
        visit("reset")
        super().reset(**row)

    def add(self, number: int) -> str:
        """Add a number, in two parts.

        Args:
            number: to add.
        """
        visit("step")
        super().add(number - 1)
        return super().add(1)

    def get_reward(self) -> float:
        """Return a little."""
        visit("reward")
        return 0.001 * self.total


async def look_up(word: str) -> str:
    """Look up a word.

    Args:
        word: to look up.
    """
    if PLACE == "async_tool" and next(counts["async_tool"]) == int(AT) and FAULT == "sleep":
        await asyncio.sleep(LONG_SECONDS)
    return word[::-1]


def search(word: str) -> str:
    """Look up a word in a thread.

    Args:
        word: to look up.
    """
    visit("tool")
    return word[::-1]


def read_a_tool_call(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """Return the completion as a message, with calls of both unless they have answered already."""
    message: dict[str, Any] = agent.read_a_tool_call(tokenizer, ids, prefix, tools)
    for call in message.get("tool_calls", ()):
        if PLACE == "tool" and call["function"]["name"] == "look_up":
            call["function"]["name"] = "search"
    return message


async_rollout_worker.parse_response = read_a_tool_call
