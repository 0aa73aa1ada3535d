"""The timeline of phases: what was observed, and when it began."""

from __future__ import annotations

import itertools

from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.evidence.timeline import KEPT_SPANS, PhaseTimeline
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState


def spans(timeline: PhaseTimeline, now: float, rank: int = 0) -> list[list[object]]:
    """A rank's spans, in seconds before now."""
    found: list[list[object]] = timeline.as_json(now)["ranks"][str(rank)]
    return found


def inside(phase: Phase, since: float) -> tuple[OpenPhase, ...]:
    """One open phase."""
    return (OpenPhase(phase=phase, since_seconds=since),)


def test_a_phase_begins_at_its_start_in_the_slot() -> None:
    """Not at the scan that first saw it; the previous phase ends there."""
    timeline = PhaseTimeline()
    timeline.record({0: make_slot(0, phases=inside(Phase.data, 1.0))}, 1.1)
    timeline.record({0: make_slot(0, phases=inside(Phase.generate, 2.0))}, 2.1)
    assert spans(timeline, 3.0) == [["data", -2.0, -1.0], ["generate", -1.0, None]]


def test_a_continuing_phase_is_one_span() -> None:
    """Further scans do not split it."""
    timeline = PhaseTimeline()
    for look in range(100):
        timeline.record({0: make_slot(0, phases=inside(Phase.data, 1.0))}, 1.0 + look / 10)
    assert spans(timeline, 11.0) == [["data", -10.0, None]]


def test_the_same_phase_again_is_another_span() -> None:
    """Two rewards in a row are two spans."""
    timeline = PhaseTimeline()
    for since in (1.0, 2.0):
        timeline.record({0: make_slot(0, phases=inside(Phase.reward, since))}, since)
    assert spans(timeline, 3.0) == [["reward", -2.0, -1.0], ["reward", -1.0, None]]


def test_the_innermost_phase_is_recorded() -> None:
    """Enclosing phases are not recorded."""
    timeline = PhaseTimeline()
    phases = (*inside(Phase.data, 1.0), *inside(Phase.reward, 1.5))
    timeline.record({0: make_slot(0, phases=phases)}, 2.0)
    assert spans(timeline, 2.0) == [["reward", -0.5, None]]


def test_a_rank_that_cannot_be_read_is_unknown() -> None:
    """In one span, from the first scan that failed until one succeeds."""
    timeline = PhaseTimeline()
    timeline.record({0: make_slot(0, phases=inside(Phase.data, 1.0))}, 1.0)
    for now in (2.0, 3.0):
        timeline.record({0: None}, now)
    timeline.record({0: make_slot(0, phases=inside(Phase.generate, 4.0))}, 4.0)
    expected = [["data", -4.0, -3.0], ["unknown", -3.0, -1.0], ["generate", -1.0, None]]
    assert spans(timeline, 5.0) == expected


def test_a_rank_outside_any_phase_is_recorded_by_its_state() -> None:
    """A rank before `train()` is an example."""
    timeline = PhaseTimeline()
    slot = make_slot(0, phases=(), state=RankState.starting, last_progress_seconds=1.0)
    timeline.record({0: slot}, 2.0)
    assert spans(timeline, 2.0) == [["starting", -1.0, None]]


def test_spans_never_overlap_nor_run_backwards() -> None:
    """Also if a rank that was unknown turns out to have been in its phase for long."""
    timeline = PhaseTimeline()
    timeline.record({0: None}, 5.0)
    timeline.record({0: make_slot(0, phases=inside(Phase.data, 1.0))}, 6.0)
    timeline.record({0: make_slot(0, phases=inside(Phase.generate, 7.0))}, 7.0)
    found = spans(timeline, 8.0)
    for _, begin, end in found:
        assert end is None or float(str(begin)) <= float(str(end))
    for before, after in itertools.pairwise(found):
        assert float(str(before[2])) <= float(str(after[1]))


def test_an_outer_phase_continues_after_the_inner_one() -> None:
    """Its second span begins with the scan that saw the end of the inner phase."""
    timeline = PhaseTimeline()
    timeline.record({0: make_slot(0, phases=inside(Phase.data, 0.0))}, 0.1)
    timeline.record({0: make_slot(0, phases=(*inside(Phase.data, 0.0), *inside(Phase.generate, 5.0)))}, 5.1)
    for now in (10.1, 10.2, 11.2, 12.2):
        timeline.record({0: make_slot(0, phases=inside(Phase.data, 0.0))}, now)
    expected = [["data", -20.0, -15.0], ["generate", -15.0, -9.9], ["data", -9.9, None]]
    assert spans(timeline, 20.0) == expected


def test_ranks_have_their_own_rows() -> None:
    """The keys are text, as in JSON."""
    timeline = PhaseTimeline()
    timeline.record({0: make_slot(0, phases=inside(Phase.data, 1.0)), 7: None}, 1.0)
    assert set(timeline.as_json(1.0)["ranks"]) == {"0", "7"}
    assert timeline.as_json(1.0)["now"] == 0.0


def test_memory_is_bounded() -> None:
    """The newest spans are kept."""
    timeline = PhaseTimeline()
    for number in range(KEPT_SPANS + 50):
        phase = Phase.data if number % 2 else Phase.reward
        timeline.record({0: make_slot(0, phases=inside(phase, float(number)))}, float(number))
    found = spans(timeline, float(KEPT_SPANS + 50))
    assert len(found) == KEPT_SPANS
    assert found[-1][1] == -1.0


def test_a_new_attempt_begins_with_an_empty_timeline() -> None:
    """Its ranks are other processes."""
    timeline = PhaseTimeline()
    timeline.record({0: make_slot(0)}, 1.0)
    timeline.clear()
    assert timeline.as_json(2.0)["ranks"] == {}
