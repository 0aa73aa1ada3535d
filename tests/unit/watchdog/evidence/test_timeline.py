"""The timeline of phases: what was observed, and when it began."""

from __future__ import annotations

import pytest
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.evidence.timeline import KEPT_SPANS, PhaseTimeline
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot


def slot_of(phases: str) -> Slot | None:
    """A slot with open phases, `data:1.0 reward:1.5`; a state and its time; None for nothing."""
    if phases.startswith("starting"):
        since = float(phases.partition(":")[2])
        return make_slot(0, phases=(), state=RankState.starting, last_progress_seconds=since)
    opened = (one.partition(":") for one in phases.split())
    made = tuple(OpenPhase(phase=Phase[name], since_seconds=float(since)) for name, _, since in opened)
    return make_slot(0, phases=made) if made else None


@pytest.mark.parametrize(
    ("scans", "now", "spans"),
    [
        # a phase begins at its start in the slot, and not at the scan that first saw it
        ([(1.1, "data:1"), (2.1, "generate:2")], 3.0, [("data", -2.0, -1.0), ("generate", -1.0, None)]),
        # further scans do not split it; two rewards in a row are two spans
        ([(1.0 + n / 10, "data:1") for n in range(100)], 11.0, [("data", -10.0, None)]),
        ([(1.0, "reward:1"), (2.0, "reward:2")], 3.0, [("reward", -2.0, -1.0), ("reward", -1.0, None)]),
        # the innermost phase is recorded; a rank outside any phase by its state
        ([(2.0, "data:1 reward:1.5")], 2.0, [("reward", -0.5, None)]),
        ([(2.0, "starting:1")], 2.0, [("starting", -1.0, None)]),
        # unknown from the first scan that failed until one succeeds
        (
            [(1.0, "data:1"), (2.0, ""), (3.0, ""), (4.0, "generate:4")], 5.0,
            [("data", -4.0, -3.0), ("unknown", -3.0, -1.0), ("generate", -1.0, None)],
        ),
        # spans never run backwards, also if an unknown rank has been in its phase for long
        (
            [(5.0, ""), (6.0, "data:1"), (7.0, "generate:7")], 8.0,
            [("unknown", -3.0, -2.0), ("data", -2.0, -1.0), ("generate", -1.0, None)],
        ),
        # an outer phase continues with the scan that saw the end of the inner one
        (
            [(0.1, "data:0"), (5.1, "data:0 generate:5"), *((t, "data:0") for t in (10.1, 10.2, 11.2))], 20.0,
            [("data", -20.0, -15.0), ("generate", -15.0, -9.9), ("data", -9.9, None)],
        ),
    ],
)  # fmt: skip
def test_spans(
    scans: list[tuple[float, str]], now: float, spans: list[tuple[str, float, float | None]]
) -> None:
    """In seconds before now; ranks have their own rows."""
    timeline = PhaseTimeline()
    for at, phases in scans:
        timeline.record({0: slot_of(phases), 7: None}, at)
    found = timeline.as_json(now)
    assert [tuple(one) for one in found["ranks"]["0"]] == spans
    assert (found["now"], set(found["ranks"])) == (0.0, {"0", "7"})


def test_memory_is_bounded() -> None:
    """The newest spans are kept."""
    timeline = PhaseTimeline()
    for number in range(KEPT_SPANS + 50):
        timeline.record({0: slot_of(f"{'data' if number % 2 else 'reward'}:{number}")}, float(number))
    found = timeline.as_json(float(KEPT_SPANS + 50))["ranks"]["0"]
    assert len(found) == KEPT_SPANS
    assert found[-1][1] == -1.0
