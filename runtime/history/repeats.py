"""Faults of one run that are the same exception of the script, at whatever step.

Counted by `Verdict.repeat_key`. Called by the recovery policy, which ends a run that mostly repeats itself, and by the
summary of a run. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from grpo_run.runtime.history.progress import StepTimes
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.watchdog.text import duration_text
from grpo_run.watchdog.verdict import KEY_SEPARATOR

FAULTS = 5
"""Faults of one key in `WINDOW_SECONDS` from which on the run may be ended. Fewer may be bad luck."""
WINDOW_SECONDS = 3600.0
LEAST_GOODPUT = 0.5
"""Share of the time since the first of them that new steps have to take, or the run ends. Above it, the run gets more
done than it repeats."""


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
    """Return how often the last fault was raised within the hour before it; None if it is no exception of the script.

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
    """Return which exception of the script a run has recovered from more than once, and how often, as a clause; or nothing."""
    counts = Counter(one.repeat_key for one in recoveries if one.repeat_key and one.action != "stop")
    key, count = next(iter(counts.most_common(1)), ("", 0))
    return f"{count} of them {what_of(key)}" if count > 1 else ""


def what_of(key: str) -> str:
    """Return the exception, line and phase of a key, for a sentence."""
    return key.partition(KEY_SEPARATOR)[2]
