"""Durations of phases survive a restart of the supervisor."""

from __future__ import annotations

from typing import Any

import pytest
from support.builders.runtime.journal_records import attempt, replay, started

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.durations import Durations


def phase_learned(time: float, phase: str, durations: Any) -> tuple[float, str, dict[str, Any]]:
    """The durations of a phase, as the supervisor writes them."""
    return time, "phase_learned", {"phase": phase, "durations": durations}


def test_the_last_durations_of_a_phase_count() -> None:
    """Each record contains the earlier ones, over attempts and supervisors, so they are not added up."""
    early, late = Durations.of([9.0, 1.0]), Durations.of([9.0, 1.0, 2.0])
    history = replay(
        started(0.0), phase_learned(1.0, "reward", early.as_json()), attempt(2.0, 1), started(3.0),
        phase_learned(4.0, "reward", late.as_json()), phase_learned(5.0, "generate", early.as_json()),
    )  # fmt: skip
    assert history.phases.durations() == {Phase.reward: late, Phase.generate: early}


def test_callbacks_are_learned_by_name_and_an_end_survives_a_restart() -> None:
    """A callback may be named like a phase."""
    ended = Durations().ended_after(60.0)
    event = 1.0, "phase_learned", {"phase": "callback", "callback": "reward", "durations": ended.as_json()}
    history = replay(event, phase_learned(2.0, "reward", Durations.of([1.0]).as_json()))
    assert history.phases.durations() == {"reward": ended, Phase.reward: Durations.of([1.0])}


@pytest.mark.parametrize(
    ("phase", "durations"),
    [
        ("no_such_phase", Durations.of([1.0]).as_json()),
        ("reward", None),
        ("reward", {"counts": {"99": 1}, "first_seconds": 1.0, "max_seconds": 1.0}),
        ("reward", {"counts": {"1": -1}, "first_seconds": 1.0, "max_seconds": 0.0}),
        ("reward", [1, 2]),
    ],
)
def test_invalid_phase_durations_are_ignored(phase: str, durations: Any) -> None:
    """Another version may have written them; the others are kept."""
    good = Durations.of([1.0, 2.0])
    history = replay(phase_learned(1.0, phase, durations), phase_learned(2.0, "data", good.as_json()))
    assert history.phases.durations() == {Phase.data: good}
