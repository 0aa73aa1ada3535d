"""Draw memory over the phases of a step as an SVG: stacked by kind, with the limit of the GPU and the highest
instant marked.

Called by `grpo-run plan --plot`. Self-contained: no script, no font and no image is loaded. Reads and writes
no file.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from grpo_run.runtime.planning.series import StepPhase

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
INK, QUIET, RULE, LIMIT = "#22303c", "#64727f", "#e6ebef", "#b3423a"
SHARES = {"generate": 1.1, "score": 1.0, "forward": 1.5, "backward": 2.2, "optimizer": 1.1}
"""Relative widths of the phases; they are not durations."""
GIB = float(1 << 30)
VISIBLE = 0.002
"""Share of the highest total below which a kind is not listed in the legend."""
FAR = 4.0
"""A limit above this many times the curve would press it flat; it is only named."""
STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": QUIET,
    "svg.fonttype": "none",  # text stays text, in a font of the reader's
    "svg.hashsalt": "grpo-run",  # the same plan gives the same file
    "hatch.color": QUIET,
    "hatch.linewidth": 0.6,
}


def draw(phases: Sequence[StepPhase], *, title: str, subtitle: str, limit_bytes: float | None) -> str:
    """Return the picture as the text of an SVG file.

    Args:
        phases: in order.
        title: one line.
        subtitle: one line, smaller.
        limit_bytes: memory of the GPU, if it is known.
    """
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = io.StringIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 5.8))
        axes = figure.add_axes((0.07, 0.12, 0.90, 0.66))
        for height, size, color, text in ((0.94, 13, INK, title), (0.90, 9, QUIET, subtitle)):
            figure.text(0.03, height, text, fontsize=size, color=color, parse_math=False)
        _compose(axes, phases, limit_bytes)
        figure.savefig(content, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return content.getvalue()


def _compose(axes: Axes, phases: Sequence[StepPhase], limit_bytes: float | None) -> None:
    highest = max(sum(held.values()) + phase.spread_bytes for phase in phases for held in phase.instants)
    ends = np.cumsum([0.0, *(SHARES.get(phase.name, 1.0) for phase in phases)])
    listed: set[str] = set()
    for phase, left, right in zip(phases, ends, ends[1:], strict=False):
        edges = np.linspace(left, right, len(phase.instants) + 1).repeat(2)[1:-1]
        floor = np.zeros(len(phase.instants))
        for kind, color in COLORS.items():
            sizes = np.array([held.get(kind, 0.0) / GIB for held in phase.instants])
            label = kind if kind not in listed and sizes.max() * GIB > VISIBLE * highest else None
            if label:
                listed.add(kind)
            axes.fill_between(
                edges, floor.repeat(2), (floor + sizes).repeat(2), color=color, linewidth=0, label=label
            )
            floor = floor + sizes
        if phase.spread_bytes:
            upper = (floor + phase.spread_bytes / GIB).repeat(2)
            label = None if "range" in listed else "upper end of the range"
            listed.add("range")
            axes.fill_between(
                edges, floor.repeat(2), upper, facecolor="none", hatch="////", linewidth=0, label=label
            )
        axes.axvline(right, color="white", linewidth=2)
    _mark_highest(axes, phases, ends)
    top = highest
    if limit_bytes is not None:
        text = f"GPU: {limit_bytes / GIB:.1f} GiB"
        if limit_bytes > FAR * highest:
            axes.text(1, 1.01, f"{text}, far above", transform=axes.transAxes, ha="right", color=LIMIT)
        else:
            top = max(top, limit_bytes)
            axes.axhline(limit_bytes / GIB, color=LIMIT, linestyle="--")
            axes.text(0.06, limit_bytes / GIB, text, va="bottom", color=LIMIT, weight="bold")
    axes.set_xlim(0, ends[-1])
    axes.set_ylim(0, 1.08 * top / GIB)
    axes.set_ylabel("GiB", color=QUIET)
    axes.set_xticks((ends[:-1] + ends[1:]) / 2, [phase.name for phase in phases])
    axes.set_xlabel(
        "phases of one optimizer step; within a phase allocations are in order, not to the scale of time",
        color=QUIET,
    )
    axes.grid(axis="y", color=RULE)
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[["top", "left", "right"]].set_visible(False)
    # in the order of the stack from its top
    axes.legend(
        loc="lower left", bbox_to_anchor=(-0.05, 1.02), ncols=5, frameon=False, reverse=True, fontsize=9
    )


def _mark_highest(axes: Axes, phases: Sequence[StepPhase], ends: NDArray[np.float64]) -> None:
    """Mark the instant that binds, and write what it holds beside it."""
    instants = [
        (sum(held.values()) + phase.spread_bytes, left + (right - left) * (index + 0.5) / len(phase.instants),
        phase, held)
        for phase, left, right in zip(phases, ends, ends[1:], strict=False)
        for index, held in enumerate(phase.instants)
    ]  # fmt: skip
    size, x, phase, held = max(instants, key=lambda one: one[0])
    low = sum(held.values())
    text = f"{phase.name} binds: {low / GIB:.2f}" + (f" to {size / GIB:.2f} GiB" if size > low else " GiB")
    largest = sorted((kind for kind in held if held[kind] > 0), key=lambda kind: -held[kind])[:2]
    text += "\n" + ", ".join(f"{kind} {held[kind] / GIB:.2f}" for kind in largest)
    axes.plot([x, x], [0, size / GIB], color=INK, linewidth=1, linestyle=":")
    axes.plot([x], [low / GIB], marker="o", color="white", markeredgecolor=INK, markeredgewidth=1.6)
    on_left = x > ends[-1] / 2
    axes.annotate(
        text,
        (x, size / GIB),
        xytext=(-12 if on_left else 12, -4),
        textcoords="offset points",
        ha="right" if on_left else "left",
        va="top",
        bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 2},
    )
