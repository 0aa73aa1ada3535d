"""What is called in place of tools and environments: counted, ended when late, and told once."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.event import Event
from grpo_run.runtime.features.agent_tools import _calls
from grpo_run.runtime.features.agent_tools._calls import AgentCalls
from grpo_run.runtime.features.agent_tools._outages import CallEndedError, OtherAnswerError
from grpo_run.runtime.features.agent_tools.events import ToolCalls, ToolCancelled, ToolFault, ToolHistory
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
        self.work: list[int] = []
        self.slot = SimpleNamespace(step=3, record_work=lambda: self.work.append(1))
        self.on_beat: list[Callable[[], None]] = []
        self.events: list[Event] = []
        self.journal = SimpleNamespace(write=self.events.append)
        self.told: list[str] = []
        self.whispered: list[str] = []
        self.show_warning = self.told.append
        self.warn_in_journal = self.whispered.append


@pytest.fixture(autouse=True)
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calls, "PAUSE_SECONDS", 0.0)


def calls_of(session: Session, told: RankTools = RankTools(), trainer: Any = None) -> AgentCalls:  # noqa: B008
    return AgentCalls(trainer or SimpleNamespace(), session, told, masked=True)  # type: ignore[arg-type]


def tool(function: Callable[..., Any], row: int = 0, **fields: Any) -> AgentCall:
    return AgentCall(
        **{"name": "tool search", "kind": "tool", "row": lambda given: row, **fields}, function=function
    )


def test_a_late_asynchronous_tool_is_cancelled() -> None:
    """Twice, also if it suppresses its cancellation; the others keep their results and their own exceptions.
    The row of the late one leaves.
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
    first, second = session.events
    assert isinstance(first, ToolCancelled)
    assert isinstance(second, ToolCancelled)
    assert (first.tool, first.seconds, first.masked) == ("tool deaf", 0.05, False)
    assert (second.tool, second.seconds, second.masked) == ("tool deaf", 0.05, True)
    assert calls.row_reasons() == ["tool", "", ""]
    assert session.told == [
        "rank 1: tool deaf was cancelled after 0.05 s (--tool-timeout): it is made once more",
        "rank 1: tool deaf was cancelled after 0.05 s (--tool-timeout): its sample is left out of the loss",
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
    assert vars(history.totals["tool 00", "tool"]) == {
        "calls": 4, "failures": 2, "repeated": 0, "seconds": 1.0,
    }  # fmt: skip
    assert history.totals["other", "other"].calls == 40
    assert history.ended() == []
    history.apply(ToolCancelled(tool="tool 00", seconds=5.0))
    assert history.ended() == ["Calls that were ended: tool 00 1 time."]
    history.apply(ToolFault(tool="tool 00"))
    assert history.moved == ()
    history.apply(ToolFault(tool="tool 00"))
    assert history.moved == ("tool 00",)
    assert history.as_json()["tools"]["moved"] == ["tool 00"]


class Flaky:
    """A function whose calls fail where `failing` says so."""

    def __init__(self, *failing: Exception | None) -> None:
        self.failing = list(failing)
        self.drawn: list[float] = []

    def __call__(self, word: str = "abc") -> str:
        self.drawn.append(random.random())
        if self.failing and (error := self.failing.pop(0)) is not None:
            raise error
        return word[::-1]

    async def later(self, word: str = "abc") -> str:
        return self(word)


def in_rollout(calls: AgentCalls, function: Callable[[], Any]) -> Any:
    return calls.begin_rollout(lambda rows: function(), [{}, {}])


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_whose_infrastructure_fails_is_made_once_more(asynchronous: bool) -> None:
    """It draws the same random numbers, and nothing is lost."""
    session, flaky = Session(None), Flaky(ConnectionError("away"))
    calls = calls_of(session)
    called = calls.replaced(tool(flaky.later if asynchronous else flaky))
    before = random.getstate()
    answer = in_rollout(calls, lambda: asyncio.run(called()) if asynchronous else called())
    assert answer == "cba"
    assert calls.row_reasons() == ["", ""]
    assert session.told == ["rank 1: tool search failed (ConnectionError: away): it is made once more"]
    assert len(flaky.drawn) == 2
    if not asynchronous:
        assert flaky.drawn[0] == flaky.drawn[1]
        random.setstate(before)
        random.random()
        assert random.random() not in flaky.drawn


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_call_that_fails_again_costs_its_sample(asynchronous: bool) -> None:
    """TRL gets the exception. What follows of the row is not made again."""
    session, flaky = Session(None), Flaky(*(ConnectionResetError("away") for _ in range(3)))
    calls = calls_of(session)
    called = calls.replaced(tool(flaky.later if asynchronous else flaky, row=1))

    def rollout() -> None:
        for _ in range(2):
            with pytest.raises(ConnectionResetError):
                asyncio.run(called()) if asynchronous else called()

    in_rollout(calls, rollout)
    assert calls.row_reasons() == ["", "tool"]
    assert flaky.failing == []
    assert session.told[1] == (
        "rank 1: tool search failed (ConnectionResetError: away): its sample is left out of the loss"
    )
    assert session.events == []


def test_an_exception_that_the_script_means_is_shown_at_once() -> None:
    """Nothing is repeated, and nothing said."""
    session, flaky = Session(None), Flaky(FileNotFoundError("no such file"), None)
    calls = calls_of(session)
    with pytest.raises(FileNotFoundError):
        in_rollout(calls, calls.replaced(tool(flaky)))
    assert (calls.row_reasons(), session.told, flaky.failing) == (["", ""], [], [None])


class Game:
    """An environment that counts, and whose calls fail where `failing` says so."""

    def __init__(self) -> None:
        self.failing: list[Exception | None] = []
        self.total, self.offset = 0, 0

    def reset(self, **row: Any) -> str:
        self.fail()
        self.total = self.offset
        return "begin"

    def add(self, number: int) -> str:
        self.fail()
        self.total += number
        return str(self.total)

    def get_reward(self) -> float:
        self.fail()
        return float(self.total)

    def fail(self) -> None:
        if self.failing and (error := self.failing.pop(0)) is not None:
            raise error


def played(session: Session, game: Game) -> tuple[AgentCalls, Callable[[], Any], Callable[..., Any], Any]:
    calls = calls_of(session)
    of_game = {"row": lambda given: 0, "environment": lambda given: game}
    reset = calls.replaced(AgentCall(name="reset of Game", kind="reset", function=Game.reset, **of_game))
    add = calls.replaced(AgentCall(name="tool add", kind="step", function=game.add, **of_game))
    reward = calls.replaced(
        AgentCall(name="get_reward of Game", kind="reward", function=Game.get_reward, **of_game)
    )
    return calls, lambda: reset(game), add, lambda: reward(game)


def test_an_environment_that_fails_in_the_middle_is_brought_to_where_it_was() -> None:
    """It is reset, and what was called before is called again."""
    session, game = Session(None), Game()
    calls, reset, add, reward = played(session, game)

    def rollout() -> list[Any]:
        found = [reset(), add(number=3)]
        game.failing = [ConnectionError("away")]
        return [*found, add(number=4), reward()]

    assert in_rollout(calls, rollout) == ["begin", "3", "7", 7.0]
    assert calls.row_reasons() == ["", ""]
    text = "tool add failed (ConnectionError: away): it is made once more"
    assert session.told == [f"rank 1: {text}, after those before it in its environment"]


@pytest.mark.parametrize("again", ["other answers", "fails", "raises its own"])
def test_an_environment_that_cannot_be_brought_there_costs_its_sample(again: str) -> None:
    """It answers otherwise, or fails when it is reset."""
    session, game = Session(None), Game()
    calls, reset, add, _ = played(session, game)

    def rollout() -> None:
        reset()
        add(number=3)
        game.offset = int(again == "other answers")
        own = KeyError("own") if again == "raises its own" else TimeoutError()
        game.failing = [ConnectionError("away"), *([own] if again != "other answers" else [])]
        with pytest.raises(OtherAnswerError):
            add(number=4)

    in_rollout(calls, rollout)
    assert calls.row_reasons() == ["tool", ""]


def ended_in(which: str, offset: int = 0, *, boots: bool = True) -> tuple[AgentCalls, list[Any], list[Game]]:
    """Play a game in which a call is ended. Return the answers, and the games: that in use first."""
    session, games = Session(None), [Game(), Game()]
    old, games[1].offset = games[0], offset
    calls = calls_of(session)

    def renew(given: tuple[Any, ...]) -> tuple[Any, ...]:
        if not boots:
            raise KeyError("no image")
        games.reverse()
        return tuple(games[0] if one is old else one for one in given)

    fields: dict[str, Any] = {
        "row": lambda given: 0, "environment": lambda given: games[0], "renew": renew,
    }  # fmt: skip
    reset = calls.replaced(AgentCall(name="reset of Game", kind="reset", function=Game.reset, **fields))
    add = calls.replaced(AgentCall(name="tool add", kind="step", function=old.add, **fields))
    reward = calls.replaced(AgentCall(name="get_reward", kind="reward", function=Game.get_reward, **fields))
    answers: list[Any] = []

    def rollout() -> None:
        for name in ("reset", "add", "reward"):
            old.failing = [CallEndedError(1.0, "interrupted")] if name == which else []
            try:
                answers.append(
                    add(number=3) if name == "add" else {"reset": reset}.get(name, reward)(games[0])
                )
            except OtherAnswerError as error:
                answers.append(error)

    in_rollout(calls, rollout)
    return calls, answers, games


@pytest.mark.parametrize("which", ["reset", "add", "reward"])
def test_a_call_that_was_ended_is_made_again_in_a_new_environment(which: str) -> None:
    """It was brought to where the old one was, which is not used again."""
    calls, answers, games = ended_in(which)
    assert answers == ["begin", "3", 3.0]
    assert calls.row_reasons() == ["", ""]
    assert calls._broken == games[1:]


@pytest.mark.parametrize(
    ("which", "boots"), [("reset", False), ("add", False), ("reward", False), ("reward", True)]
)
def test_an_environment_that_has_no_successor_costs_its_sample(which: str, boots: bool) -> None:
    """It does not boot, or answers otherwise; and it is not used again."""
    calls, answers, games = ended_in(which, offset=1, boots=boots)
    assert answers[2] == (3.0 if which == "reset" else 0.0)
    assert answers[0] == (None if which == "reset" else "begin")
    assert isinstance(answers[1], OtherAnswerError) is (which == "add")
    assert calls.row_reasons() == ["tool", ""]
    assert games[0] in calls._broken


def test_an_environment_that_is_not_reset_gives_no_observation_and_no_reward() -> None:
    """Its sample leaves, whatever its reward would be, and TRL makes another environment."""
    session, game = Session(None), Game()
    calls, reset, _, reward = played(session, game)
    game.failing = [ConnectionError("away")] * 2 + [AttributeError("total")]
    assert in_rollout(calls, lambda: (reset(), reward())) == (None, 0.0)
    assert calls.row_reasons() == ["tool", ""]
    assert calls._broken == [game]


def test_a_reward_of_an_environment_that_cannot_be_reached_is_none() -> None:
    """It is asked twice. An error of its own is raised."""
    session, game = Session(None), Game()
    calls, reset, _, reward = played(session, game)

    def rollout() -> Any:
        reset()
        game.failing = [ConnectionError("away")] * 2
        return reward()

    assert in_rollout(calls, rollout) == 0.0
    assert calls.row_reasons() == ["tool", ""]
    in_rollout(calls, reset)
    game.failing = [KeyError("own")]
    with pytest.raises(KeyError):
        reward()


def test_where_rows_cannot_leave_exceptions_are_those_of_the_script() -> None:
    """A release of TRL that cannot leave them out: a zero must not take the place of a reward."""
    session, game = Session(None), Game()
    calls, reset, _, reward = played(session, game)
    calls._masked = False
    game.failing = [ConnectionError("away")] * 4
    for function in (reset, reward):
        with pytest.raises(ConnectionError):
            in_rollout(calls, function)
    assert session.told[-1].endswith("the model is shown the error")


def test_a_boot_is_tried_for_as_long_as_its_infrastructure_is_away() -> None:
    """Within its limit."""
    session, now = Session(10.0), 0.0
    tries = [ConnectionError("away")] * 4

    def boot() -> int:
        nonlocal now
        now += 3.0
        if tries:
            raise tries.pop()
        return 7

    calls = AgentCalls(SimpleNamespace(), session, RankTools(), masked=True, clock=lambda: now)  # type: ignore[arg-type]
    booted = calls.replaced(tool(boot, name="boot of Game", kind="boot"))
    with pytest.raises(ConnectionError):
        booted()
    assert booted() == 7


def test_a_call_that_does_nothing_is_told_to_the_hang_detector_until_its_limit() -> None:
    """Half a deadline after it has begun, and then every half one."""
    session, now = Session(100.0), 0.0
    calls = AgentCalls(SimpleNamespace(), session, RankTools(), masked=True, clock=lambda: now)  # type: ignore[arg-type]
    told = []

    async def waits() -> None:  # nobody interrupts it
        nonlocal now
        for _ in range(13):
            now += 10.0
            calls._beat()
            told.append(len(session.work))

    asyncio.run(calls.replaced(tool(waits))())
    assert told == [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3]
    now += 100.0
    calls._beat()
    assert len(session.work) == 3


def test_a_reset_gets_a_seed_unless_the_data_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the place of its sample among those of all ranks."""
    monkeypatch.setattr(_calls, "seed_of", lambda trainer, sample: 100 + sample)
    calls = calls_of(Session(None))
    seeds: list[Any] = []

    def reset(environment: object, seed: int | None = None, **row: Any) -> None:
        seeds.append(seed)

    call = AgentCall(name="reset of Game", kind="reset", function=reset, row=lambda given: 1)
    called = calls.replaced(call)
    in_rollout(calls, lambda: (called(None), called(None, seed=5)))
    assert seeds == [103, 5]


def test_an_environment_whose_call_raised_its_own_is_not_brought_back() -> None:
    """What that call has changed is unknown."""
    session, game = Session(None), Game()
    calls, reset, add, _ = played(session, game)

    def rollout() -> None:
        reset()
        game.failing = [KeyError("own"), ConnectionError("away")]
        with pytest.raises(KeyError):
            add(number=3)
        with pytest.raises(ConnectionError):
            add(number=4)

    in_rollout(calls, rollout)
    assert calls.row_reasons() == ["tool", ""]
