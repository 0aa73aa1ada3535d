"""What is called in place of tools and environments: counted, ended when late, and told once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.event import Event
from grpo_run.runtime.features.agent_tools.events import ToolCalls, ToolCancelled, ToolFault, ToolHistory
from grpo_run.runtime.features.agent_tools.rank import AgentCalls
from grpo_run.runtime.features.agent_tools.settings import RankTools, ToolSettings
from grpo_run.runtime.rank.points import AgentCall
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations


class Session:
    """The part of a rank's session that the room uses."""

    rank = 1
    is_rank = True

    def __init__(self, timeout_seconds: float | None) -> None:
        settings = ToolSettings(timeout_seconds=timeout_seconds)
        self.config = SimpleNamespace(of=lambda kind: settings, deadlines=DeadlineSettings())
        self.slot = SimpleNamespace(step=3, record_work=lambda: None)
        self.on_beat: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.journal = SimpleNamespace(write=self.events.append)
        self.told: list[str] = []
        self.whispered: list[str] = []
        self.show_warning = self.told.append
        self.warn_in_journal = self.whispered.append


def calls_of(session: Session, told: RankTools = RankTools(), trainer: Any = None) -> AgentCalls:  # noqa: B008
    return AgentCalls(trainer or SimpleNamespace(), session, told, masked=True)  # type: ignore[arg-type]


def tool(function: Callable[..., Any], row: int = 0, **fields: Any) -> AgentCall:
    return AgentCall(
        **{"name": "tool search", "kind": "tool", "row": lambda given: row, **fields}, function=function
    )


def test_a_late_asynchronous_tool_is_cancelled() -> None:
    """Also one that suppresses its cancellation; the others keep their results and their own exceptions. The
    row of the late one leaves.
    """

    async def deaf() -> None:
        for _ in range(2):
            try:
                await asyncio.sleep(0.5)
            except asyncio.CancelledError:
                continue

    async def quick() -> int:
        return 1

    wrong = KeyError("tool")

    async def fails() -> None:
        raise wrong

    session = Session(0.05)
    calls = calls_of(session)
    made = [
        calls.replaced(tool(function, row, name=f"tool {function.__name__}"))
        for row, function in enumerate((deaf, quick, fails))
    ]

    async def gather() -> list[Any]:
        return await asyncio.gather(*(one() for one in made), return_exceptions=True)

    error, result, own = calls.begin_rollout(lambda rows: asyncio.run(gather()), [{}, {}, {}])
    assert (result, own) == (1, wrong)
    assert isinstance(error, TimeoutError)
    assert str(error) == "no answer within 0.05 s"
    (ended,) = session.events
    assert isinstance(ended, ToolCancelled)
    assert (ended.tool, ended.seconds, ended.masked) == ("tool deaf", 0.05, True)
    assert calls.row_reasons() == ["tool", "", ""]
    assert session.told == [
        "rank 1: tool deaf was cancelled after 0.05 s (--tool-timeout): its sample is left out of the loss"
    ]


def test_calls_are_counted_by_name_and_written_at_the_end() -> None:
    """An exception is a failure, and is the tool's own."""
    session = Session(None)
    calls = calls_of(session)

    def search(word: str) -> str:
        return word[::-1] if word else str(1 / 0)

    with calls.armed():
        called = calls.replaced(tool(search))
        assert called(word="abc") == "cba"
        with pytest.raises(ZeroDivisionError):
            called(word="")
        assert session.on_beat
    assert session.on_beat == []
    (event,) = session.events
    assert isinstance(event, ToolCalls)
    assert (event.rank, event.step, event.tool, event.kind) == (1, 4, "tool search", "tool")
    assert (event.calls, event.failures) == (2, 1)
    assert session.told == []


def test_a_boot_that_fails_is_tried_once_more() -> None:
    """The second failure is the script's."""
    session, tries = Session(None), [ValueError("one"), None, ValueError("two"), ValueError("three")]

    def boot() -> int:
        if (error := tries.pop(0)) is not None:
            raise error
        return 7

    booted = calls_of(session).replaced(tool(boot, name="boot of Game", kind="boot"))
    assert booted() == 7
    with pytest.raises(ValueError, match="three"):
        booted()
    assert session.told[0] == "boot of Game failed (ValueError: one): it is tried once more"


def test_an_environment_in_which_a_call_was_ended_is_not_used_again() -> None:
    """TRL makes another one in its place."""
    first, second = object(), object()
    trainer = SimpleNamespace(_environment_pool={None: [first, second]})
    session = Session(0.01)
    calls = calls_of(session, trainer=trainer)

    async def late() -> None:
        await asyncio.sleep(1)

    step = calls.replaced(tool(late, kind="step", environment=lambda given: first))
    with pytest.raises(TimeoutError):
        asyncio.run(step())
    calls.begin_rollout(lambda rows: None, [{}])
    assert trainer._environment_pool == {None: [second]}
    assert calls.row_reasons() == [""]


def test_a_tool_in_which_attempts_have_ended_leaves_the_rank_if_it_can() -> None:
    """It is told once; a method of an environment stays."""
    session = Session(None)
    calls = calls_of(session, RankTools(moved=("tool search", "tool add")))
    with calls.armed():
        for _ in range(2):
            served = calls.replaced(tool(lambda word: word[::-1]))
            step = calls.replaced(tool(lambda number: number, name="tool add", kind="step"))
        assert served(word="abc") == "cba"
        assert step(number=3) == 3
    assert [text.partition(",")[0] for text in session.told] == [
        "tool search runs in a worker process from here on",
        "tool add cannot be moved to a worker",
    ]


def test_what_earlier_attempts_have_shown_is_known() -> None:
    """As the supervisor tells it."""
    told = RankTools(durations={"tool search": Durations.of([500.0] * 30).as_json()})
    calls = calls_of(Session(None), told)
    calls.replaced(tool(len))
    assert calls._limit(calls._known["tool search"]) > 1500


def test_a_limit_below_zero_is_refused() -> None:
    """Zero is none."""
    assert ToolSettings(timeout_seconds=0).timeout_seconds == 0
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(ConfigError, match="--tool-timeout"):
            ToolSettings(timeout_seconds=wrong)


def test_a_runs_calls_add_up_by_name_and_names_are_bounded() -> None:
    """A tool moves after two attempts have ended in it."""
    history = ToolHistory()
    for number in range(30):
        for _ in range(2):
            one = ToolCalls(tool=f"tool {number:02}", kind="tool", calls=2, failures=1, total_seconds=0.5)
            history.apply(one)
    assert len(history.totals) == 21
    assert vars(history.totals["tool 00", "tool"]) == {"calls": 4, "failures": 2, "seconds": 1.0}
    assert history.totals["other", "other"].calls == 40
    assert history.ended() == []
    history.apply(ToolCancelled(tool="tool 00", seconds=5.0))
    assert history.ended() == ["Calls that were ended: tool 00 1 time."]
    history.apply(ToolFault(tool="tool 00"))
    assert history.moved == ()
    history.apply(ToolFault(tool="tool 00"))
    assert history.moved == ("tool 00",)
    assert history.as_json()["tools"]["moved"] == ["tool 00"]
