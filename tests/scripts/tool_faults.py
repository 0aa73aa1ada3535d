"""A plain TRL GRPO script of an agent whose tool or environment has one fault.

Each first completion calls `search`, a tool, and `add`, a method of the environment, as `agent.py` has it.
`--fault` happens in the `--at`th call of `--place` on rank `--on`, in one attempt, or in each (`--always`).
With the fault `outage`, all calls of a place fail for `--outage-seconds` from then on. `--draws` lets tool
and environment draw random numbers. A completion that was shown that the server is away has the reward 0, and
is counted in a file.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import agent
import tiny

RANK = int(os.environ.get("RANK", "0"))
LONG_SECONDS = 600.0
AWAY = "away"
PLACES = ("tool", "reset", "step", "reward")
counts = {place: itertools.count(1) for place in PLACES}
chosen: Any = None
away_until = 0.0
zeros = 0


def sleep() -> None:
    time.sleep(LONG_SECONDS)  # sleeps


def loop() -> None:
    while True:  # loops
        pass


def retry() -> None:
    for _ in range(100):
        try:
            time.sleep(LONG_SECONDS)
        except Exception as failure:  # noqa: BLE001 - a tool that repeats whatever fails
            print(failure)


def error() -> None:
    raise ConnectionError(AWAY)


def outage() -> None:
    global away_until
    away_until = time.monotonic() + chosen.outage_seconds
    error()


def locked_in_c(library: Any = None) -> None:
    """Wait in C for ever, whatever signals come: lock a mutex twice."""
    library, mutex = library or ctypes.CDLL(None), ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_lock(mutex)  # waits in C


def locked_with_gil() -> None:
    locked_in_c(ctypes.PyDLL(None))


def segfault() -> None:
    ctypes.string_at(0)


FAULTS = {
    "sleep": sleep, "loop": loop, "retry": retry, "c": locked_in_c, "gil": locked_with_gil,
    "segfault": segfault, "outage": outage,
}  # fmt: skip


def visit(place: str) -> None:
    """Cause the fault if it is due."""
    number = next(counts[place])
    if (place, RANK) != (chosen.place, chosen.on):
        return
    if time.monotonic() < away_until:
        error()
    done = Path("fault_done")
    if number == chosen.at and (chosen.always or not done.exists()):
        done.touch()
        FAULTS[chosen.fault]()


class Sums(agent.Sums):
    """An environment whose tools add and remember."""

    def reset(self, seed: int | None = None, **row: Any) -> None:
        """Begin a rollout."""
        visit("reset")
        super().reset(**row)
        if chosen.draws:
            self.total = random.Random(seed).randrange(1000)
            with open(f"seeds-{RANK}", "a") as file:
                print(seed, file=file)

    def add(self, number: int) -> str:
        """Add a number.

        Args:
            number: to add.
        """
        visit("step")
        return super().add(number)

    def get_reward(self) -> float:
        """Return nothing, at times not at all."""
        visit("reward")
        return 0.5


def search(word: str) -> str:
    """Look up a word.

    Args:
        word: to look up.
    """
    if chosen.draws:
        word += str(random.randrange(1000))
    visit("tool")
    return word[::-1]


def reward(completions: list[Any], **row: Any) -> list[float]:
    """Reward the length of the last message, and failures with 0."""
    global zeros
    shown = [any(AWAY in str(one["content"]) for one in messages) for messages in completions]
    zeros += sum(shown)
    Path(f"zeros-{RANK}").write_text(json.dumps(zeros))
    lengths = agent.length(completions)
    return [0.0 if failure else length for failure, length in zip(shown, lengths, strict=True)]


def read_a_tool_call(tokenizer: Any, ids: list[int], prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    """Return the completion as a message, with calls of both unless they have answered already."""
    message: dict[str, Any] = agent.read_a_tool_call(tokenizer, ids, prefix, tools)
    for call in message.get("tool_calls", ()):
        if call["function"]["name"] == "look_up":
            call["function"]["name"] = "search"
    return message


def main() -> None:
    global chosen
    parser = tiny.rollout_parser(__doc__)
    parser.add_argument("--fault", choices=[*FAULTS, "none"], default="none")
    parser.add_argument("--place", choices=PLACES, default="tool")
    parser.add_argument("--outage-seconds", type=float, default=5.0)
    parser.add_argument("--draws", action="store_true")
    parser.add_argument("--at", type=int, default=6)
    parser.add_argument("--on", type=int, default=1)
    parser.add_argument("--always", action="store_true")
    chosen = arguments = parser.parse_args()
    if chosen.fault == "none":
        chosen.on = -1
    agent.train(arguments, read_a_tool_call, tools=[search], environment_factory=Sums, reward_funcs=reward)


if __name__ == "__main__":
    main()
