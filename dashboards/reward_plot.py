"""Draw a run as a PNG: reward and completion length over the steps, with every recovery marked.

Called by `grpo-run demo`; also usable from Python. Reads journal records and draws the last `train()` call
that logged rewards (a warm start logs none), with running means. Does not change matplotlib's settings or
backend.
"""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from grpo_run.dashboards.curves import RunCurves
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.event import Event
from grpo_run.runtime.files import replace_file
from grpo_run.runtime.history.events import StepLogged
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.upstream.versions import is_installed
from grpo_run.watchdog.text import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


SMOOTHING_STEPS = 11
SMOOTHED_FRACTION = 1 / 50
"""Long curves are smoothed over this fraction of what was logged, short curves over `SMOOTHING_STEPS`."""

Numbers = NDArray[np.float64]


def running_mean(values: Numbers) -> Numbers:
    """Return the mean of the values around each one; at both ends of fewer."""
    reach = max(SMOOTHING_STEPS, int(len(values) * SMOOTHED_FRACTION)) // 2
    return np.array([values[max(0, at - reach) : at + reach + 1].mean() for at in range(len(values))])


COMPARED_STEPS = 20
"""The summary compares the mean rewards of this many first and last steps."""
MANY_STEPS = 400
"""Beyond this number of steps the dots are smaller."""

INK, QUIET, RULE = "#22303c", "#6b7a88", "#e3e8ec"
REWARD, LENGTH, RECOVERY = "#1f6f8b", "#8a6d3b", "#b3423a"
STYLE = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": QUIET,
    "axes.edgecolor": RULE,
    "axes.facecolor": "white",
    "axes.axisbelow": True,
    "axes.unicode_minus": True,
    "figure.facecolor": "white",
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "savefig.facecolor": "white",
}


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The numbers in the picture. Mean rewards are over the first and last `compared_steps` logged steps."""

    path: Path | None
    steps: int
    compared_steps: int
    first_reward: float
    last_reward: float
    recoveries: int


FAULTS = {"signal": "killed", "exception": "failed"}
"""Words for causes; other causes are their own."""


def recovery_label(recoveries: Sequence[Recovery]) -> str:
    """Return one line about the marked faults, for example `rank 1 killed · recovered in 1.1 s · 3 steps
    repeated`. Omits what is unknown; empty without faults.
    """
    if not recoveries:
        return ""
    first = recoveries[0]
    seconds = [one.recovery_seconds for one in recoveries if one.recovery_seconds is not None]
    repeated = sum(one.lost_steps or 0 for one in recoveries)
    if len(recoveries) == 1:
        parts = [FAULTS.get(first.cause, first.cause.replace("_", " "))]
        parts = parts if first.rank is None else [f"rank {first.rank} {parts[0]}"]
        parts.append(f"recovered in {seconds[0]:.1f} s" if seconds else "not recovered")
    else:
        parts = [f"{len(recoveries)} failures", f"{len(seconds)} recovered in {sum(seconds):.1f} s"]
    if repeated:
        parts.append(f"{counted(repeated, 'step')} repeated")
    return " · ".join(parts)


def draw_run(events: Iterable[Event], path: Path) -> Summary:
    """Draw the events of a journal into a PNG and return a summary; nothing is drawn without matplotlib.

    Args:
        events: the journal, as `runtime.history.reader.read_journal` yields it.
        path: path of the PNG; replaced atomically, mode 0644.

    Raises:
        RunDirectoryError: the journal has no rewards, or the picture cannot be written.
    """
    curves, history = RunCurves(), History()
    for event in events:
        history.apply(event)
        if not isinstance(event, StepLogged) or event.reward is not None:
            curves.apply(event, history)
    steps, rewards = curves.curves["reward"].arrays()
    if not len(steps):
        raise RunDirectoryError("the journal has no rewards to draw; no GRPO step has been logged yet")
    compared = min(COMPARED_STEPS, len(steps))
    summary = Summary(
        path=path if is_installed("matplotlib") else None,
        steps=int(steps[-1]),
        compared_steps=compared,
        first_reward=float(rewards[:compared].mean()),
        last_reward=float(rewards[-compared:].mean()),
        recoveries=len(history.recoveries),
    )
    if summary.path is None:
        return summary

    import matplotlib as mpl
    from matplotlib.figure import Figure

    content = io.BytesIO()
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 6.0), dpi=160)
        _compose(figure, curves, history.recoveries, summary)
        figure.savefig(content, format="png")
    _write(path, content.getvalue())
    return summary


def _compose(figure: Figure, curves: RunCurves, all_recoveries: Sequence[Recovery], summary: Summary) -> None:
    steps, rewards = curves.curves["reward"].arrays()
    length_steps, lengths = curves.curves["completion_length"].arrays()
    recoveries = [recovery for recovery in all_recoveries if recovery.train_call == curves.train_call]
    grid = figure.add_gridspec(
        2, 1, height_ratios=(1.75, 1), hspace=0.30, left=0.075, right=0.93, bottom=0.095, top=0.80
    )
    upper = figure.add_subplot(grid[0])
    lower = figure.add_subplot(grid[1], sharex=upper)
    for axes in (upper, lower):
        _remove_frame(axes)

    headline = f"Reward {summary.first_reward:.2f} → {summary.last_reward:.2f}".replace("-", "−")
    figure.text(0.075, 0.935, headline, fontsize=17, weight="bold", va="baseline")
    subtitle = (
        f"first and last {summary.compared_steps} of {counted(summary.steps, 'GRPO step')}"
        "  ·  dots: steps, lines: running means"
    )
    if any(recovery.lost_steps for recovery in recoveries):
        subtitle += "  ·  shaded: repeated steps"
    figure.text(0.075, 0.893, subtitle, fontsize=9.5, color=QUIET)

    _curve(upper, steps, rewards, REWARD, "{:.2f}")
    _heading(upper, "Mean reward")
    upper.set_title(recovery_label(recoveries), loc="right", fontsize=9, color=RECOVERY, pad=9)
    # Rewards between 0 and 1 are drawn on the full scale, so that a small increase does not look large.
    if rewards.min() >= 0 and rewards.max() <= 1:
        upper.set_ylim(0, 1.02)
        upper.set_yticks([0, 0.25, 0.5, 0.75, 1])
    upper.tick_params(labelbottom=False)

    _curve(lower, length_steps, lengths, LENGTH, "{:.0f}")
    _heading(lower, "Completion length, tokens")
    if len(lengths):
        lower.set_ylim(0, lengths.max() * 1.12)
        lower.locator_params(axis="y", nbins=4, integer=True)
    lower.set_xlabel("GRPO step", labelpad=6)
    lower.locator_params(axis="x", integer=True)
    upper.set_xlim(0, steps[-1] * 1.005 + 0.5)
    _mark_recoveries((upper, lower), recoveries)


def _remove_frame(axes: Axes) -> None:
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.grid(axis="y", color=RULE, linewidth=0.8)
    axes.tick_params(length=0, pad=6)


def _heading(axes: Axes, text: str) -> None:
    axes.set_title(text, loc="left", fontsize=10, color=INK, weight="bold", pad=9)


def _curve(axes: Axes, steps: NDArray[np.int64], values: Numbers, color: str, number_format: str) -> None:
    if not len(steps):
        axes.text(0.5, 0.5, "not logged", transform=axes.transAxes, color=QUIET, ha="center", va="center")
        axes.set_yticks([])
        return
    size = 3.4 if len(steps) <= MANY_STEPS else 2.0
    axes.plot(steps, values, linestyle="none", marker="o", markersize=size, color=color, alpha=0.28, mew=0)
    means = running_mean(values)
    axes.plot(steps, means, color=color, linewidth=2.1, solid_capstyle="round", solid_joinstyle="round")
    axes.annotate(
        number_format.format(values[-min(COMPARED_STEPS, len(values)) :].mean()),
        (steps[-1], means[-1]),
        xytext=(9, 0),
        textcoords="offset points",
        color=color,
        weight="bold",
        va="center",
        annotation_clip=False,
    )


def _mark_recoveries(all_axes: Sequence[Axes], recoveries: Sequence[Recovery]) -> None:
    for axes in all_axes:
        for recovery in recoveries:
            if recovery.from_checkpoint is not None and recovery.lost_steps:
                axes.axvspan(recovery.from_checkpoint, recovery.step, color=RECOVERY, alpha=0.10, linewidth=0)
            axes.axvline(recovery.step, color=RECOVERY, linewidth=1.1)


def _write(path: Path, content: bytes) -> None:
    """Replace the picture atomically, because a viewer may have the old one open."""
    try:
        replace_file(path, content, mode=0o644)
    except OSError as error:
        raise RunDirectoryError(
            f"cannot write the picture {str(path)!r}: {error.strerror or error}"
        ) from None
