"""A verdict: the cause of an incident, the culprits, the confidence, and advice for the user.

Made by `watchdog.diagnosis`, written to `verdict.json` by `watchdog/evidence/incident_files.py`, read by the
recovery policy and the report. Plain data; decides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.memory.shortage import Shortage
from grpo_run.watchdog.observation import Alarm

SCHEMA = 2
KEY_SEPARATOR = ": "
"""In `Verdict.repeat_key`: what follows is for sentences."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Location:
    """A line of source code."""

    file: str
    line: int
    function: str

    @property
    def short(self) -> str:
        """`train.py:88 in reward`, for sentences."""
        return f"{self.file.rpartition('/')[2]}:{self.line} in {self.function}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RewardFunction:
    """A reward function that has failed, by the place of its code: the source file, and the name after `def`.

    `raised` says that it has raised; otherwise it has not returned in time.
    """

    file: str
    function: str
    raised: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """What is known about one incident.

    `confidence` is `proved` (by exits, collective records or wait states), `deadline` (a learned deadline was
    missed) or `unknown`. `locations` holds the line of user code of each culprit and waiter, as far as known.
    `uninterruptible` says that a culprit was in uninterruptible sleep when its state was read. Two incidents
    with the same `signature` are the same failure at the same place, so the policy does not repeat a restart
    that cannot help. `starting` says that the culprit failed outside the steps of a `train()` call, `origin`
    where its exception comes from, and `final` why no restart can help. `counted` says whether the steps of
    the script are counted: it has used a Trainer or the loop. `alarm` is set if the ranks ended the attempt
    on purpose, `failed_reward` to the reward function that has raised or has not returned in time, and
    `shortage` to the memory that was exhausted, with the phase that died. `exception` is the class of the
    script's own exception; empty if none has ended it. `since_seconds` is how long before the verdict the
    fault was first seen, if something else than the ranks has shown it.
    """

    cause: Cause
    culprits: tuple[int, ...] = ()
    step: int
    phase: str | None = None
    confidence: str = "proved"
    sentence: str
    signature: str
    deterministic: bool = False
    location: Location | None = None
    traceback: str | None = None
    waiters: tuple[int, ...] = ()
    mismatch: str | None = None
    tried: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    locations: Mapping[int, Location] = field(default_factory=dict)
    uninterruptible: bool = False
    starting: bool = False
    origin: Origin = Origin.code
    final: str = ""
    counted: bool = True
    alarm: Alarm | None = None
    failed_reward: RewardFunction | None = None
    shortage: Shortage | None = None
    exception: str = ""
    since_seconds: float = 0.0

    @property
    def repeat_key(self) -> str:
        """What an exception of the script is recognized by at any step: cause, class, innermost line, phase.

        Empty for everything else: signals, networks, files, devices, memory, collectives, hangs. Unlike
        `signature` it has no step, so it says that a bug is the same, not that a restart certainly repeats
        it.
        """
        of_script = self.origin is Origin.code and self.cause in (Cause.exception, Cause.startup_failure)
        if not self.exception or not of_script:
            return ""
        where = f" at {self.location.short}" if self.location is not None else ""
        return f"{self.cause}{KEY_SEPARATOR}{self.exception}{where}" + (
            f" (phase {self.phase})" if self.phase else ""
        )

    @property
    def culprit(self) -> int | None:
        """The only culprit; None if there are several or none."""
        return self.culprits[0] if len(self.culprits) == 1 else None

    def as_json(self) -> dict[str, Any]:
        """Return the contents of `verdict.json`."""
        return {
            "schema": SCHEMA,
            "cause": str(self.cause),
            "culprits": list(self.culprits),
            "phase": self.phase,
            "step": self.step if self.counted else None,
            "confidence": self.confidence,
            "sentence": self.sentence,
            "location": to_json(self.location) if self.location else None,
            "waiters": list(self.waiters),
            "locations": {str(rank): to_json(place) for rank, place in self.locations.items()},
            "mismatch": self.mismatch,
            "tried": list(self.tried),
            "advice": list(self.advice),
            "uninterruptible": self.uninterruptible,
            "traceback": self.traceback,
            "shortage": self.shortage.as_json() if self.shortage is not None else None,
            "guard": dict(self.alarm.details) if self.alarm is not None else None,
        }
