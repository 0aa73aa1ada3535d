"""Charts of reports as inline SVG: the phases of each rank before an incident, and curves by step.

Called by `incident_page.py` and `run_page.py`. A chart is stretched to the width of the page, and has no text
of its own: the templates put labels beside it. Colors that depend on the browser's scheme are classes of the
style sheet. Pure.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from grpo_run.dashboards.clean_text import clean

PHASE_COLORS = {
    "startup": "#8d99a6",
    "data": "#c08a4e",
    "generate": "#2a7f9e",
    "reward": "#8a63b8",
    "score": "#b394d6",
    "forward_backward": "#3d8f62",
    "optimizer": "#8abf74",
    "vote": "#d8a92f",
    "checkpoint": "#5b7fb5",
    "eval": "#4db3b0",
    "cleanup": "#a3adb8",
    "idle": "#c3ccd4",
    "weight_sync": "#b0527d",
    "callback": "#7a6f9b",
}
OTHER_COLOR = "#97a1ab"
MAX_PHASE = 300
WIDTH, HEIGHT = 1000, 200
"""Units of a chart's coordinates."""
MIN_SHOWN_SECONDS = 15.0
SHOWN_OPEN_PHASES = 1.4
"""The timeline covers the longest open phase times this factor."""
MOST_BARS = 8_000
"""Bars of a timeline; shorter phases are left out until there are no more."""

Point = tuple[int, float, float, float]
"""Step, mean, smallest and largest value of a group of steps."""


@dataclass(frozen=True)
class _Span:
    phase: str
    begin: float
    end: float
    is_open: bool


def timeline_chart(timeline: Mapping[str, Any], culprits: Collection[int]) -> dict[str, Any] | None:
    """Return a row of bars for each rank, with the phase that has not ended, the phases with their colors,
    and when the view begins, in seconds; None if the timeline has no valid phase.

    Args:
        timeline: `{"ranks": {"0": [[phase, begin, end or null], …]}, "now": seconds}`; null marks an open
            phase.
        culprits: ranks whose labels are bold.
    """
    rows = spans_of(timeline)
    every = [span for spans in rows.values() for span in spans]
    if not every:
        return None
    longest_open = max((-span.begin for span in every if span.is_open), default=0.0)
    shown = max(MIN_SHOWN_SECONDS, SHOWN_OPEN_PHASES * longest_open)
    begin = max(min(span.begin for span in every), -shown)
    inside = [span for span in every if span.end > begin]
    by_length = sorted((span.end - span.begin for span in inside), reverse=True)
    shortest = by_length[MOST_BARS] if len(by_length) > MOST_BARS else 0.0
    scale = WIDTH / max(-begin, 1e-9)
    drawn = []
    for rank, spans in sorted(rows.items()):
        bars = [
            _bar(span, begin, scale)
            for span in spans
            if span.end > begin and (span.is_open or span.end - span.begin > shortest or not shortest)
        ]
        open_text = ", ".join(
            f"{span.phase} for {span.end - span.begin:.3g} s" for span in spans if span.is_open
        )
        row = {"rank": rank, "culprit": rank in culprits, "open_text": open_text}
        drawn.append(row | {"bars": Markup("").join(bars)})
    phases = {span.phase for span in inside}
    names = [phase for phase in PHASE_COLORS if phase in phases] + sorted(phases - set(PHASE_COLORS))
    return {
        "rows": drawn,
        "legend": [(name, PHASE_COLORS.get(name, OTHER_COLOR)) for name in names],
        "begin_seconds": begin,
    }


def spans_of(timeline: Mapping[str, Any]) -> dict[int, list[_Span]]:
    """Return the valid phases of each rank, in seconds before the timeline was written. An open one ends
    then.
    """
    now = _number(timeline.get("now")) or 0.0
    ranks = timeline.get("ranks")
    rows: dict[int, list[_Span]] = {}
    for rank, phases in ranks.items() if isinstance(ranks, dict) else ():
        if not (rank.isdecimal() and isinstance(phases, list)):
            continue
        rows[int(rank)] = []
        for phase, begin, end in (span for span in phases if isinstance(span, list) and len(span) == 3):
            start, stop = _number(begin), _number(end)
            if start is not None:
                rows[int(rank)].append(
                    _Span(
                        clean(phase, MAX_PHASE),
                        start - now,
                        0.0 if stop is None else max(start, stop) - now,
                        stop is None,
                    )
                )
    return rows


def _bar(span: _Span, begin: float, scale: float) -> Markup:
    left = max(0.0, (span.begin - begin) * scale)
    width = max(0.4, (span.end - begin) * scale - left)
    text = f"{span.phase}, {span.end - span.begin:.3g} s" + (", still open" if span.is_open else "")
    bar = Markup('<rect x="{:.1f}" y="0" width="{:.1f}" height="10" fill="{}"><title>{}</title></rect>')
    return bar.format(left, width, PHASE_COLORS.get(span.phase, OTHER_COLOR), text)


def curve_chart(
    name: str, lines: Mapping[str, Sequence[Point]], steps: tuple[int, int], *, from_zero: bool = False
) -> dict[str, Any]:
    """Return a chart of curves: its SVG, for each a line of means and an area between the extremes of each
    group of steps, and the numbers of its axes as texts. It refers to `marks_of`, which the page has once.

    Args:
        name: shown above it.
        lines: at least one, by their labels; each has points, in ascending order.
        steps: the first and the last of all charts of the page.
        from_zero: whether the lower edge is 0, so that small changes look small.
    """
    every = [point for points in lines.values() for point in points]
    low = 0.0 if from_zero else min(point[2] for point in every)
    high = max(point[3] for point in every)
    height = (high - low) or 1.0

    def place(step: int, value: float) -> str:
        level = 4 + (HEIGHT - 8) * (1 - (value - low) / height if high > low else 0.5)
        return f"{_across(step, steps):.1f},{level:.1f}"

    drawn = [Markup('<use href="#marks"/>')]
    for number, points in enumerate(lines.values()):
        means = " ".join(place(step, mean) for step, mean, _, _ in points)
        if any(smallest < largest for _, _, smallest, largest in points):
            upper = " ".join(place(step, largest) for step, _, _, largest in points)
            lower = " ".join(place(step, smallest) for step, _, smallest, _ in reversed(points))
            drawn.append(
                Markup('<polygon class="extremes l{}" points="{} {}"/>').format(number, upper, lower)
            )
        drawn.append(Markup('<polyline class="mean l{}" points="{}"/>').format(number, means))
    return {
        "name": name,
        "lines": [(label, number_text(points[-1][1])) for label, points in lines.items()],
        "low": number_text(low),
        "high": number_text(high),
        "first_step": min(points[0][0] for points in lines.values()),
        "last_step": max(points[-1][0] for points in lines.values()),
        "svg": Markup("").join(drawn),
    }


def marks_of(
    marks: Sequence[Mapping[str, Any]], checkpoints: Sequence[int], steps: tuple[int, int]
) -> Markup:
    """Return what all charts of a page show: faults as lines, areas of the steps that were done again, and
    ticks at checkpoints.

    Args:
        marks: faults: `step` is the last one that was completed before it, `redone_from` the one from which
            training resumed, None if that is not known, and `text` what is shown.
        steps: the first and the last of the charts.
    """
    drawn = []
    for mark in marks:
        at, resumed = _across(mark["step"], steps), mark["redone_from"]
        if resumed is not None and resumed < mark["step"]:
            left = _across(resumed, steps)
            area = Markup('<rect class="redone" x="{:.1f}" y="0" width="{:.1f}" height="{}"/>')
            drawn.append(area.format(left, max(1.0, at - left), HEIGHT))
        line = Markup('<path class="fault" d="M{:.1f},0V{}"><title>{}</title></path>')
        drawn.append(line.format(at, HEIGHT, mark["text"]))
    drawn += [
        Markup('<path class="saved" d="M{:.1f},{}v-8"/>').format(_across(step, steps), HEIGHT)
        for step in checkpoints
    ]
    return Markup("").join(drawn)


def _across(step: float, steps: tuple[int, int]) -> float:
    first, last = steps
    return WIDTH * (min(max(step, first), last) - first) / max(1, last - first)


def number_text(value: float) -> str:
    """`0.42`, `−1.3` or `1.2e+06`."""
    return f"{value:.3g}".replace("-", "−", 1)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
