"""Tools and environments are marked by name; a late asynchronous tool is cancelled."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from support.journal import event

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.event import Event
from grpo_run.runtime.launch.config import Timeouts
from grpo_run.runtime.rank.hooks._tools import mark_tools, uneven_turns
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
        self.config = SimpleNamespace(timeouts=Timeouts(tool_seconds=0.05))
        self.told: list[str] = []
        self.events: list[Event] = []
        self.journal = SimpleNamespace(write=self.events.append)
        self.notify = self.warn = self.told.append
        self.warn_in_journal = self.told.append


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


def test_a_late_asynchronous_tool_is_cancelled(slot: SlotWriter, reading: Reading) -> None:
    """Also one that suppresses its cancellation; the others keep their results, and their own exceptions,
    which TRL shows to the model.
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

    session = Session(slot)
    trainer = Trainer({}, {"deaf": deaf, "quick": quick, "fails": fails})
    with mark_tools(trainer, TrainerFacts.of(trainer, 1), session):  # type: ignore[arg-type]
        error, result, own = trainer._tool_call_loop()
    assert (result, own) == (1, wrong)
    assert isinstance(error, TimeoutError)
    assert str(error) == "no answer within 0.05 s"
    assert session.events == [event("tool_cancelled", rank=0, tool="tool deaf", seconds=0.05)]
    assert "tool deaf was cancelled" in session.told[0]
    assert reading().phase is None


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
