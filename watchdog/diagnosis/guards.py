"""Diagnosis of an attempt that a learning guard has ended. Pure; called by the incident investigation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.learning_rules import LearningGuard
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.verdict import Verdict

ADVICE = {
    LearningGuard.nonfinite: "Check for divisions by 0 and logarithms of 0 in the loss, for a learning rate that is too high, and"
    " for rewards that are not finite.",
    LearningGuard.zero_variance: "Check the reward functions, and whether the prompts are too easy or too hard.",
    LearningGuard.kl: "Lower the learning rate, or raise beta.",
    LearningGuard.entropy: "Check the learning rate, the temperature and the rewards.",
    LearningGuard.reward: "Look at completions from before and after the onset; lower the learning rate if their form has broken.",
    LearningGuard.capped: "Look at completions: a model that does not stop any more repeats itself, or is rewarded for length.",
}


def diagnose_guard(exits: Sequence[Exit], slots: Mapping[int, Slot | None]) -> Verdict | None:
    """Return the verdict if a learning guard ended the attempt, else None.

    Whatever else failed did so because ranks left, or because weights were broken.

    Args:
        exits: the failed ranks.
        slots: last reading of every local rank's slot.
    """
    found = [exit for exit in exits if exit.error is not None and exit.error.trip is not None]
    if not found:
        return None
    first = min(found, key=lambda exit: exit.error.wall_time if exit.error is not None else 0.0)
    assert first.error is not None
    trip = first.error.trip
    assert trip is not None
    return Verdict(
        cause=Cause.nonfinite if trip.guard is LearningGuard.nonfinite else Cause.learning_collapse,
        culprits=(),
        step=trip.step,
        phase=None,
        confidence="proved",
        sentence=trip.sentence,
        signature=f"guard:{trip.guard}:step{trip.step}",
        deterministic=False,
        waiters=tuple(sorted(slots)),
        advice=(
            ADVICE[trip.guard],
            f"To continue from before the onset: the same command with --fresh --resume-from CHECKPOINT (below {trip.onset})"
            + " and, if it has one, another --run-dir.",
        ),
        trip=trip,
    )
