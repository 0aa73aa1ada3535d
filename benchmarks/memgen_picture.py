"""Draw the results of a MemGen recipe: loss of both trainings, reward, accuracy, and where the trigger fires.

benchmarks/memgen_picture.py OUTPUT_DIR/experiment.json picture.png
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, QUIET, RULE, FIRST, SECOND = "#22303c", "#6b7a88", "#e3e8ec", "#1f6f8b", "#8a6d3b"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": QUIET,
    "axes.edgecolor": RULE, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": RULE, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "xtick.color": QUIET,
    "ytick.color": QUIET, "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip
MOST_LABELLED = 12
"""Bars that have a label; more would overlap."""


def main(words: Sequence[str]) -> int:
    """Draw an `experiment.json` into a PNG; returns 0."""
    source, picture = words
    experiment = json.loads(Path(source).read_text())
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 6), dpi=140, layout="constrained")
        upper, lower = figure.subplots(2, 3)
        _line(upper[0], "Weaver, SFT: loss per token", experiment["weaver_loss"])
        _line(upper[1], "Trigger, GRPO: loss", experiment["trigger_loss"])
        _line(upper[2], "Trigger, GRPO: reward", experiment["reward"])
        # advantages add up to 0, so rounding alone is left: without a scale it would look like a signal
        bound = max(0.001, *(abs(loss) for _, loss in experiment["trigger_loss"]))
        upper[1].set_ylim(-bound, bound)
        upper[1].set_yticks([-bound, 0, bound])
        upper[2].set_ylim(0, 1.02)
        for axes in upper:
            axes.set_xlabel("step")
        _bars(lower[0], f"Accuracy on {experiment['problems']} problems", experiment["accuracy"])
        positions = enumerate(experiment["firing_by_position"], start=1)
        fired = {"P": experiment["firing_at_prompt"]} | {str(place): rate for place, rate in positions}
        _bars(lower[1], "Trained trigger: fires at", fired)
        lower[1].set_xlabel("P: the prompt's end; then the delimiters in order")
        _bars(lower[2], "Trained trigger: fires after", experiment["firing_by_delimiter"])
        lower[2].set_xlabel("delimiter")
        figure.savefig(picture)
    return 0


def _line(axes: Axes, title: str, curve: Sequence[tuple[int, float]]) -> None:
    axes.set_title(title)
    axes.plot([step for step, _ in curve], [value for _, value in curve], color=FIRST, linewidth=1.6)


def _bars(axes: Axes, title: str, values: Mapping[str, float]) -> None:
    axes.set_title(title)
    bars = axes.bar(range(len(values)), list(values.values()), width=0.7, color=SECOND)
    if len(values) <= MOST_LABELLED:
        axes.bar_label(bars, fmt="{:.0%}", padding=2, fontsize=8)
        axes.set_xticks(range(len(values)), list(values))
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
