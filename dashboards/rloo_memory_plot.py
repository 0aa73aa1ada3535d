"""Three pictures of the RLOO memory experiment as PNG: peaks, memory over time, and savings.

Called by `grpo-run bench memory`. Reads and writes no file; measures nothing.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MIB = float(1 << 20)
COLORS = ("#2b5f83", "#5d9cb8", "#e3ac4f", "#cc6b49", "#8a6fb0", "#7d8fa0")
INK, QUIET, RULE = "#22303c", "#64727f", "#e6ebef"
Series = Sequence[tuple[float, int, str]]


def draw_peaks(peaks: Mapping[str, Mapping[int, int | None]]) -> bytes:
    """Return bars of peak bytes by setting and k; None stands for exhausted memory."""

    def compose(axes: Axes) -> None:
        _bars(
            axes, {name: {k: _scaled(v) for k, v in by_k.items()} for name, by_k in peaks.items()}, "{:.0f}"
        )
        axes.set_ylabel("highest live bytes (MiB)", color=QUIET)

    return _picture("Peak memory of an RLOO step", compose)


def draw_savings(savings: Mapping[str, Mapping[int, float | None]]) -> bytes:
    """Return bars of the share that each setting saves over the first one."""
    base = next(iter(savings))

    def compose(axes: Axes) -> None:
        percent = {
            name: {k: None if share is None else 100 * share for k, share in by_k.items()}
            for name, by_k in savings.items()
        }
        _bars(axes, percent, "{:.1f} %")
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.set_ylabel(f"lower peak than {base} (%)", color=QUIET)

    return _picture(f"Savings over {base}", compose)


def draw_over_time(series: Mapping[str, Series], k: int) -> bytes:
    """Return live bytes over the share of each run's time, with its duration in the legend."""

    def compose(axes: Axes) -> None:
        for (name, points), color in zip(series.items(), COLORS * len(series), strict=False):
            seconds = [point[0] for point in points]
            length = max(seconds[-1] - seconds[0], 1e-9)
            shares = [100 * (one - seconds[0]) / length for one in seconds]
            label = f"{name} ({length:.0f} s)"
            axes.plot(shares, [point[1] / MIB for point in points], color=color, linewidth=1, label=label)
        axes.set_xlabel("share of the run's time (%)", color=QUIET)
        axes.set_ylabel("live bytes (MiB)", color=QUIET)

    return _picture(f"Memory over time, k = {k}", compose)


def _scaled(size: int | None) -> float | None:
    return None if size is None else size / MIB


def _bars(axes: Axes, values: Mapping[str, Mapping[int, float | None]], text: str) -> None:
    ks = list(next(iter(values.values())))
    width = 0.84 / len(values)
    for number, (name, by_k) in enumerate(values.items()):
        places = [place + (number - (len(values) - 1) / 2) * width for place in range(len(ks))]
        heights = [by_k[k] or 0.0 for k in ks]
        bars = axes.bar(places, heights, 0.94 * width, color=COLORS[number % len(COLORS)], label=name)
        labels = ["out of\nmemory" if by_k[k] is None else text.format(by_k[k]) for k in ks]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(ks)), [f"k = {k}" for k in ks])


def _picture(title: str, compose: Callable[[Axes], None]) -> bytes:
    from matplotlib.figure import Figure

    content = io.BytesIO()
    figure = Figure(figsize=(10, 5.4))
    axes = figure.add_axes((0.08, 0.11, 0.89, 0.68))
    compose(axes)
    figure.text(0.03, 0.94, title, fontsize=13, color=INK)
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.margins(y=0.08)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.legend(loc="lower left", bbox_to_anchor=(-0.05, 1.01), ncols=3, frameon=False, fontsize=9)
    figure.savefig(content, format="png", dpi=110)
    return content.getvalue()
