"""Reward functions according to the journal: which have failed in a rank, which run in workers since then,
and their failures.

A function that has failed twice at one step runs in a worker process from the next attempt on, where a call
can be ended without its rank. Replayed as part of `runtime.history.history`; read by the recovery policy, by
the settings of the ranks and by the metrics. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import IncidentConfirmed, StepLogged
from grpo_run.watchdog.json_values import from_json

EVERY_FUNCTION = "*"
"""Stands for all functions, if it is not known which one has failed."""
MOST_FUNCTIONS = 8
OTHER = "other"
FAILURES_TO_MOVE = 2
"""Failures of one function at one step. The first may have been a server that was away."""


class FailureKind(str, Enum):
    """How a call in a worker failed. The values appear in the journal and as metric labels."""

    exception = "exception"
    timeout = "timeout"
    died = "died"
    memory = "memory"
    output = "output"
    not_tried = "not_tried"

    def __str__(self) -> str:
        return self.value


class RewardMoved(Event, kw_only=True):
    """A function runs in workers from the next attempt on, after so many failures at one step."""

    file: str = ""
    function: str
    failures: int = 0


class RewardFailed(Event, kw_only=True):
    """A call in a worker has failed.

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


class RewardCalls(Event, kw_only=True, tag="reward_latency"):
    """The calls of one function in one rank and attempt so far."""

    function: str
    calls: int
    total_seconds: float
    longest_seconds: float


class RewardWorkerReplaced(Event, kw_only=True):
    """A worker was replaced between two calls."""

    reason: str = ""


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
class RewardLatency:
    """The calls of one function in one rank and attempt so far."""

    calls: int = 0
    total_seconds: float = 0.0
    longest_seconds: float = 0.0


@dataclass(kw_only=True)
class RewardRecord:
    """The reward functions of one run.

    Attributes:
        moved: those that run in workers, in the order in which they were moved.
        failures: failed calls by kind.
        masked: samples that got no reward.
        replaced: workers that were replaced between two calls.
        latencies: by (attempt, rank, function).
        last_raised: whether the function that failed in the last incident has raised, not hung.
        logged: `mean` and `std` of each function as logged last; at most `MOST_FUNCTIONS` and `other`.
    """

    moved: list[MovedReward] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)
    masked: int = 0
    replaced: int = 0
    latencies: dict[tuple[int, int, str], RewardLatency] = field(default_factory=dict)
    last_raised: bool = False
    logged: dict[str, Mapping[str, float]] = field(default_factory=dict)
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
        if self.last_raised and self._last[1] == 0:
            return None
        found = self._last[2]
        return None if found in self.moved or ALL in self.moved else found

    def apply_incident(self, event: IncidentConfirmed) -> None:
        """A fault; `failed_reward` is set if a reward function has raised or hung."""
        self._last = None
        failed = event.failed_reward
        if not failed:
            return
        place = from_json(MovedReward, failed)
        self.last_raised = bool(failed.get("raised"))
        self._last = (event.train_call or 0, event.step or 0, place)
        self._failures[self._last] += 1

    def apply(self, event: RewardMoved | RewardFailed | RewardCalls | RewardWorkerReplaced) -> None:
        """Take what has become of a function or of a call."""
        match event:
            case RewardMoved():
                place = MovedReward(file=event.file, function=event.function)
                if place not in self.moved:
                    self.moved.append(place)
            case RewardFailed():
                self.failures[event.kind] += 1
                self.masked += event.masked
            case RewardCalls():
                self.latencies[event.attempt or 0, event.rank or 0, event.function] = RewardLatency(
                    calls=event.calls,
                    total_seconds=event.total_seconds,
                    longest_seconds=event.longest_seconds,
                )
            case RewardWorkerReplaced():
                self.replaced += 1

    def apply_logged(self, event: StepLogged) -> None:
        """Take a step whose log may have the rewards of each function."""
        if event.reward_functions:
            self.logged = dict(itertools.islice(event.reward_functions.items(), MOST_FUNCTIONS + 1))

    def by_function(self) -> dict[str, RewardLatency]:
        """Return the calls of each function over ranks and attempts; a function beyond `MOST_FUNCTIONS`
        counts as `other`.
        """
        found: dict[str, RewardLatency] = {}
        names = sorted({function for _, _, function in self.latencies})[:MOST_FUNCTIONS]
        for (_, _, function), one in sorted(self.latencies.items()):
            total = found.setdefault(function if function in names else OTHER, RewardLatency())
            total.calls += one.calls
            total.total_seconds += one.total_seconds
            total.longest_seconds = max(total.longest_seconds, one.longest_seconds)
        return found
