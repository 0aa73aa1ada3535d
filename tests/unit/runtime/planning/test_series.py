"""Instants of a step, from a timeline that is written out."""

from __future__ import annotations

from grpo_run.runtime.planning import series
from grpo_run.runtime.planning.timeline import AllocationTimeline, Mark, unchanged


def test_an_instant_keeps_the_highest_of_all_events_that_fall_into_it() -> None:
    """Many more events than instants; the peak lasts for one event."""
    sizes = [10] * 1000
    events = [
        event for number in range(1000) for event in ((number, ~number) if number != 500 else (number,))
    ]
    sizes[501] = 70
    timeline = AllocationTimeline(
        sizes=sizes,
        kinds=["activations"] * 1000,
        events=events,
        marks=[Mark(event=0, step=1, phase="forward"), Mark(event=len(events), step=1, phase="end")],
    )
    found = series._traced(timeline, 1, unchanged)
    totals = [sum(held.values()) for held in found["forward"]]
    assert len(totals) == series.INSTANTS
    assert max(totals) == 80
    assert totals[-1] == 20


def test_windows_of_a_phase_are_one_phase() -> None:
    """The head's windows divide a phase into three, and other steps are left out."""
    timeline = AllocationTimeline(
        sizes=[5, 7, 9],
        kinds=["weights", "logits", "activations"],
        events=[0, 1, ~1, 2],
        marks=[
            Mark(event=0, step=0, phase="forward"),
            Mark(event=1, step=1, phase="forward"),
            Mark(event=2, step=1, phase="forward", window=1),
            Mark(event=3, step=1, phase="backward"),
        ],
    )
    found = series._traced(timeline, 1, unchanged)
    assert list(found) == ["forward", "backward"]
    assert max(sum(held.values()) for held in found["forward"]) == 12
    assert found["backward"][-1] == {"weights": 5.0, "logits": 0.0, "activations": 9.0}
