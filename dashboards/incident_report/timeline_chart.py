"""The report's chart as a plotly figure: the phases of each rank before the incident.

Called by `page.py`, which embeds the figure in the page as JSON. Colors that depend on the browser's light
or dark scheme are given as names of CSS variables (for example `--ink`), which the page's script resolves.
Pure; does not import plotly.
"""

from __future__ import annotations

import html
from collections.abc import Collection, Mapping
from typing import Any

PlotlyFigure = dict[str, Any]

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
    "callback": "#7a6f9b",
}
OTHER_COLOR = "#97a1ab"
BAR_PIXELS, FRAME_PIXELS = 34, 96
MIN_SHOWN_SECONDS = 15.0
SHOWN_OPEN_PHASES = 1.4
"""The initial view covers the longest open phase times this factor; dragging the chart shows earlier phases.
"""


def timeline_figure(timeline: Mapping[str, Any], culprits: Collection[int]) -> PlotlyFigure | None:
    """Return one bar per phase and rank, or None if the timeline has no valid phase.

    Args:
        timeline: `{"ranks": {"0": [[phase, begin, end or null], …]}, "now": seconds}`; null marks an open
            phase.
        culprits: ranks whose labels are bold.
    """
    now = _number(timeline.get("now")) or 0.0
    spans: dict[str, list[tuple[str, float, float, bool]]] = {}
    ranks = timeline.get("ranks")
    rows = sorted(
        (int(rank), phases)
        for rank, phases in (ranks.items() if isinstance(ranks, dict) else ())
        if rank.isdecimal() and isinstance(phases, list)
    )
    open_seconds, first = 0.0, now
    for rank, phases in rows:
        for phase, begin, end in (span for span in phases if isinstance(span, list) and len(span) == 3):
            start, stop = _number(begin), _number(end)
            if start is None:
                continue
            if stop is None:
                open_seconds = max(open_seconds, now - start)
            first = min(first, start)
            spans.setdefault(str(phase), []).append(
                (_label(rank, culprits), start, now if stop is None else stop, stop is None)
            )
    if not spans:
        return None
    shown = max(MIN_SHOWN_SECONDS, SHOWN_OPEN_PHASES * open_seconds)
    begin = max(first, now - shown)
    return {
        "data": [_phase_bars(phase, spans[phase]) for phase in _in_order(spans)],
        "layout": {
            "barmode": "overlay",
            "uniformtext": {"mode": "hide", "minsize": 11},
            "bargap": 0.28,
            "height": FRAME_PIXELS + BAR_PIXELS * len(rows),
            "margin": {"l": 64, "r": 12, "t": 40, "b": 42},
            "dragmode": "pan",
            "hovermode": "closest",
            "legend": {"orientation": "h", "x": 0, "y": 1, "yanchor": "bottom", "yref": "paper",
            "traceorder": "normal"},
            "xaxis": {
                "title": {"text": "seconds relative to the incident", "standoff": 8},
                "range": [begin, now + (now - begin) * 0.02],
                "zeroline": False,
                "gridcolor": "--rule",
                "tickformat": "~g",
            },
            "yaxis": {
                "categoryorder": "array",
                "categoryarray": [_label(rank, culprits) for rank, _ in reversed(rows)],
                "fixedrange": True,
                "showgrid": False,
                "ticklen": 0,
                "ticklabelstandoff": 8,
            },
            "shapes": [
                {
                    "type": "line",
                    "yref": "paper",
                    "x0": 0,
                    "x1": 0,
                    "y0": 0,
                    "y1": 1,
                    "line": {"color": "--alarm", "width": 1.5},
                }
            ],
        },
    }  # fmt: skip


def _phase_bars(phase: str, spans: list[tuple[str, float, float, bool]]) -> PlotlyFigure:
    name = html.escape(phase)  # plotly interprets some HTML tags in names
    return {
        "type": "bar",
        "orientation": "h",
        "name": name,
        "y": [label for label, _, _, _ in spans],
        "base": [round(begin, 4) for _, begin, _, _ in spans],
        "x": [round(max(0.0, end - begin), 4) for _, begin, end, _ in spans],
        "customdata": [
            f"{end - begin:.3g} s" + (", still open" if is_open else "") for _, begin, end, is_open in spans
        ],
        "text": [f"{end - begin:.3g} s" if is_open else "" for _, begin, end, is_open in spans],
        "textposition": "inside",
        "insidetextanchor": "end",
        "insidetextfont": {"color": "white"},
        "textangle": 0,
        "marker": {"color": PHASE_COLORS.get(phase, OTHER_COLOR), "line": {"width": 0}},
        "hovertemplate": f"%{{y}}: {name}, %{{customdata}}<extra></extra>",
    }


def _in_order(phases: Collection[str]) -> list[str]:
    known = [phase for phase in PHASE_COLORS if phase in phases]
    return known + sorted(set(phases) - set(known))


def _label(rank: int, culprits: Collection[int]) -> str:
    return f"<b>rank {rank}</b>" if rank in culprits else f"rank {rank}"


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
