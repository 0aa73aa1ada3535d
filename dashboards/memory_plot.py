"""Draw memory over the phases of a step as an SVG: stacked by kind, with the limit of the GPU and the highest instant marked.

Called by `grpo-run plan --plot`. Self-contained: no script, no font and no image is loaded. Pure; reads and writes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLORS = {
    "outside torch": "#c5ced6",
    "weights": "#2b5f83",
    "optimizer": "#5d9cb8",
    "gradients": "#a3cdd0",
    "buffers": "#7d8fa0",
    "KV cache": "#8a6fb0",
    "rollout": "#b7a99a",
    "activations": "#e3ac4f",
    "logits": "#cc6b49",
}
"""Kinds from the bottom of the stack to its top: what stays is below what comes and goes."""
INK, QUIET, RULE, LIMIT, PAPER = "#22303c", "#64727f", "#e6ebef", "#b3423a", "#ffffff"
FONT = "'DejaVu Sans', 'Helvetica Neue', Helvetica, Arial, sans-serif"
WIDTH, HEIGHT = 960.0, 560.0
LEFT, RIGHT, TOP, BOTTOM = 68.0, 28.0, 120.0, 64.0
SHARES = {"generate": 1.1, "score": 1.0, "forward": 1.5, "backward": 2.2, "optimizer": 1.1}
"""Relative widths of the phases; they are not durations."""
GIB = float(1 << 30)
_RANGE_PATTERN = (
    '<defs><pattern id="range" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
    f'<line x1="0" y1="0" x2="0" y2="6" stroke="{QUIET}" stroke-width="1.6" stroke-opacity="0.45"/></pattern></defs>'
)
"""Hatching of what may be needed beyond the lower end of the range."""
VISIBLE = 0.002
"""Share of the highest total below which a kind is not listed in the legend."""
STEPS = (1, 2, 2.5, 5, 10)
GRID_LINES = 6
LABEL_PIXELS = 7.0
"""Width of a character of a label, about."""


@dataclass(frozen=True, kw_only=True)
class PlottedPhase:
    """A phase.

    Attributes:
        name: written below it.
        instants: bytes by kind, in order.
        spread_bytes: how much more may be needed than the instants say.
    """

    name: str
    instants: Sequence[dict[str, float]]
    spread_bytes: float


@dataclass(frozen=True, kw_only=True)
class MemoryPlot:
    """What is drawn.

    Attributes:
        title: one line.
        subtitle: one line, smaller.
        phases: in order.
        limit_bytes: memory of the GPU, if it is known.
    """

    title: str
    subtitle: str
    phases: Sequence[PlottedPhase]
    limit_bytes: float | None


def draw(plot: MemoryPlot) -> str:
    """Return the picture as the text of an SVG file."""
    highest = max(sum(held.values()) + phase.spread_bytes for phase in plot.phases for held in phase.instants)
    # a limit far above the curve would press it flat
    shown = plot.limit_bytes is not None and plot.limit_bytes <= 4 * highest
    top = 1.08 * max(highest, plot.limit_bytes or 0.0 if shown else 0.0)
    scale = _Scale(plot.phases, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img" font-family="{FONT}">',
        f"<title>{escape(plot.title)}</title>",
        f"<desc>{escape(plot.subtitle)}</desc>",
        _RANGE_PATTERN,
        f'<rect width="{WIDTH:.0f}" height="{HEIGHT:.0f}" fill="{PAPER}"/>',
        _text(LEFT - 40, 34, plot.title, size=17, weight=600),
        _text(LEFT - 40, 55, plot.subtitle, size=12, color=QUIET),
        *_legend(plot, highest),
        *_grid(scale, top),
        *_areas(plot, scale),
        *_phase_names(plot, scale),
        *(_limit(plot.limit_bytes, scale, shown=shown) if plot.limit_bytes is not None else ()),
        *_highest_instant(plot, scale),
        "</svg>\n",
    ]
    return "\n".join(parts)


class _Scale:
    """Pixels of instants and bytes."""

    def __init__(self, phases: Sequence[PlottedPhase], top: float) -> None:
        self._top = top
        self._left: dict[str, float] = {}
        total = sum(SHARES.get(phase.name, 1.0) for phase in phases)
        at = LEFT
        self._widths = {}
        for phase in phases:
            width = (WIDTH - LEFT - RIGHT) * SHARES.get(phase.name, 1.0) / total
            self._left[phase.name], self._widths[phase.name] = at, width
            at += width

    def edges(self, phase: PlottedPhase) -> tuple[float, float]:
        """Left and right edge of a phase."""
        left = self._left[phase.name]
        return left, left + self._widths[phase.name]

    def x(self, phase: PlottedPhase, index: float) -> float:
        """Left edge of an instant."""
        return self._left[phase.name] + self._widths[phase.name] * index / len(phase.instants)

    def y(self, size: float) -> float:
        """Height of a size."""
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * size / self._top


def _areas(plot: MemoryPlot, scale: _Scale) -> list[str]:
    """Return one area per kind and phase, from the bottom up, and the hatched range above them."""
    found = []
    for phase in plot.phases:
        floor = [0.0] * len(phase.instants)
        for kind, color in COLORS.items():
            ceiling = [below + held.get(kind, 0.0) for below, held in zip(floor, phase.instants, strict=True)]
            if ceiling != floor:
                found.append(f'<path d="{_band(phase, scale, floor, ceiling)}" fill="{color}"/>')
            floor = ceiling
        if phase.spread_bytes > 0:
            ceiling = [below + phase.spread_bytes for below in floor]
            found.append(f'<path d="{_band(phase, scale, floor, ceiling)}" fill="url(#range)"/>')
    return found


def _band(phase: PlottedPhase, scale: _Scale, floor: Sequence[float], ceiling: Sequence[float]) -> str:
    """Return the outline between two step lines."""
    there = _steps(phase, scale, ceiling, range(len(ceiling)))
    back = _steps(phase, scale, floor, range(len(floor) - 1, -1, -1))
    return f"M{' L'.join(there + back)}Z"


def _steps(phase: PlottedPhase, scale: _Scale, sizes: Sequence[float], order: Sequence[int]) -> list[str]:
    """Return the corners of a step line; those in the middle of a level are left out."""
    found: list[tuple[float, float]] = []
    for index in order:
        edges = (index, index + 1) if order[0] == 0 else (index + 1, index)
        for edge in edges:
            point = (scale.x(phase, edge), scale.y(sizes[index]))
            if len(found) > 1 and found[-1][1] == found[-2][1] == point[1]:
                found[-1] = point
            else:
                found.append(point)
    return [f"{x:.1f},{y:.1f}" for x, y in found]


def _grid(scale: _Scale, top: float) -> list[str]:
    step = _round_step(top / GIB / GRID_LINES)
    found = []
    number = 0
    while number * step * GIB <= top:
        y = scale.y(number * step * GIB)
        found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{RULE}"/>')
        found.append(_text(LEFT - 10, y + 4, f"{number * step:g}", size=11.5, color=QUIET, anchor="end"))
        number += 1
    found.append(_text(LEFT - 10, TOP - 12, "GiB", size=11.5, color=QUIET, anchor="end"))
    return found


def _round_step(least: float) -> float:
    power = 10.0**-6
    while True:
        for step in STEPS:
            if step * power >= least:
                return step * power
        power *= 10


def _phase_names(plot: MemoryPlot, scale: _Scale) -> list[str]:
    found = []
    bottom = HEIGHT - BOTTOM
    for number, phase in enumerate(plot.phases):
        left, right = scale.edges(phase)
        if number:
            found.append(
                f'<line x1="{left:.1f}" x2="{left:.1f}" y1="{TOP}" y2="{bottom}" stroke="{PAPER}" stroke-width="2.5"/>'
            )
        found.append(_text((left + right) / 2, bottom + 22, phase.name, size=13, anchor="middle"))
    found.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}" stroke="{INK}"/>')
    found.append(
        _text(
            (LEFT + WIDTH - RIGHT) / 2,
            bottom + 44,
            "phases of one optimizer step; within a phase allocations are in order, not to the scale of time",
            size=11,
            color=QUIET,
            anchor="middle",
        )
    )
    return found


def _limit(limit: float, scale: _Scale, *, shown: bool) -> list[str]:
    text = f"GPU: {limit / GIB:.1f} GiB"
    if not shown:
        return [_text(WIDTH - RIGHT, TOP - 8, f"{text}, far above", size=12, color=LIMIT, anchor="end")]
    y = scale.y(limit)
    return [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="{LIMIT}" stroke-width="1.8" stroke-dasharray="7 4"/>',
        _label(LEFT + 8, y - 7, text, color=LIMIT, weight=600),
    ]


def _highest_instant(plot: MemoryPlot, scale: _Scale) -> list[str]:
    """Return a mark at the instant that binds, and its label beside it."""
    _, phase, index = _binding(plot)
    held = phase.instants[index]
    low = sum(held.values())
    x, y = scale.x(phase, index + 0.5), scale.y(low)
    high = low + phase.spread_bytes
    largest = sorted((kind for kind in held if held[kind] > 0), key=lambda kind: -held[kind])[:2]
    lines = [
        f"{phase.name} binds: {low / GIB:.2f}" + (f" to {high / GIB:.2f} GiB" if high > low else " GiB"),
        ", ".join(f"{kind} {held[kind] / GIB:.2f}" for kind in largest),
    ]
    left = x > WIDTH / 2
    edge = x - 14 if left else x + 14
    anchor = "end" if left else "start"
    above = scale.y(high)
    at = max(TOP + 6, above - 24)
    return [
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{above:.1f}" y2="{HEIGHT - BOTTOM:.1f}" stroke="{INK}" stroke-width="1" stroke-dasharray="2 3"/>',
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4.5" fill="{PAPER}" stroke="{INK}" stroke-width="2"/>',
        _label(edge, at, lines[0], weight=600, anchor=anchor),
        _label(edge, at + 16, lines[1], color=QUIET, anchor=anchor),
    ]


def _binding(plot: MemoryPlot) -> tuple[float, PlottedPhase, int]:
    best: tuple[float, PlottedPhase, int] | None = None
    for phase in plot.phases:
        for index, held in enumerate(phase.instants):
            size = sum(held.values()) + phase.spread_bytes
            if best is None or size > best[0]:
                best = (size, phase, index)
    assert best is not None
    return best


def _legend(plot: MemoryPlot, highest: float) -> list[str]:
    """Return the kinds that can be seen, in the order of the stack from its top."""
    found, x = [], LEFT - 40
    most = {
        kind: max(held.get(kind, 0.0) for phase in plot.phases for held in phase.instants) for kind in COLORS
    }
    entries = [(kind, COLORS[kind]) for kind in reversed(COLORS) if most[kind] > VISIBLE * highest]
    if any(phase.spread_bytes > 0 for phase in plot.phases):
        entries.insert(0, ("upper end of the range", "url(#range)"))
    for name, color in entries:
        found.append(f'<rect x="{x:.1f}" y="74" width="12" height="12" rx="2" fill="{color}"/>')
        found.append(_text(x + 18, 84.5, name, size=12))
        x += 18 + LABEL_PIXELS * len(name) + 20
    return found


def _label(
    x: float, y: float, text: str, *, color: str = INK, weight: int = 400, anchor: str = "start"
) -> str:
    """Return text with a halo, which can be read on any color."""
    halo = f' stroke="{PAPER}" stroke-width="4" stroke-linejoin="round" paint-order="stroke"'
    return _text(x, y, text, size=12.5, color=color, weight=weight, anchor=anchor, more=halo)


def _text(
    x: float,
    y: float,
    text: str,
    *,
    size: float,
    color: str = INK,
    weight: int = 400,
    anchor: str = "start",
    more: str = "",
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" fill="{color}" text-anchor="{anchor}"{more}>'
        f"{escape(text)}</text>"
    )
