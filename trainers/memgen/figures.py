"""Draw a MemGen experiment as a PNG: loss of both trainings, reward, accuracy, and where the trigger fires.

Called by recipes when their evaluation has ended. `experiment_of` collects the numbers, which recipes also
write as JSON; `draw` draws them. Does not change matplotlib's settings or backend.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.files import replace_file
from grpo_run.trainers.memgen.evaluation import Outcome, accuracy, firing_by_delimiter, firing_by_position

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = Sequence[tuple[int, float]]
"""Steps and values."""

INK, QUIET, RULE, FIRST, SECOND = "#22303c", "#6b7a88", "#e3e8ec", "#1f6f8b", "#8a6d3b"
STYLE = {
    "font.family": "DejaVu Sans", "font.size": 9, "text.color": INK, "axes.labelcolor": QUIET,
    "axes.edgecolor": RULE, "axes.axisbelow": True, "axes.grid": True, "axes.grid.axis": "y",
    "grid.color": RULE, "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "xtick.color": QUIET,
    "ytick.color": QUIET, "xtick.major.size": 0, "ytick.major.size": 0,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """The numbers of an experiment.

    Attributes:
        accuracy: mean score of each variant of the evaluation.
        problems: number of held-out problems.
        weaver_loss, trigger_loss, reward: by step, as logged.
        firing_by_position: how often the trained trigger fires at the first, second, ... delimiter.
        firing_by_delimiter: how often it fires after each delimiter.
    """

    accuracy: dict[str, float]
    problems: int
    weaver_loss: Curve
    trigger_loss: Curve
    reward: Curve
    firing_by_position: Sequence[float]
    firing_by_delimiter: dict[str, float]


def experiment_of(
    outcomes: dict[str, list[Outcome]],
    weaver_logs: Sequence[dict[str, Any]],
    trigger_logs: Sequence[dict[str, Any]],
    text_of: Callable[[int], str],
) -> Experiment:
    """Collect the numbers.

    Args:
        outcomes: of the evaluation, by variant.
        weaver_logs: `trainer.state.log_history` of the weaver's training.
        trigger_logs: of the trigger's training.
        text_of: returns the text of a token id.
    """
    trained = outcomes["trained"]
    return Experiment(
        accuracy={variant: accuracy(found) for variant, found in outcomes.items()},
        problems=len(trained),
        weaver_loss=_curve(weaver_logs, "loss"),
        trigger_loss=_curve(trigger_logs, "loss"),
        reward=_curve(trigger_logs, "reward"),
        firing_by_position=firing_by_position(trained),
        firing_by_delimiter={text_of(kind): rate for kind, rate in firing_by_delimiter(trained).items()},
    )


def _curve(logs: Sequence[dict[str, Any]], key: str) -> Curve:
    return [(int(log["step"]), float(log[key])) for log in logs if key in log]


def draw(experiment: Experiment, path: Path) -> None:
    """Draw an experiment into a PNG, which is replaced atomically, mode 0644."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11, 6), dpi=140, layout="constrained")
        upper, lower = figure.subplots(2, 3)
        _line(upper[0], "Weaver, SFT: loss per token", experiment.weaver_loss)
        _line(upper[1], "Trigger, GRPO: loss", experiment.trigger_loss)
        _line(upper[2], "Trigger, GRPO: reward", experiment.reward)
        upper[1].yaxis.set_major_formatter("{x:.1g}")
        upper[2].set_ylim(0, 1.02)
        for axes in upper:
            axes.set_xlabel("step")
        _bars(lower[0], f"Accuracy on {experiment.problems} problems", experiment.accuracy)
        positions = enumerate(experiment.firing_by_position, start=1)
        _bars(lower[1], "Trained trigger: fires at", {str(place): rate for place, rate in positions})
        lower[1].set_xlabel("delimiter of the completion, in order")
        _bars(lower[2], "Trained trigger: fires after", experiment.firing_by_delimiter)
        lower[2].set_xlabel("delimiter")
        figure.savefig(content, format="png")
    replace_file(path, content.getvalue(), mode=0o644)


def _line(axes: Axes, title: str, curve: Curve) -> None:
    axes.set_title(title)
    axes.plot([step for step, _ in curve], [value for _, value in curve], color=FIRST, linewidth=1.6)


MOST_LABELLED = 12
"""Bars that have a label; more would overlap."""


def _bars(axes: Axes, title: str, values: dict[str, float]) -> None:
    axes.set_title(title)
    bars = axes.bar(range(len(values)), list(values.values()), width=0.7, color=SECOND)
    if len(values) <= MOST_LABELLED:
        axes.bar_label(bars, fmt="{:.0%}", padding=2, fontsize=8)
        axes.set_xticks(range(len(values)), list(values))
    axes.set_ylim(0, 1.12)
    axes.set_yticks([0, 0.5, 1], ["0 %", "50 %", "100 %"])
