"""A rank with injections whose journal also has the order of all that happens, and the steps that it is led
through.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.injections.rank import PART
from grpo_run.runtime.features.injections.settings import InjectionSettings, RankInjections
from grpo_run.runtime.rank.points import CallPoints
from grpo_run.watchdog.observation import Phase

STEP = [
    Phase.data, Phase.forward_backward, Phase.score, Phase.generate, Phase.reward, Phase.reward, Phase.vote,
    Phase.optimizer, Phase.vote,
]  # fmt: skip
"""The phases of a GRPO step, in order. A reward function is a phase inside the phase of all rewards."""


class Log:
    """A journal that also records the order of everything that happens."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.records: list[Any] = []

    def write(self, event: Event) -> None:
        self.lines.append("journaled")
        self.records.append(event)

    def sync(self) -> None:
        self.lines.append("on disk")


class InjectedRank:
    """One rank of a run, as far as injections use its session.

    It is its own slot of the board.

    Attributes:
        open_phases: on the board.
        maximum: the largest of all ranks' values.
    """

    def __init__(
        self, log: Log, *texts: str, rank: int = 1, world_size: int = 3, fired: Collection[str] = ()
    ) -> None:
        self.open_phases: tuple[Phase, ...] = ()
        self.maximum: Callable[[int], int] = int
        told = {"injections": RankInjections(fired=tuple(fired)).model_dump()}
        session: Any = SimpleNamespace(
            rank=rank, world_size=world_size, journal=log, slot=self,
            votes=SimpleNamespace(maximum=lambda number: self.maximum(number)),
            config=SimpleNamespace(of=lambda settings: InjectionSettings(inject=texts)),
            settings=SimpleNamespace(features=told),
        )  # fmt: skip
        self.step = 0
        self.on_enter: Callable[[Phase], None] = lambda phase: None
        self._part = type(PART)()
        self._session = session
        self._part.script_begins(session)

    def enter(self, phase: Phase, step: int) -> None:
        """Enter a phase while a step is in progress."""
        self.step = step - 1
        self.on_enter(phase)

    def steps(self, first: int, last: int) -> None:
        """Enter the phases of whole steps, as a guarded trainer does."""
        for step in range(first, last + 1):
            for phase in STEP:
                self.enter(phase, step)

    @contextmanager
    def call(self, *models: Any, trainer: Any = None) -> Iterator[None]:
        """Enter a call: that of a trainer, or a loop."""
        leave = None if trainer else lambda: None
        with ExitStack() as hooks:
            points = CallPoints(train_call=1, trainer=trainer, models=models, hooks=hooks, leave_loop=leave)
            self._part.call(self._session, points)
            yield
