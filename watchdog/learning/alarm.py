"""An alarm of a learning guard. Plain data; also carried by the error file of a rank to the supervisor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from grpo_run.watchdog.learning.rules import Guard, Response


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A guard has tripped.

    Attributes:
        step: after which it did.
        onset: the first step that shows what is wrong, at most `step`.
        sentence: what is wrong, for the user; a full sentence.
    """

    guard: Guard
    step: int
    onset: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Trip:
    """An alarm on which all ranks have ended the attempt."""

    guard: Guard
    response: Response
    step: int
    onset: int
    sentence: str

    @classmethod
    def of(cls, alarm: Alarm, response: Response) -> Trip:
        """Return the trip of an alarm."""
        return cls(
            guard=alarm.guard,
            response=response,
            step=alarm.step,
            onset=alarm.onset,
            sentence=alarm.sentence,
        )

    def as_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        return {name: str(value) if isinstance(value, str) else value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Trip:
        """Return what `as_json` wrote.

        Raises:
            LookupError, TypeError, ValueError: `value` has another format.
        """
        return cls(
            guard=Guard(value["guard"]),
            response=Response(value["response"]),
            step=int(value["step"]),
            onset=int(value["onset"]),
            sentence=str(value["sentence"]),
        )
