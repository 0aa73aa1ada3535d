"""Each guard at its bounds; see the text file."""

from __future__ import annotations

import functools
from collections.abc import Callable

from support.transcripts import Story, stories

from grpo_run.runtime.features.learning_guards._judge import (
    Observation,
    Series,
    Trip,
    find_divergence,
    find_entropy_change,
    find_large_share,
    find_mismatch,
    find_nonfinite,
    find_zero_variance,
)
from grpo_run.runtime.features.learning_guards.settings import LearningGuard

Find = Callable[[Series, float | None], Trip | None]


def command(find: Find) -> Callable[..., str]:
    """A command that says what a guard finds in values, with a limit of the user's."""

    def find_in(self: BoundShell, *values: str, limit: str = "") -> str:
        numbers: list[float] = []
        for value in values:
            number, _, times = value.partition("*")
            numbers += [float(number)] * int(times or 1)
        series = [Observation(10 + 2 * at, number) for at, number in enumerate(numbers)]
        trip = find(series, float(limit) if limit else None)
        return f"{trip.guard}, steps {trip.onset} to {trip.step}: {trip.sentence}" if trip else "none"

    return find_in


class BoundShell:
    """Guards as commands."""

    capped = command(functools.partial(find_large_share, LearningGuard.capped))
    kl = command(find_divergence)
    entropy = command(find_entropy_change)
    zero_variance = command(find_zero_variance)
    mismatch = command(find_mismatch)
    tools = command(functools.partial(find_large_share, LearningGuard.tools))

    def nonfinite(self, *steps: str, at: str) -> str:
        """What is found at a step after values that were not finite at these steps."""
        trip = find_nonfinite([Observation(int(step), 1.0) for step in steps], int(at))
        return f"steps {trip.onset} to {trip.step}" if trip else "none"


@stories(__file__, "bounds.txt")
def test_bounds(story: Story, word: str) -> None:
    """Every story of the file."""
    story.check(BoundShell(), word)
