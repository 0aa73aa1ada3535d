"""Grafana's JSON for the panels of the dashboard: row, stat, gauge, time series and state timeline.

Called by `_rows.py`, which supplies the queries. Field names and values are those of Grafana's panel models
(schema 39). Does not know any metric.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}

Mappings = Mapping[int, tuple[str, str]]
"""Text and color by value."""
Steps = Sequence[tuple[str, "float | None"]]
"""Threshold colors and the values at which they begin; None, for the first, is minus infinity."""


@dataclass(frozen=True, kw_only=True)
class BuiltPanel:
    """A panel's size on the 24-column grid (height in 30 pixels), and its JSON without ID and position."""

    width: int
    height: int
    body: dict[str, Any]


def row(title: str) -> BuiltPanel:
    """Return a heading across the page."""
    return BuiltPanel(
        width=24, height=1, body={"type": "row", "title": title, "collapsed": False, "panels": []}
    )


def _targets(queries: Mapping[str, str], *, instant: bool) -> list[dict[str, Any]]:
    return [
        {
            "datasource": DATASOURCE,
            "editorMode": "code",
            "expr": expression,
            "instant": instant,
            "legendFormat": legend,
            "range": not instant,
            "refId": chr(ord("A") + place),
        }
        for place, (legend, expression) in enumerate(queries.items())
    ]


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
            "targets": _targets(queries, instant=instant),
        },
    )


_LAST = {"calcs": ["lastNotNull"], "fields": "", "values": False}


def stat(
    title: str,
    *,
    width: int,
    height: int,
    queries: Mapping[str, str],
    description: str,
    mappings: Mappings | None = None,
    empty: str = "-",
    show_name: bool = False,
) -> BuiltPanel:
    """Return a panel with one current value: a mapped text, a number or, with `show_name`, the legend."""
    return _panel(
        "stat", title, description, width, height, queries, instant=True,
        defaults={
            "color": {"mode": "thresholds"},
            "mappings": _value_mappings(mappings or {}),
            "noValue": empty,
            "thresholds": _thresholds([("text", None)]),
            "unit": "none",
        },
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


def stat_gauge(
    title: str,
    *,
    width: int,
    height: int,
    queries: Mapping[str, str],
    description: str,
    unit: str,
    steps: Steps,
) -> BuiltPanel:
    """Return a gauge from 0 to 1 with the current value."""
    return _panel(
        "gauge", title, description, width, height, queries, instant=True,
        defaults={
            "color": {"mode": "thresholds"},
            "decimals": 0,
            "mappings": [],
            "max": 1,
            "min": 0,
            "noValue": "-",
            "thresholds": _thresholds(steps),
            "unit": unit,
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


def time_series(
    title: str,
    *,
    width: int,
    height: int,
    queries: Mapping[str, str],
    description: str,
    unit: str,
    decimals: int | None = None,
    from_zero: bool = True,
    highest: float | None = None,
    right_axis: Mapping[str, str] | None = None,
) -> BuiltPanel:
    """Return a panel with lines over time.

    `right_axis` maps the legend of a series to its unit and puts the series on the right axis. Gaps are not
    connected, so that missing observations stay visible.
    """
    defaults: dict[str, Any] = {
        "color": {"mode": "palette-classic"},
        "custom": {
            "axisPlacement": "auto",
            "drawStyle": "line",
            "fillOpacity": 8,
            "lineInterpolation": "linear",
            "lineWidth": 1,
            "showPoints": "never",
            "spanNulls": False,
            "stacking": {"group": "A", "mode": "none"},
        },
        "mappings": [],
        "thresholds": _thresholds([("green", None)]),
        "unit": unit,
    }
    if decimals is not None:
        defaults["decimals"] = decimals
    if from_zero:
        defaults["min"] = 0
    if highest is not None:
        defaults["max"] = highest
    overrides = [
        {
            "matcher": {"id": "byName", "options": legend},
            "properties": [
                {"id": "custom.axisPlacement", "value": "right"},
                {"id": "unit", "value": own_unit if own_unit != "tokens" else "suffix: tokens"},
            ],
        }
        for legend, own_unit in (right_axis or {}).items()
    ]
    return _panel(
        "timeseries", title, description, width, height, queries, instant=False,
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


def state_timeline(
    title: str, *, width: int, height: int, queries: Mapping[str, str], description: str, mappings: Mappings
) -> BuiltPanel:
    """Return a panel with one band per series, colored and labeled by the mapped value; gaps stay visible."""
    return _panel(
        "state-timeline", title, description, width, height, queries, instant=False,
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
