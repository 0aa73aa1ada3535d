"""Grafana's JSON for panels: row, stat, gauge, time series and state timeline.

Called by the modules of the four dashboards, which say what a panel shows. Queries are written with `{RUN}`
for the matcher of the selected run. Field names and values are those of Grafana's panel models (schema 39).
Does not know any metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
RUN = 'run_id="$run"'

Mappings = Mapping[int, tuple[str, str]]
"""Text and color by value."""
Steps = Sequence[tuple[str, "float | None"]]
"""Threshold colors and the values at which they begin; None, for the first, is minus infinity."""

STATE_COLORS = {
    "starting": "light-blue",
    "running": "green",
    "suspect": "yellow",
    "collecting": "orange",
    "recovering": "dark-orange",
    "stopping": "light-purple",
    "finished": "dark-green",
    "stopped": "purple",
    "failed": "red",
    "unknown": "dark-red",
}
PHASE_COLORS = {
    "startup": "super-light-blue",
    "data": "light-yellow",
    "generate": "green",
    "reward": "purple",
    "score": "light-purple",
    "forward_backward": "blue",
    "optimizer": "dark-blue",
    "vote": "orange",
    "checkpoint": "dark-yellow",
    "eval": "light-green",
    "cleanup": "light-orange",
    "idle": "text",
    "callback": "dark-purple",
}
WALL_COLORS = {
    "productive": "green",
    "startup": "light-blue",
    "checkpoint": "dark-yellow",
    "detection": "orange",
    "recovery": "red",
    "redone": "purple",
    "stopped": "text",
}


@dataclass(frozen=True, kw_only=True)
class BuiltPanel:
    """A panel's size on the 24-column grid (height in 30 pixels), and its JSON without ID and position."""

    width: int
    height: int
    body: dict[str, Any]


def one_hot_number(metric: str, label: str, values: tuple[str, ...], by: str) -> str:
    """Return a query that gives the position of the current value of a one-hot metric.

    Positions count from 1; 0 means that no value is 1. The result has one series per value of the label `by`.
    """
    terms = [f'{place} * {metric}{{RUN,{label}="{value}"}}' for place, value in enumerate(values, start=1)]
    return f"max by ({by}) ({' or '.join(terms)})"


def value_mapping(colors: Mapping[str, str], names: Sequence[str]) -> dict[int, tuple[str, str]]:
    """Return text and color of the positions that `one_hot_number` gives."""
    return {place: (name, colors[name]) for place, name in enumerate(names, start=1)}


def row(title: str) -> BuiltPanel:
    """Return a heading across the page."""
    return BuiltPanel(
        width=24, height=1, body={"type": "row", "title": title, "collapsed": False, "panels": []}
    )


def _value_mappings(mappings: Mappings) -> list[dict[str, Any]]:
    options = {
        str(value): {"color": color, "index": place, "text": text}
        for place, (value, (text, color)) in enumerate(mappings.items())
    }
    return [{"type": "value", "options": options}] if options else []


def _thresholds(steps: Steps) -> dict[str, Any]:
    return {"mode": "absolute", "steps": [{"color": color, "value": value} for color, value in steps]}


def _panel(
    kind: str, title: str, description: str, width: int, height: int, queries: Mapping[str, str],
    *, instant: bool, defaults: dict[str, Any], options: dict[str, Any],
    overrides: list[dict[str, Any]] | None = None,
) -> BuiltPanel:  # fmt: skip
    targets = [
        {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expression.replace("{RUN", "{" + RUN),
            "instant": instant,
            "legendFormat": legend,
            "range": not instant,
            "refId": chr(ord("A") + place),
        }
        for place, (legend, expression) in enumerate(queries.items())
    ]
    return BuiltPanel(
        width=width,
        height=height,
        body={
            "type": kind,
            "title": title,
            "description": description,
            "datasource": DATASOURCE,
            "fieldConfig": {"defaults": defaults, "overrides": overrides or []},
            "options": options,
            "targets": targets,
        },
    )


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def stat(
    title: str,
    queries: Mapping[str, str],
    description: str,
    *,
    width: int = 4,
    unit: str = "none",
    decimals: int | None = None,
    mappings: Mappings | None = None,
    steps: Steps = (("text", None),),
    empty: str = "-",
    show_name: bool = False,
) -> BuiltPanel:
    """Return a panel with one current value: a mapped text, a number or, with `show_name`, the legend."""
    defaults: dict[str, Any] = {
        "color": {"mode": "thresholds"},
        "mappings": _value_mappings(mappings or {}),
        "noValue": empty,
        "thresholds": _thresholds(steps),
        "unit": unit,
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    return _panel(
        "stat", title, description, width, 4, queries, instant=True,
        defaults=defaults,
        options={
            "colorMode": "background" if mappings else "value",
            "graphMode": "none",
            "justifyMode": "center",
            "orientation": "auto",
            "reduceOptions": _LAST,
            "textMode": "name" if show_name else "value",
            "wideLayout": True,
        },
    )  # fmt: skip


def gauge(
    title: str, queries: Mapping[str, str], description: str, *, steps: Steps, width: int = 4
) -> BuiltPanel:
    """Return a gauge from 0 to 100 % with the current value."""
    return _panel(
        "gauge", title, description, width, 4, queries, instant=True,
        defaults={
            "color": {"mode": "thresholds"},
            "decimals": 0,
            "mappings": [],
            "max": 1,
            "min": 0,
            "noValue": "-",
            "thresholds": _thresholds(steps),
            "unit": "percentunit",
        },
        options={
            "minVizHeight": 75,
            "minVizWidth": 75,
            "orientation": "auto",
            "reduceOptions": _LAST,
            "showThresholdLabels": False,
            "showThresholdMarkers": True,
            "sizing": "auto",
        },
    )  # fmt: skip


def lines(
    title: str,
    unit: str,
    queries: Mapping[str, str],
    description: str,
    *,
    width: int = 12,
    decimals: int | None = None,
    from_zero: bool = True,
    highest: float | None = None,
    stacked: bool = False,
    right_axis: Mapping[str, str] | None = None,
    colors: Mapping[str, str] | None = None,
) -> BuiltPanel:
    """Return a panel with lines over time, or with areas on top of one another.

    `right_axis` maps the legend of a series to its unit and puts the series on the right axis; `colors` fixes
    the color of series by legend. Gaps are not connected, so that missing observations stay visible.
    """
    defaults: dict[str, Any] = {
        "color": {"mode": "palette-classic"},
        "custom": {
            "axisPlacement": "auto",
            "drawStyle": "line",
            "fillOpacity": 60 if stacked else 8,
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "normal" if stacked else "none"},
        },
        "mappings": [],
        "thresholds": _thresholds([("green", None)]),
        "unit": unit,
    }
    chosen = {"decimals": decimals, "min": 0 if from_zero else None, "max": highest}
    defaults |= {name: value for name, value in chosen.items() if value is not None}

    def override(legend: str, *properties: tuple[str, Any]) -> dict[str, Any]:
        values = [{"id": name, "value": value} for name, value in properties]
        return {"matcher": {"id": "byName", "options": legend}, "properties": values}

    overrides = [
        override(legend, ("custom.axisPlacement", "right"), ("unit", own_unit))
        for legend, own_unit in (right_axis or {}).items()
    ]
    overrides += [
        override(legend, ("color", {"mode": "fixed", "fixedColor": color}))
        for legend, color in (colors or {}).items()
    ]
    return _panel(
        "timeseries", title, description, width, 8, queries, instant=False,
        defaults=defaults,
        options={
            "legend": {
                "calcs": ["lastNotNull"],
                "displayMode": "list",
                "placement": "bottom",
                "showLegend": True,
            },
            "tooltip": {"mode": "multi", "sort": "none"},
        },
        overrides=overrides,
    )  # fmt: skip


def bands(
    title: str, queries: Mapping[str, str], description: str, *, height: int, mappings: Mappings
) -> BuiltPanel:
    """Return a panel with one band per series, colored and labeled by the mapped value; gaps stay visible."""
    return _panel(
        "state-timeline", title, description, 24, height, queries, instant=False,
        defaults={
            "color": {"mode": "thresholds"},
            "custom": {"fillOpacity": 80, "lineWidth": 0, "spanNulls": False},
            "mappings": _value_mappings(mappings),
            "noValue": "no data",
            "thresholds": _thresholds([("text", None)]),
            "unit": "none",
        },
        options={
            "alignValue": "left",
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "mergeValues": True,
            "rowHeight": 0.9,
            "showValue": "auto",
            "tooltip": {"mode": "single", "sort": "none"},
        },
    )  # fmt: skip
