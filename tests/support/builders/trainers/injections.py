"""An injector whose journal also has the order of all that happens, and the steps that it is led through."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.launch.injections import parse_all
from grpo_run.runtime.rank.injector import Injector
from grpo_run.watchdog.observation import Phase


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


def make(
    log: Log, *texts: str, rank: int = 1, world_size: int = 3, fired: Collection[str] = (), **more: Any
) -> Injector:
    """Return the injector of one rank."""
    return Injector(parse_all(texts), rank=rank, world_size=world_size, journal=log, fired=fired, **more)


def alone(number: int) -> int:
    """Return the maximum over one rank."""
    return number


STEP = [
    Phase.data, Phase.forward_backward, Phase.score, Phase.generate, Phase.reward, Phase.reward, Phase.vote,
    Phase.optimizer, Phase.vote,
]  # fmt: skip
"""The phases of a GRPO step, in order. A reward function is a phase inside the phase of all rewards."""


def steps(injector: Injector, first: int, last: int) -> None:
    """Enter the phases of whole steps, as a guarded trainer does."""
    for step in range(first, last + 1):
        for phase in STEP:
            injector.on_phase(phase, step)
