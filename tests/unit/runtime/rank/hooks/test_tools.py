"""Tools and environments are marked by name, and a feature may be called in their place."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.hooks._tools import mark_tools, uneven_turns
from grpo_run.runtime.rank.points import AgentCall
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.watchdog.observation import Phase, Slot

Reading = Callable[[], Slot]


class Environment:
    """A user's environment without attributes of its own."""

    __slots__ = ()
    seen: ClassVar[list[str]] = []
    reading: ClassVar[Reading]

    def reset(self, **row: Any) -> str:
        """Record what the board shows."""
        self.seen.append(type(self).reading().callback)
        return "observation"


class Session:
    """The part of a rank's session that tools use."""

    rank = 0
    world_size = 1

    def __init__(self, slot: SlotWriter) -> None:
        self.slot = slot
        self.told: list[str] = []
        self.warn = self.told.append


class Trainer:
    """A trainer that calls tools as TRL does."""

    def __init__(self, sync: dict[str, Any], asynchronous: dict[str, Any]) -> None:
        self._sync_tool_dicts = [dict(sync)]
        self._async_tool_dicts = [dict(asynchronous)]
        self._environment_pool = {None: [Environment()]}

    def _tool_call_loop(self) -> list[Any]:
        results = [tool() for tools in self._sync_tool_dicts for tool in tools.values()]
        coroutines = [tool() for tools in self._async_tool_dicts for tool in tools.values()]

        async def gather() -> list[Any]:
            return await asyncio.gather(*coroutines, return_exceptions=True)

        return results + asyncio.run(gather())


def test_a_tool_is_on_the_board_by_its_name(slot: SlotWriter, reading: Reading) -> None:
    """Also while several asynchronous ones run; the rollout's phase is open again afterwards."""
    seen: ClassVar[list[str]] = []

    def add() -> int:
        seen.append(reading().callback)
        return 3

    async def look_up() -> str:
        seen.append(reading().callback)
        await asyncio.sleep(0)
        seen.append(reading().callback)
        return "word"

    trainer = Trainer({"add": add}, {"look_up": look_up, "search": look_up})
    slot.enter(Phase.generate)
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), Session(slot)):  # type: ignore[arg-type]
        assert trainer._tool_call_loop() == [3, "word", "word"]
    assert seen[0] == "tool add"
    assert set(seen[1:]) == {"tool look_up"}
    assert reading().phase is Phase.generate
    assert "_tool_call_loop" not in vars(trainer)


def test_a_feature_is_called_in_place_of_each_function(slot: SlotWriter, reading: Reading) -> None:
    """It is told which row and which environment a call is of, and a boot is on the board by its class."""
    told: list[tuple[str, str, int | None, Any]] = []
    seen: list[str] = []

    class Game:
        def reset(self, **row: Any) -> None:
            """Begin."""

        def move(self) -> str:
            return "moved"

    def replaced(call: AgentCall) -> Callable[..., Any]:
        def inside(*args: Any, **kwargs: Any) -> Any:
            told.append((call.name, call.kind, call.row(args), call.environment(args)))
            seen.append(reading().callback)
            return call.function(*args, **kwargs)

        return inside

    games = [Game(), Game()]
    trainer = Trainer({"move": games[1].move, "print": str}, {})
    trainer._sync_tool_dicts.insert(0, {})
    trainer._environment_pool = {None: games}
    trainer.environments = games  # type: ignore[attr-defined]
    trainer.environment_factories = {None: Game}  # type: ignore[attr-defined]
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), Session(slot), [replaced]):  # type: ignore[arg-type]
        assert isinstance(trainer.environment_factories[None](), Game)  # type: ignore[attr-defined]
        games[0].reset(answer=1)
        assert trainer._tool_call_loop() == ["moved", ""]
    name = Game.__qualname__
    assert told == [
        (f"boot of {name}", "boot", None, None),
        (f"reset of {name}", "reset", 0, games[0]),
        ("tool move", "step", 1, games[1]),
        ("tool print", "tool", 1, None),
    ]
    assert [one[-20:] for one in seen] == [one[0][-20:] for one in told]
    assert trainer.environment_factories == {None: Game}  # type: ignore[attr-defined]


@pytest.mark.parametrize("inherits", [False, True])
def test_a_reset_is_on_the_board_and_the_environment_stays_as_it_is(
    slot: SlotWriter, reading: Reading, inherits: bool
) -> None:
    """Its class has its own `reset` again afterwards, and its instances can be pickled meanwhile."""
    Environment.reading = staticmethod(reading)
    kind = type("Derived", (Environment,), {"__slots__": ()}) if inherits else Environment
    original = Environment.reset
    trainer = Trainer({}, {})
    trainer._environment_pool = {None: [kind()]}
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), Session(slot)):  # type: ignore[arg-type]
        assert kind().reset() == "observation"
        assert isinstance(pickle.loads(pickle.dumps(Environment())), Environment)
    assert Environment.seen.pop() == f"reset of {kind.__qualname__}"
    assert kind.reset is original
    assert ("reset" in vars(kind)) is not inherits


@pytest.mark.parametrize("declare", [staticmethod, classmethod])
def test_a_reset_that_takes_no_instance_is_called_without_one(
    slot: SlotWriter, reading: Reading, declare: Callable[[Any], Any]
) -> None:
    """A static method or a method of the class, as the user has declared it."""
    seen: list[tuple[Any, ...]] = []
    kind = type("Shared", (), {"reset": declare(lambda *given, **row: seen.append((*given, row)))})
    declared = vars(kind)["reset"]
    trainer = Trainer({}, {})
    trainer._environment_pool = {None: [kind()]}
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), Session(slot)):  # type: ignore[arg-type]
        kind().reset(answer=4)  # type: ignore[attr-defined]
    assert seen == [({"answer": 4},) if declare is staticmethod else (kind, {"answer": 4})]
    assert vars(kind)["reset"] is declared


def test_a_trainer_without_tools_is_left_alone(slot: SlotWriter) -> None:
    """SFT and RLOO have none."""
    trainer = SimpleNamespace()
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), Session(slot)):  # type: ignore[arg-type]
        assert vars(trainer) == {}


@pytest.mark.parametrize(
    ("ranks", "tools", "use_vllm", "fsdp", "warned"),
    [
        (2, [print], False, True, True),
        (1, [print], False, True, False),
        (2, [], False, True, False),
        (2, [print], True, True, False),
        (2, [print], False, False, False),
    ],
)
def test_an_agent_whose_ranks_may_deadlock_is_warned_of(
    ranks: int, tools: list[Any], use_vllm: bool, fsdp: bool, warned: bool
) -> None:
    """Only where every call of the model is collective, and only if there are tools."""
    trainer = SimpleNamespace(
        tools=tools, args=SimpleNamespace(use_vllm=use_vllm), is_fsdp_enabled=fsdp, accelerator=None
    )
    text = uneven_turns(TrainerFacts.of(trainer, ranks))
    assert (text is not None) is warned
    if text is not None:
        assert text.startswith("with FSDP all ranks must generate equally often")
