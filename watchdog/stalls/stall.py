"""A stall, and the facts about processes on which it is based.

The facts are made by `runtime.detection`, the stall by `detection.py`; `watchdog.diagnosis` turns it into a verdict. Plain data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, PhaseKey

HEARTBEAT_LATE_SECONDS = 3.0
"""A heartbeat thread stamps the slot about once per second; after this time without one, the interpreter is
stuck."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """State of a rank's process and its descendants at one moment.

    `state` is the letter of /proc/PID/stat: R, S, D, T, Z. `cpu_seconds` (user and system) and `io_bytes`
    (read and written, without `send` and `recv`) are sums over the session. `heartbeat_age_seconds` is how
    long ago a Python thread of the rank last ran; NaN if unknown. `quiet_seconds` is for how long neither the slot
    changed nor the family did anything; 0 if it works or if that is unknown. `connected`: a connection to a process
    outside the job, or a device, was open meanwhile; None if unknown. `frozen_seconds` is for how long the
    interpreter has not run because it is stopped or because one of its threads keeps running; 0 otherwise.
    """

    state: str
    cpu_seconds: float
    io_bytes: int
    heartbeat_age_seconds: float = float("nan")
    quiet_seconds: float = 0.0
    connected: bool | None = None
    frozen_seconds: float = 0.0

    @property
    def stopped(self) -> bool:
        """Whether the process was stopped by a signal."""
        return self.state == "T"

    @property
    def heartbeat_late(self) -> bool:
        """Whether the interpreter has not run for too long."""
        return self.heartbeat_age_seconds > HEARTBEAT_LATE_SECONDS


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Ranks that missed a deadline. `culprits` is empty if every rank waits and none can be singled out.

    `phase`, `deadline_seconds` and `waited_seconds` belong to the first culprit. `uninterruptible`: a culprit
    is in uninterruptible sleep and cannot be killed, so a restart would not help. `callback` names the user's
    callback in which the first culprit is, "" outside callbacks. `alone` is, for each of several culprits, the
    stall if it is the only one, for a diagnosis that clears the others. `lasts_seconds` is how long the phase is known to
    last without progress; 0 if that is unknown, infinity for a hang that cannot end.
    """

    cause: Cause
    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    phase: Phase
    deadline_seconds: float
    waited_seconds: float
    sentence: str
    uninterruptible: bool = False
    confidence: str = "deadline"
    callback: str = ""
    lasts_seconds: float = 0.0
    alone: Mapping[int, Stall] = field(default_factory=dict)

    @property
    def key(self) -> PhaseKey:
        """What the durations of the first culprit's phase are learned by."""
        return self.callback if self.phase is Phase.callback else self.phase
