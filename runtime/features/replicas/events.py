"""Replicas in the journal: that they are compared, that ranks differed, and which one was wrong. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.replicas.settings import Difference
from grpo_run.runtime.history.history import HistoryPart


class ReplicasCompared(Event, kw_only=True):
    """Ranks have compared what they hold in common for the first time in an attempt.

    Attributes:
        tensors: that are compared.
        excluded: that are not, because ranks hold values of their own.
    """

    train_call: int | None = None
    tensors: int
    excluded: int = 0


class ReplicasDiffered(Event, kw_only=True):
    """Ranks held different values, see `Difference`."""

    difference: dict[str, Any]


class ReplicaNamed(Event, kw_only=True):
    """An exact repetition has shown which ranks were wrong.

    Attributes:
        ranks: whose values the repetition did not give; empty if it gave those of no rank.
    """

    train_call: int | None = None
    ranks: Sequence[int]


@dataclass(kw_only=True)
class Replicas(HistoryPart):
    """What comparisons have shown.

    Attributes:
        tensors: that are compared in the present call; 0 before the first comparison, or if nothing is.
        differences: of the run, oldest first.
        named: ranks that an exact repetition has shown to be wrong.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (ReplicasCompared, ReplicasDiffered, ReplicaNamed)

    tensors: int = 0
    differences: list[Difference] = field(default_factory=list)
    open: list[Difference] = field(default_factory=list)
    named: list[int] = field(default_factory=list)

    def apply(self, event: ReplicasCompared | ReplicasDiffered | ReplicaNamed) -> None:
        """Take what was compared or found."""
        match event:
            case ReplicasCompared():
                self.tensors = event.tensors
            case ReplicasDiffered():
                found = Difference.model_validate(event.difference)
                self.differences.append(found)
                if not found.ranks:
                    self.open.append(found)
                self.named += found.ranks
            case ReplicaNamed():
                self.open = [
                    one for one in self.open if (one.train_call, one.step) != (event.train_call, event.step)
                ]
                self.named += event.ranks


PART = Replicas
