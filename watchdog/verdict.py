"""A verdict: what happened, who did it, how sure we are, and what a person should know.

Made by `diagnosis.py`, written by `incident.py` as `verdict.json`, read by the recovery policy.
Plain data; decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from grpo_run.watchdog.causes import Cause

SCHEMA = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A line of code."""

    file: str
    line: int
    function: str

    def as_json(self) -> dict[str, Any]:
        """Plain form."""
        return {"file": self.file, "line": self.line, "function": self.function}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is known about one incident.

    `confidence` is `proved` or `inferred`. `signature` is equal for two incidents that are the same
    failure at the same place, so that the policy does not repeat a restart that cannot help.
    """

    cause: Cause
    culprits: tuple[int, ...]
    step: int
    phase: str | None
    confidence: str
    sentence: str
    signature: str
    deterministic: bool
    location: Location | None = None
    traceback: str | None = None
    waiters: tuple[int, ...] = ()
    mismatch: str | None = None
    tried: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()

    @property
    def culprit(self) -> int | None:
        """The one culprit, None when there are several or none."""
        return self.culprits[0] if len(self.culprits) == 1 else None

    def as_json(self) -> dict[str, Any]:
        """The contents of `verdict.json`."""
        return {
            "schema": SCHEMA,
            "cause": str(self.cause),
            "culprits": list(self.culprits),
            "phase": self.phase,
            "step": self.step,
            "confidence": self.confidence,
            "sentence": self.sentence,
            "location": self.location.as_json() if self.location else None,
            "waiters": list(self.waiters),
            "mismatch": self.mismatch,
            "tried": list(self.tried),
            "advice": list(self.advice),
            "traceback": self.traceback,
        }
