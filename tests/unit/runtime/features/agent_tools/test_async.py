"""Tools and environments in TRL's own loop of AsyncGRPO, here without a server and a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import random
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.features.agent_tools import _calls
from grpo_run.runtime.features.agent_tools._async import BoundedLoop
from grpo_run.runtime.features.agent_tools.events import ToolCalls, ToolCancelled
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.history.journal import read_newest
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

worker = pytest.importorskip("trl.experimental.async_grpo.async_rollout_worker", reason="TRL without it")
GROUPS, GENERATIONS = 6, 2
MARK = "call"
AWAY = ConnectionError("away")


class Tokenizer:
    """What the loop asks of a tokenizer: tokens are characters."""

    response_template, response_schema, pad_token_id = "none", None, 0
    chat_template = "none"

    def apply_chat_template(self, messages: list[dict[str, Any]], **_: Any) -> list[int]:
        return [ord(one) for message in messages for one in str(message["content"])]


class Loop(worker._AsyncRolloutLoop):  # type: ignore[misc, name-defined]
    """Each conversation calls both tools, then ends."""

    async def _run_loops(self, stop_event: asyncio.Event) -> None:
        await asyncio.gather(
            self._generate_loop(stop_event=stop_event), self._score_loop(stop_event=stop_event)
        )

    async def _generate_one_turn(self, prompt_ids: list[int]) -> tuple[list[int], list[float]]:
        await asyncio.sleep(0.001)
        return [65, 66], [-1.0, -1.0]


def parsed(tokenizer: Any, ids: Any, prefix: Any = None, tools: Any = None) -> dict[str, Any]:
    called = {"role": "assistant", "content": MARK}
    if MARK not in "".join(map(chr, prefix)):
        names = [tool.__name__ for tool in tools]
        called["tool_calls"] = [{"function": {"name": name, "arguments": {}}} for name in names]  # type: ignore[assignment]
    return called


class Faults:
    """The places of a script; one fails in one of its calls."""

    def __init__(self) -> None:
        self.place, self.at, self.error = "", 0, None
        self.counts: dict[str, int] = {}
        self.released = threading.Event()

    def is_due(self, place: str) -> bool:
        self.counts[place] = self.counts.get(place, 0) + 1
        return (place, self.counts[place]) == (self.place, self.at)

    def visit(self, place: str) -> None:
        if self.is_due(place):
            if self.error is not None:
                raise self.error
            self.released.wait(60.0)


def run_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception | None
) -> tuple[list[Any], list[ToolCancelled], dict[str, ToolCalls]]:
    """Run TRL's loop over some prompts; return its samples, the calls that were ended, and the counts."""
    faults = Faults()
    faults.place, faults.at, faults.error = place, 3, error

    class Game:
        def __init__(self) -> None:
            if faults.is_due("boot"):
                raise error or TimeoutError

        def reset(self, **row: Any) -> None:
            faults.visit("reset")
            self.total = 0

        def add(self) -> str:
            faults.visit("step")
            self.total += 1
            return self.twice()

        def twice(self) -> str:
            return str(2 * self.total)

        def get_reward(self) -> float:
            faults.visit("reward")
            return 1.0

    def search() -> str:
        faults.visit("tool")
        return "found"

    async def look_up() -> str:
        if faults.is_due("async"):
            if error is not None:
                raise error
            await asyncio.sleep(60.0)
        return "found"

    def drawn(completions: list[Any], **_: Any) -> list[float]:
        return [random.random() for _ in completions]

    monkeypatch.setattr(worker, "logger", logging.getLogger(__name__))  # TRL's needs a state of accelerate
    monkeypatch.setattr(worker, "parse_response", parsed)
    monkeypatch.setattr(worker, "is_chat_template_prefix_preserving", lambda tokenizer: True)
    monkeypatch.setattr(_calls, "PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(_calls, "WRITE_SECONDS", 0.0)
    journal = tmp_path / "journal.jsonl"
    bounded = BoundedLoop(
        loop=Loop, settings=ToolSettings(timeout_seconds=0.5), deadlines=DeadlineSettings(), told=RankTools(),
        journal=journal, run_id="run", attempt=0,
    )  # fmt: skip
    samples: queue.Queue[Any] = queue.Queue()
    kept: list[Any] = []
    loop = bounded(
        model_name="model", dataset=[{"prompt": [{"role": "user", "content": str(at)}]} for at in range(3)],
        reward_funcs=[drawn], processing_class=Tokenizer(), eos_token_ids=[66], rollout_buffer=samples,
        model_version_value=SimpleNamespace(value=3), heartbeat_value=SimpleNamespace(value=0.0),
        failed_event=threading.Event(), exception_info_queue=queue.Queue(1), metrics_queue=queue.Queue(),
        tools=[search, look_up], environment_factory=Game, num_generations=GENERATIONS, max_inflight_tasks=3,
    )  # fmt: skip

    def take() -> None:
        until = time.monotonic() + 20.0
        while time.monotonic() < until and sum(one.group_id < GROUPS for one in kept) < GROUPS * GENERATIONS:
            try:
                kept.append(samples.get(timeout=0.1))
            except queue.Empty:
                continue
        faults.released.set()
        with contextlib.suppress(RuntimeError):
            loop._loop.call_soon_threadsafe(loop._stop_event.set)

    taker = threading.Thread(target=take)
    taker.start()
    loop.run()
    taker.join(30.0)
    counts: dict[str, ToolCalls] = {}
    for event in read_newest(journal, ToolCalls, 1 << 20):
        before = counts.get(event.tool)
        counts[event.tool] = event
        if before is not None:
            event.calls += before.calls
            event.failures += before.failures
            event.repeated += before.repeated
    return kept, list(read_newest(journal, ToolCancelled, 1 << 20)), counts


NAMES: dict[str, str] = {
    "tool": "tool search", "async": "tool look_up", "step": "tool add", "reset": "reset of {}",
    "reward": "get_reward of {}",
}  # fmt: skip


@pytest.mark.parametrize("place", list(NAMES))
@pytest.mark.parametrize("error", [None, AWAY])
def test_a_call_that_fails_is_made_again_or_its_conversation_has_no_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception | None
) -> None:
    """The others of its group keep baseline and deviation among themselves."""
    kept, ended, counts = run_loop(tmp_path, monkeypatch, place, error)
    again = place in ("tool", "async") or (error is not None and place != "step")
    left = [one for one in kept if one.metrics["reward"] != one.metrics["reward"]]
    assert len(left) == (not again)
    if left:
        assert left[0].advantage == 0.0
        (other,) = (one for one in kept if one.group_id == left[0].group_id and one is not left[0])
        assert (other.advantage, other.metrics["reward_std"]) == (0.0, 0.0)
    name = NAMES[place].format("run_loop.<locals>.Game")
    assert [(one.tool, one.masked) for one in ended] == ([(name, not again)] if error is None else [])
    assert (counts[name].failures, counts[name].repeated) == (1, int(again))
    if place != "reset":  # after which the game's methods fail
        assert sum(one.failures for one in counts.values()) == 1


@pytest.mark.parametrize(("place", "error"), [("none", None), ("tool", ValueError("no such word"))])
def test_a_loop_whose_calls_return_or_raise_their_own_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, error: Exception | None
) -> None:
    """The model is shown the exception, and trained on it."""
    kept, ended, counts = run_loop(tmp_path, monkeypatch, place, error)
    assert ended == []
    assert all(one.metrics["reward"] > 1.0 for one in kept)
    assert sum(one.failures for one in counts.values()) == (error is not None)
    assert sum(one.repeated for one in counts.values()) == 0
    shown = [
        str(message["content"]) for one in kept for message in one.completion if message["role"] == "tool"
    ]
    assert sum("no such word" in one for one in shown) == (error is not None)
    assert "2" in shown
