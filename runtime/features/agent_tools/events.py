"""Tools and environments of agents in the journal, and what their calls add up to. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from grpo_run.runtime.charts import Chart
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.watchdog.text import counted

FAULTS_TO_MOVE = 2
"""Attempts that have ended in one tool. The first may have been a server that was away."""
MOST_NAMES = 20
"""Names that are counted apart; the model cannot make new ones, but a script may have many tools."""
OTHER = "other"


class ToolCalls(Event, kw_only=True):
    """Calls in one rank since the last event of this name: `failures` of them have raised or were ended, and
    `repeated` of these were made once more.
    """

    tool: str
    kind: str
    calls: int
    failures: int
    repeated: int = 0
    total_seconds: float


class ToolCancelled(Event, kw_only=True):
    """A call was ended after so many seconds.

    Attributes:
        where: the line of the script, as `file.py:40`; "" if it is not known.
        usual_seconds: the median of the calls before; None without any.
        masked: its sample is left out of the loss.
    """

    tool: str
    seconds: float
    where: str = ""
    usual_seconds: float | None = None
    masked: bool = False


class ToolFault(Event, kw_only=True):
    """An attempt has ended while a rank was in this call."""

    tool: str


@dataclass(kw_only=True)
class Totals:
    """The calls of one name: how many, how many of them failed and were made once more, and their seconds."""

    calls: int = 0
    failures: int = 0
    repeated: int = 0
    seconds: float = 0.0


@dataclass(kw_only=True)
class ToolHistory(HistoryPart):
    """The calls of a run's tools and environments, over ranks and attempts.

    Attributes:
        totals: by name and kind.
        ended: calls that were ended, by name.
        faults: attempts that have ended in a call, by name.
    """

    EVENTS: ClassVar[tuple[type[Event], ...]] = (ToolCalls, ToolCancelled, ToolFault)
    CHARTS: ClassVar[tuple[Chart, ...]] = (
        Chart(key="tool_calls", group="rollouts", title="Tool calls", unit="count",
              metrics=("grpo_tool_calls_total", "grpo_tool_failures_total")),
        Chart(key="tool_seconds", group="rollouts", title="Time in tools, all ranks", unit="seconds",
              metrics=("grpo_tool_seconds_total",)),
    )  # fmt: skip

    totals: dict[tuple[str, str], Totals] = field(default_factory=dict)
    ended_calls: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def moved(self) -> tuple[str, ...]:
        """The names in which so many attempts have ended that they leave the rank."""
        return tuple(name for name, number in self.faults.items() if number >= FAULTS_TO_MOVE)

    def apply(self, event: ToolCalls | ToolCancelled | ToolFault) -> None:
        """Take what a rank has counted or ended, or in what an attempt has ended."""
        match event:
            case ToolCalls():
                key = (event.tool, event.kind)
                if key not in self.totals and len(self.totals) >= MOST_NAMES:
                    key = (OTHER, OTHER)
                total = self.totals.setdefault(key, Totals())
                total.calls += event.calls
                total.failures += event.failures
                total.repeated += event.repeated
                total.seconds += event.total_seconds
            case ToolCancelled():
                self.ended_calls[event.tool] += 1
            case ToolFault():
                self.faults[event.tool] += 1

    def drawn(self, event: Event) -> Mapping[str, float]:
        """Return the calls of a step, those that failed, and their time."""
        if not isinstance(event, ToolCalls):
            return {}
        calls = {f"tool_calls/{event.tool}": event.calls, f"tool_calls/{event.tool} failed": event.failures}
        return {**calls, f"tool_seconds/{event.tool}": event.total_seconds}

    def as_json(self) -> dict[str, Any]:
        """Return the totals by name."""
        totals = {name: {"kind": kind, **vars(total)} for (name, kind), total in self.totals.items()}
        return {"tools": {"calls": totals, "ended": dict(self.ended_calls), "moved": list(self.moved)}}

    def facts(self) -> dict[str, str]:
        """Return one line; empty if no call was ended."""
        return {"ended tool calls": self._summary()}

    def ended(self) -> list[str]:
        """Return the line as a sentence."""
        return [f"Calls that were ended: {summary}."] if (summary := self._summary()) else []

    def _summary(self) -> str:
        return ", ".join(
            f"{name} {counted(number, 'time')}" for name, number in self.ended_calls.most_common(MOST_NAMES)
        )


PART = ToolHistory
