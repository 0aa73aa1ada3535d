"""Plain data of a run's faults: recoveries, checkpoints and decisions.

A decision is an action and its reason, made by `runtime/supervisor/policy.py` or a feature. Replayed from the
journal by `history.py`; read by the policies, status, metrics and reports. Also counts faults that are the
same exception of the script at whatever step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.history.events import ActionChosen, IncidentConfirmed
from grpo_run.runtime.history.progress import StepTimes
from grpo_run.watchdog.text import TextEnum, duration_text
from grpo_run.watchdog.verdict import KEY_SEPARATOR


@dataclass(kw_only=True)
class Recovery:
    """One fault and its recovery. Durations in seconds; None until known.

    Args:
        cause, rank, sentence, signature, incident: from the verdict; `incident` is the folder.
        step, train_call: the position at which the fault happened, and `attempt` that it has ended.
        action: chosen by the policy; empty until then.
        detection_seconds: from the fault to the verdict.
        recovery_seconds: from the fault to the next committed step.
        lost_steps: number of steps repeated after the restart.
        at: time of the fault, in seconds since the epoch.
        from_checkpoint: the step that the next attempt resumed from; None if it restarted the `train()` call.
    """

    cause: str
    rank: int | None
    step: int
    action: str
    detection_seconds: float | None = None
    recovery_seconds: float | None = None
    lost_steps: int | None = None
    incident: str | None = None
    at: float = 0.0
    train_call: int = 0
    attempt: int = 0
    from_checkpoint: int | None = None
    signature: str = ""
    sentence: str = ""
    reason: str = ""
    """Why the action was chosen."""
    lost_connection: tuple[int, ...] = ()
    """Ranks that failed only because they lost their connection to `rank`."""
    mismatch: str = ""
    """How the next attempt did not continue what the run has; empty if it did."""
    starting: bool = False
    """It failed outside the steps of a `train()` call."""
    gave_up: bool = False
    """The run was given up at it."""
    patient: bool = False
    """It does not count against the restart budget."""
    also_failed: tuple[int, ...] = ()
    """Further ranks that failed by themselves."""
    guard: str | None = None
    """What ended the attempt on purpose."""
    before_step: int | None = None
    """The step from which on checkpoints of the call are set aside; None unless the run goes back."""
    fresh_from: int | None = None
    """The first step that uses fresh sampling seeds; None for an exact repetition."""
    rolled_back: bool = False
    """The checkpoints from `before_step` on have been set aside."""
    repeat_key: str = ""
    """What an exception of the script is recognized by at any step, see `Verdict`; empty for other faults."""
    resuming: bool = False
    """It happened while the attempt loaded what it resumed from."""
    shortage: Mapping[str, Any] = field(default_factory=dict)
    """The memory that was exhausted, as in the verdict; empty if none was."""

    @property
    def counts(self) -> bool:
        """Whether it counts against the restart budget; others are bounded by time, or by what can still be
        changed.
        """
        return not self.patient

    @classmethod
    def of(cls, event: IncidentConfirmed, train_call: int, *, resuming: bool = False) -> Recovery:
        """Return the fault of an event.

        Args:
            train_call: the present call, for an event that names none.
            resuming: the attempt had not loaded yet what it resumed from.
        """
        return cls(
            cause=event.cause,
            rank=event.culprit,
            step=event.step or 0,
            action="",
            detection_seconds=event.detection_seconds,
            incident=event.incident,
            at=event.failed_at or event.time,
            train_call=event.train_call or train_call,
            attempt=event.attempt or 0,
            signature=event.signature or "",
            sentence=event.sentence or "",
            lost_connection=tuple(event.lost_connection),
            starting=bool(event.starting),
            also_failed=tuple(event.also_failed),
            guard=event.guard.get("guard") if event.guard else None,
            repeat_key=event.repeat_key or "",
            resuming=resuming,
            shortage=event.shortage or {},
        )

    def as_json(self) -> dict[str, Any]:
        """Return the object shown by `grpo-run status --json`."""
        keys = (
            "cause", "rank", "step", "action", "detection_seconds", "recovery_seconds", "lost_steps",
            "incident",
        )  # fmt: skip
        return {key: getattr(self, key) for key in keys}


def fails_to_resume(recoveries: Sequence[Recovery]) -> bool:
    """Whether the last two faults are the same exception of the script while it resumed.

    The first attempt loads from memory if it can, and the second from disk; what is damaged is skipped by
    either.
    """
    last = recoveries[-2:]
    return (
        len(last) == 2
        and all(one.resuming for one in last)
        and last[0].repeat_key == last[1].repeat_key != ""
    )


def pending_rollback(recoveries: Sequence[Recovery]) -> Recovery | None:
    """Return the last fault if checkpoints have to be set aside before the next attempt."""
    last = recoveries[-1] if recoveries else None
    return None if last is None or last.before_step is None or last.rolled_back else last


@dataclass(kw_only=True)
class Checkpoint:
    """A published checkpoint, as recorded in the journal."""

    step: int
    path: str
    verified: bool
    train_call: int = 0

    @property
    def position(self) -> tuple[int, int]:
        """The ordinal of its train() call and its step."""
        return self.train_call, self.step


class Action(TextEnum):
    """What follows an incident. The values appear in the journal and as metric labels."""

    restart = "restart"
    restart_from_earlier_checkpoint = "restart_from_earlier_checkpoint"
    stop = "stop"


@dataclass(frozen=True, kw_only=True)
class Decision:
    """An action, and the reason shown to the user.

    Attributes:
        action: one of `Action`, or the name that a feature has given to a restart of its own.
        delay_seconds: wait before the restart.
        patient: the failure does not count against the restart budget.
        before_step: checkpoints of the interrupted call from this step on are set aside before the restart.
        fresh_from: the first step that uses fresh sampling seeds, which the feature sets that has answered;
            None for an exact repetition.
    """

    action: str
    reason: str
    delay_seconds: float = 0.0
    patient: bool = False
    before_step: int | None = None
    fresh_from: int | None = None

    @property
    def restarts(self) -> bool:
        """Whether another attempt follows."""
        return self.action != Action.stop


def apply_action(recoveries: Sequence[Recovery], event: ActionChosen) -> None:
    """Apply the decision on the last fault."""
    if not recoveries or recoveries[-1].action:
        return
    last = recoveries[-1]
    last.action, last.reason = event.action, event.reason or ""
    last.before_step, last.fresh_from = event.before_step, event.fresh_from
    last.patient = event.patient


def apply_resumed(recoveries: Iterable[Recovery], call: int, step: int) -> None:
    """Note from where the attempt after each open recovery resumes, and how many steps it repeats.

    Args:
        call: the number of the `train()` call that begins or resumes.
        step: after which it resumes.
    """
    for recovery in recoveries:
        if recovery.lost_steps is None:
            recovery.from_checkpoint = step if recovery.train_call == call else None
            # resumed in the same call, or in an earlier one if this call had no checkpoint yet
            recovery.lost_steps = max(0, recovery.step - (step if recovery.train_call == call else 0))


def apply_progress(recoveries: Iterable[Recovery], at: float) -> None:
    """Complete open recoveries: a step was committed at this time, in seconds since the epoch."""
    for recovery in recoveries:
        if recovery.recovery_seconds is None and recovery.action != Action.stop:
            recovery.recovery_seconds = max(0.0, at - recovery.at)


def apply_mismatch(recoveries: Sequence[Recovery], text: str) -> None:
    """Note how the attempt after the last fault did not continue what the run has."""
    if recoveries and not recoveries[-1].mismatch:
        recoveries[-1].mismatch = text


FAULTS = 5
"""Faults of one key in `WINDOW_SECONDS` from which on the run may be ended. Fewer may be bad luck."""
WINDOW_SECONDS = 3600.0
LEAST_GOODPUT = 0.5
"""Share of the time since the first of them that new steps have to take, or the run ends. Above it, the run
gets more done than it repeats.
"""


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Faults of one key within the last hour.

    Attributes:
        count: how many.
        what: exception, line and phase, for a sentence.
        wall_seconds: from the first of them to the last.
        gained_seconds: of it, what steps that are new since the first take at their median duration.
    """

    count: int
    what: str
    wall_seconds: float
    gained_seconds: float

    @property
    def ends_run(self) -> bool:
        """Whether the run does little but repeat this fault."""
        return self.count >= FAULTS and self.gained_seconds < LEAST_GOODPUT * self.wall_seconds

    @property
    def reason(self) -> str:
        """Why the run ends."""
        share = self.gained_seconds / self.wall_seconds if self.wall_seconds > 0 else 0.0
        return (
            f"{self.what} was raised {self.count} times within {duration_text(self.wall_seconds)},"
            f" and new steps were {share:.0%} of that time"
        )


def repeats(recoveries: Sequence[Recovery], steps: StepTimes) -> Repeats | None:
    """Return how often the last fault was raised within the hour before it; None if it is no exception of the
    script.

    Args:
        recoveries: faults of the present supervisor; the last one is the fault that is decided on.
        steps: of the run.
    """
    now = recoveries[-1]
    if not now.repeat_key:
        return None
    same = [
        one for one in recoveries if one.repeat_key == now.repeat_key and now.at - one.at <= WINDOW_SECONDS
    ]
    first = same[0]
    return Repeats(
        count=len(same),
        what=what_of(now.repeat_key),
        wall_seconds=now.at - first.at,
        gained_seconds=steps.gained_seconds(first.train_call, first.step),
    )


def most_repeated(recoveries: Sequence[Recovery]) -> str:
    """Return which exception of the script a run has recovered from more than once, and how often, as a
    clause; or nothing.
    """
    counts = Counter(one.repeat_key for one in recoveries if one.repeat_key and one.action != "stop")
    key, count = next(iter(counts.most_common(1)), ("", 0))
    return f"{count} of them {what_of(key)}" if count > 1 else ""


def what_of(key: str) -> str:
    """Return the exception, line and phase of a key, for a sentence."""
    return key.partition(KEY_SEPARATOR)[2]
