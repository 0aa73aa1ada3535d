"""Pictures of the RLOO memory experiment as PNG: bars by setting and k, and memory over time.

Called by `grpo-run bench memory`. Reads and writes no file; measures nothing.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MIB = float(1 << 20)
COLORS = ("#2b5f83", "#5d9cb8", "#e3ac4f", "#cc6b49", "#8a6fb0", "#7d8fa0")
INK, QUIET, RULE = "#22303c", "#64727f", "#e6ebef"
Series = Sequence[tuple[float, int, str]]


def draw_bars(title: str, label: str, values: Mapping[str, Mapping[int, float | None]], text: str) -> bytes:
    """Return bars of a figure by setting and k.

    Args:
        label: of the figure, with its unit.
        values: by setting and k; None stands for exhausted memory.
        text: format of the number above a bar.
    """
    figure, axes = _empty(title, label)
    ks = list(next(iter(values.values())))
    width = 0.84 / len(values)
    for number, (name, by_k) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(ks))]
        heights = [by_k[k] or 0.0 for k in ks]
        bars = axes.bar(places, heights, 0.94 * width, color=COLORS[number % len(COLORS)], label=name)
        labels = ["out of\nmemory" if by_k[k] is None else text.format(by_k[k]) for k in ks]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])
    axes.axhline(0, color=INK, linewidth=0.8)
    return _png(figure, axes)


def draw_over_time(series: Mapping[str, Series], k: int) -> bytes:
    """Return live bytes over the share of each run's time, with its duration in the legend."""
    figure, axes = _empty(f"Memory over time, k = {k}", "live bytes (MiB)")
    for (name, points), color in zip(series.items(), COLORS * len(series), strict=False):
        seconds = [point[0] for point in points]
        length = max(seconds[-1] - seconds[0], 1e-9)
        shares = [100 * (one - seconds[0]) / length for one in seconds]
        label = f"{name} ({length:.0f} s)"
        axes.plot(shares, [point[1] / MIB for point in points], color=color, linewidth=1, label=label)
    axes.set_xlabel("share of the run's time (%)", color=QUIET)
    return _png(figure, axes)


def _empty(title: str, label: str) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.4))
    figure.text(0.03, 0.94, title, fontsize=13, color=INK)
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.68))
    axes.set_ylabel(label, color=QUIET)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)
    axes.spines[["top", "left", "right"]].set_visible(False)
    return figure, axes


def _png(figure: Figure, axes: Axes) -> bytes:
    axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 1.01), ncols=3, frameon=False, fontsize=9)
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
