"""The report of a whole run as one HTML page, as Markdown, or as JSON.

Called by `grpo-run report` with what `run_contents.py` has read. Pure except for reading the template.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

from grpo_run.dashboards.reports.charts import curve_chart, number_text
from grpo_run.dashboards.reports.incident_facts import duration, size, utc_time
from grpo_run.dashboards.reports.rendering import render
from grpo_run.dashboards.reports.run_contents import RunReport

LABELS = {
    "productive": "Productive steps",
    "startup": "Start-up",
    "checkpoint": "Checkpoints",
    "detection": "Detection of faults",
    "recovery": "Recovery",
    "redone": "Steps done again",
    "stopped": "No supervisor ran",
    "unfinished step": "Unfinished step",
}
CURVES = {"reward": "Reward", "loss": "Loss", "completion_length": "Completion length", "kl": "KL divergence"}


@dataclass(frozen=True, kw_only=True)
class WallRow:
    """One state of the wall time; `left` and `width` place its bar, in percent of all time."""

    state: str
    label: str
    seconds: str
    share: str
    left: float
    width: float


def wall_rows(report: RunReport) -> list[WallRow]:
    """Return the states that took time; each bar begins where the one before it ends."""
    total = sum(report.wall_seconds.values())
    rows, left = [], 0.0
    for state, seconds in report.wall_seconds.items():
        if total <= 0 or seconds <= 0:
            continue
        share = 100 * seconds / total
        rows.append(
            WallRow(
                state=state.partition(" ")[0],
                label=LABELS.get(state, state),
                seconds=long_duration(seconds),
                share=f"{share:.1f}%",
                left=left,
                width=share,
            )
        )
        left += share
    return rows


def long_duration(seconds: float) -> str:
    """`9 h 41 min`, or as `duration` for less than an hour."""
    if seconds < 3600:
        return duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def figures(report: RunReport) -> dict[str, str]:
    """Return the numbers at the top, by name."""
    wall = sum(report.wall_seconds.values())
    target = f" of {report.target_steps:,}" if report.target_steps else ""
    rows = {
        "Goodput": "" if report.goodput is None else f"{100 * report.goodput:.1f}%",
        "Wall time": long_duration(wall) if wall else "",
        "Steps": f"{report.step:,}{target}",
        "Attempts": f"{report.attempts:,}",
        "Incidents": f"{len(report.incidents) + report.omitted:,}",
    }
    return {name: text for name, text in rows.items() if text}


def as_html(report: RunReport) -> str:
    """Return the page; all texts of the report are escaped."""
    first, stop, further = report.sentence.partition(". ")
    return render(
        "run.html",
        sentence=first + stop.rstrip(),
        further=further,
        title=f"{report.run_id}: {report.sentence}",
        report=report,
        figures=figures(report),
        wall=wall_rows(report),
        curves=[
            curve_chart(label, report.curves[name], report.marks)
            for name, label in CURVES.items()
            if report.curves.get(name)
        ],
    )


def as_json(report: RunReport) -> str:
    """Return the report as one JSON object in ASCII. A point of a curve is step, mean, smallest, largest."""
    return json.dumps(dataclasses.asdict(report), indent=1) + "\n"


def as_markdown(report: RunReport) -> str:
    """Return the report as Markdown, with the range of each curve instead of its points."""
    lines = [f"# {_inline(report.sentence)}", "", f"Run {_inline(report.run_id)}"]
    lines += ["", *_table(("", ""), figures(report).items())]
    lines += ["", "## Wall time", ""]
    lines += _table(("", "time", "share"), [(row.label, row.seconds, row.share) for row in wall_rows(report)])
    if report.curves:
        lines += ["", "## Curves", ""]
        lines += _table(
            ("", "first", "last", "lowest", "highest"),
            [
                (CURVES[name], *map(number_text, (
                    points[0][1], points[-1][1], min(one[2] for one in points), max(one[3] for one in points)
                )))
                for name, points in report.curves.items()
            ],
        )  # fmt: skip
    lines += ["", "## Incidents", ""]
    rows = [
        (
            "" if one.number is None else str(one.number), utc_time(one.at), str(one.step), one.sentence,
            one.action, duration(one.detection_seconds), duration(one.recovery_seconds),
            "" if one.repeated_steps is None else str(one.repeated_steps),
        )
        for one in report.incidents
    ]  # fmt: skip
    titles = (
        "no.",
        "time",
        "step",
        "what happened",
        "action",
        "detected in",
        "recovered in",
        "repeated steps",
    )
    lines += _table(titles, rows) if rows else ["None."]
    if report.memory:
        lines += ["", "## Memory", ""]
        lines += _table(
            ("rank", "where", "most", "in phase"),
            [(str(one.rank), one.where, size(one.peak_bytes), one.phase) for one in report.memory],
        )
    lines += [f"- {_inline(note)}" for note in report.memory_notes]
    lines += ["", "## Configuration", "", *_table(("", ""), report.settings.items())]
    lines += ["", "## Versions", "", *_table(("", ""), report.versions.items())]
    return "\n".join(lines) + "\n"


def _table(titles: tuple[str, ...], rows: object) -> list[str]:
    assert hasattr(rows, "__iter__")
    body = [f"| {' | '.join(map(_inline, row))} |" for row in rows]
    return [f"| {' | '.join(titles)} |", f"|{' --- |' * len(titles)}", *body]


def _inline(text: str) -> str:
    """Return a text for one line of Markdown, without HTML and links."""
    line = " ".join(text.split())
    for character in "\\`|<[":
        line = line.replace(character, f"\\{character}")
    return line
