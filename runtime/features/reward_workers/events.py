"""Reward functions in the journal: which have failed in a rank and run in workers since then. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import IncidentConfirmed
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.json_values import from_json
from grpo_run.watchdog.text import TextEnum

EVERY_FUNCTION = "*"
"""Stands for all functions, if it is not known which one has failed."""
FAILURES_TO_MOVE = 2
"""Failures of one function at one step. The first may have been a server that was away."""


class FailureKind(TextEnum):
    """How a call in a worker failed: the values in the journal, which are reasons of masked samples, too."""

    exception = "exception"
    timeout = "timeout"
    died = "died"
    memory = "memory"
    output = "output"
    not_tried = "not_tried"


class RewardMoved(Event, kw_only=True):
    """A function runs in workers from the next attempt on, after so many failures at one step."""

    file: str = ""
    function: str
    failures: int = 0


class RewardFailed(Event, kw_only=True):
    """A call in a worker has failed. For people.

    Attributes:
        kind: of the failure, see `FailureKind`.
        masked: samples that got no reward, of a batch of `batch`.
        samples: the first of them, with the ends of their prompts and completions.
    """

    function: str = ""
    kind: str
    message: str = ""
    traceback: str = ""
    masked: int = 0
    batch: int = 0
    samples: Sequence[dict[str, Any]] = ()


@dataclass(frozen=True, kw_only=True)
class MovedReward:
    """A reward function by the place of its code: the source file, and the name after `def`."""

    file: str = ""
    function: str

    @property
    def name(self) -> str:
        """How the user is told of it."""
        return (
            "every reward function" if self.function == EVERY_FUNCTION else f"reward function {self.function}"
        )


ALL = MovedReward(function=EVERY_FUNCTION)


@dataclass(kw_only=True)
class RewardFailures(HistoryPart):
    """The reward functions of one run that have failed.

    Attributes:
        moved: those that run in workers, in the order in which they were moved.
        last_raised: whether the function that failed in the last incident has raised, not hung.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (IncidentConfirmed, RewardMoved)

    moved: list[MovedReward] = field(default_factory=list)
    last_raised: bool = False
    _failures: Counter[tuple[int, int, MovedReward]] = field(default_factory=Counter)
    _last: tuple[int, int, MovedReward] | None = None

    @property
    def due(self) -> MovedReward | None:
        """The function that is to be moved after the last incident; None if there is none.

        One that raises before the call's first step is done has not worked yet: it is taken to be broken, not
        moved.
        """
        if self._last is None or self._failures[self._last] < FAILURES_TO_MOVE:
            return None
        _, step, found = self._last
        if found in self.moved or ALL in self.moved or (self.last_raised and step == 0):
            return None
        return found

    def apply(self, event: IncidentConfirmed | RewardMoved) -> None:
        """Take a fault, in which a reward function may have failed, or what has become of a function."""
        match event:
            case IncidentConfirmed():
                self._apply_incident(event)
            case RewardMoved():
                place = MovedReward(file=event.file, function=event.function)
                if place not in self.moved:
                    self.moved.append(place)

    def _apply_incident(self, event: IncidentConfirmed) -> None:
        self._last = None
        if failed := event.failed_reward:
            self.last_raised = bool(failed.get("raised"))
            self._last = (event.train_call or 0, event.step or 0, from_json(MovedReward, failed))
            self._failures[self._last] += 1


PART = RewardFailures
