"""The report of a whole run as one HTML page, as Markdown, or as JSON.

Called by `grpo-run report` with what `run_contents.py` has read. Pure except for reading the templates.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_run.dashboards.reports.charts import Point, curve_chart, marks_of, number_text
from grpo_run.dashboards.reports.incident_facts import duration
from grpo_run.dashboards.reports.rendering import render

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
Report = Mapping[str, Any]
"""What `run_contents.read_run_report` returns."""


def wall_rows(report: Report) -> list[dict[str, Any]]:
    """Return the states that took time. `left` and `width` place a bar, in percent of all time: each begins
    where the one before it ends.
    """
    total = sum(report["wall_seconds"].values())
    rows: list[dict[str, Any]] = []
    left = 0.0
    for state, seconds in report["wall_seconds"].items():
        if total <= 0 or seconds <= 0:
            continue
        share = 100 * seconds / total
        rows.append(
            {
                "state": state.partition(" ")[0],
                "label": LABELS.get(state, state),
                "seconds": long_duration(seconds),
                "share": f"{share:.1f}%",
                "left": left,
                "width": share,
            }
        )
        left += share
    return rows


def long_duration(seconds: float) -> str:
    """`9 h 41 min`, or as `duration` for less than an hour."""
    if seconds < 3600:
        return duration(seconds)
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min"


def figures(report: Report) -> dict[str, str]:
    """Return the numbers at the top, by name."""
    wall = sum(report["wall_seconds"].values())
    target = f" of {report['target_steps']:,}" if report["target_steps"] else ""
    rows = {
        "Goodput": "" if report["goodput"] is None else f"{100 * report['goodput']:.1f}%",
        "Wall time": long_duration(wall) if wall else "",
        "Steps": f"{report['step']:,}{target}",
        "Attempts": f"{report['attempts']:,}",
        "Incidents": f"{len(report['incidents']) + report['omitted']:,}",
    }
    return {name: text for name, text in rows.items() if text}


def as_html(report: Report) -> str:
    """Return the page; all texts of the report are escaped."""
    first, stop, further = report["sentence"].partition(". ")
    curves = [*report["curves"].values(), *report["phases"].values()]
    steps = min((one[0][0] for one in curves), default=0), max((one[-1][0] for one in curves), default=0)
    return render(
        "run.html",
        sentence=first + stop.rstrip(),
        further=further,
        title=f"{report['run_id']}: {report['sentence']}",
        report=report,
        figures=figures(report),
        wall=wall_rows(report),
        marks=marks_of(report["marks"], report["checkpoints"], steps),
        groups={
            group: [
                curve_chart(one["title"], lines, steps)
                for one in report["charts"]
                if one["group"] == group and (lines := lines_of(report, one["key"]))
            ]
            for group in ("learning", "rollouts", "machine")
        },
        phases=[
            curve_chart(f"{name}, seconds", {"": points}, steps, from_zero=True)
            for name, points in report["phases"].items()
        ],
        no_gradient=no_gradient(report),
    )


def lines_of(report: Report, key: str) -> dict[str, Sequence[Point]]:
    """Return the curves of a chart by their labels."""
    return {
        name.partition("/")[2]: points
        for name, points in report["curves"].items()
        if name.partition("/")[0] == key
    }


def no_gradient(report: Report) -> str:
    """Return a sentence on the time that has taught nothing; empty if there was none."""
    spent, hours = report["no_gradient"]["total_hours"], report["no_gradient"]["hours"]
    if not hours or not spent:
        return ""
    unit = "GPU-hours" if any(one["where"] == "device" for one in report["memory"]) else "rank-hours"
    parts = ", ".join(f"{why} {number_text(one)}" for why, one in hours.items())
    lost = sum(hours.values())
    return (
        f"Of {number_text(spent)} {unit} on steps, {number_text(lost)} ({lost / spent:.0%}) bought no"
        f" gradient: {parts}."
    )


def as_json(report: Report) -> str:
    """Return the report as one JSON object in ASCII. A point of a curve is step, mean, smallest, largest."""
    return json.dumps(report, indent=1) + "\n"


def as_markdown(report: Report) -> str:
    """Return the report as Markdown, with the range of each curve instead of its points."""
    titles = {one["key"]: one["title"] for one in report["charts"]}
    labels = {
        name: ": ".join(filter(None, (titles[name.partition("/")[0]], name.partition("/")[2])))
        for name in report["curves"]
    }
    return render(
        "run.md",
        report=report,
        figures=figures(report),
        wall=wall_rows(report),
        labels=labels,
        no_gradient=no_gradient(report),
    )
