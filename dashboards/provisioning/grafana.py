"""The Grafana dashboard, generated into `grafana/grpo-run.json`: what a person wants to know in the morning.

Top to bottom: how it stands, how far it got, what each rank did, what went wrong, what watching cost, what
was learned. `panels.py` knows how a panel looks; here is what they ask. Every query is looked up in the
catalogue before it is written. Talks to no Grafana: the file is imported or provisioned by hand.
"""

from __future__ import annotations

import json
import re
from typing import Any

from grpo_run.dashboards.metrics.catalogue import LABELS
from grpo_run.dashboards.metrics.labels import PHASES, RUN_STATES
from grpo_run.dashboards.provisioning.panels import (
    DATASOURCE,
    BuiltPanel,
    row,
    stat,
    stat_gauge,
    state_timeline,
    time_series,
)
from grpo_run.dashboards.provisioning.promql import unknown_names

UID = "grpo-run"
SCHEMA_VERSION = 39
"""The dashboard schema of Grafana 10.4 and 11.0; later versions migrate it when they load it."""

RUN = 'run_id="$run_id"'
UNOBSERVABLE = -1
NOTHING_OPEN = 0

_LABEL_VALUES = re.compile(r"label_values\((\w+),(\w+)\)")

STATE_COLOURS = {
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
PHASE_COLOURS = {
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
    "hygiene": "light-orange",
    "idle": "text",
}


def one_hot_number(metric: str, label: str, values: tuple[str, ...], by: str) -> str:
    """A one-hot family as one series a `by`: the place of the present value, counted from 1, or 0 for none."""
    terms = [f'{place} * {metric}{{{RUN},{label}="{value}"}}' for place, value in enumerate(values, start=1)]
    return f"max by ({by}) ({' or '.join(terms)})"


def queries_of(dashboard: dict[str, Any]) -> list[str]:
    """Every PromQL expression of a dashboard: panels, annotations, and variables as the query they stand for."""
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]
    notes = [note["expr"] for note in dashboard["annotations"]["list"] if "expr" in note]
    variables = []
    for variable in dashboard["templating"]["list"]:
        if variable["type"] == "query":
            match = _LABEL_VALUES.fullmatch(variable["query"]["query"])
            assert match is not None, (
                "the dashboard has variables of the form label_values(metric,label) only"
            )
            metric, label = match.groups()
            variables.append(f"group by ({label}) ({metric})")
    return panels + notes + variables


def check_dashboard(dashboard: dict[str, Any]) -> None:
    """Look every name in every query up in the catalogue.

    Raises:
        ValueError: a query asks for a metric or a label that is not exported.
    """
    for query in queries_of(dashboard):
        unknown = unknown_names(query, LABELS)
        if unknown:
            raise ValueError(f"query {query!r} asks for {', '.join(unknown)}, not in the catalogue")


def _state_number() -> str:
    return one_hot_number("grpo_run_state", "state", RUN_STATES, "run_id")


def _numbered(colours: dict[str, str], names: tuple[str, ...]) -> dict[int, tuple[str, str]]:
    return {place: (name, colours[name]) for place, name in enumerate(names, start=1)}


def _standing() -> list[BuiltPanel]:
    return [
        row("How it stands"),
        stat(
            "State", width=4, height=5, queries={"state": _state_number()}, mappings=_numbered(STATE_COLOURS, RUN_STATES), empty="not seen",
            description="The run's lifecycle state. “not seen”: no exporter reports this run.",
        ),
        stat(
            "Last fault: cause, culprit, action", width=6, height=5, show_name=True, empty="none",
            queries={
                "{{cause}}, rank {{culprit}}: {{action}}": f"topk(1, grpo_last_incident_info{{{RUN}}})",
            },
            description="The verdict on the last fault and what was done about it.",
        ),
        stat_gauge(
            "Steps done", width=4, height=5, unit="percentunit", steps=[("blue", None)],
            queries={"done": f"max(grpo_step{{{RUN}}}) / max(grpo_target_steps{{{RUN}}})"},
            description="Committed steps of the target of the present train() call.",
        ),
        stat_gauge(
            "Goodput", width=4, height=5, unit="percentunit",
            steps=[("red", None), ("orange", 0.5), ("green", 0.9)],
            queries={"goodput": f"max(grpo_goodput{{{RUN}}})"},
            description="Share of wall time spent on steps that count.",
        ),
        stat(
            "Attempts", width=3, height=5, queries={"attempts": f"max(grpo_attempts_total{{{RUN}}})"},
            description="Times the ranks were started; 1 in a run that was never hurt.",
        ),
        stat(
            "Watcher", width=3, height=5, empty="blind",
            queries={"failed": f"max(grpo_observation_failed{{{RUN}}})"},
            mappings={0: ("sees", "green"), 1: ("blind", "red")},
            description="Whether the exporter could read the run at the last scrape.",
        ),
    ]  # fmt: skip


def _progress() -> list[BuiltPanel]:
    return [
        row("Progress"),
        time_series(
            "Step and target", width=12, height=8, unit="none", decimals=0,
            queries={
                "committed": f"max(grpo_step{{{RUN}}})",
                "checkpoint": f"max(grpo_checkpoint_step{{{RUN}}})",
                "snapshot": f"max(grpo_snapshot_step{{{RUN}}})",
                "target": f"max(grpo_target_steps{{{RUN}}})",
            },
            description="A fall is work that a recovery has to do again.",
        ),
        time_series(
            "Reward and completion length", width=12, height=8, unit="short", from_zero=False,
            queries={
                "reward": f"max(grpo_reward{{{RUN}}})",
                "completion length": f"avg(grpo_rank_completion_length{{{RUN}}})",
            },
            right_axis={"completion length": "tokens"},
            description="Mean reward last logged; mean completion length in tokens, on the right.",
        ),
    ]  # fmt: skip


def _ranks() -> list[BuiltPanel]:
    phase = one_hot_number("grpo_rank_phase", "phase", PHASES, "rank")
    blind = f"max by (rank) (grpo_rank_observable{{{RUN}}} == 0) - 1"
    phases = _numbered(PHASE_COLOURS, PHASES) | {
        UNOBSERVABLE: ("unobservable", "red"),
        NOTHING_OPEN: ("none open", "text"),
    }
    return [
        row("Ranks"),
        state_timeline(
            "Run state", width=24, height=4, queries={"run": _state_number()},
            mappings=_numbered(STATE_COLOURS, RUN_STATES),
            description="The night at a glance.",
        ),
        state_timeline(
            "Phase of each rank", width=24, height=8, queries={"rank {{rank}}": f"{phase} or {blind}"},
            mappings=phases,
            description="The innermost open phase. The rank whose colour differs is the one to look at.",
        ),
        time_series(
            "Time since each rank's last progress", width=12, height=8, unit="s",
            queries={
                "rank {{rank}}": f"max by (rank) (grpo_rank_last_progress_age_seconds{{{RUN}}})",
            },
            description="A line that climbs is a rank that does nothing; a line that ends is one nobody sees.",
        ),
        time_series(
            "Voted step of each rank", width=12, height=8, unit="none", decimals=0, from_zero=False,
            queries={"rank {{rank}}": f"max by (rank) (grpo_rank_voted_step{{{RUN}}})"},
            description="The lowest line is the rank the others wait for.",
        ),
    ]  # fmt: skip


def _faults() -> list[BuiltPanel]:
    return [
        row("Faults and recoveries"),
        time_series(
            "Restarts by cause", width=8, height=8, unit="none", decimals=0,
            # The counter itself, not its increase: Prometheus extrapolates that to fractions of a restart.
            queries={"{{cause}}, {{action}}": f"max by (cause, action) (grpo_restarts_total{{{RUN}}}) > 0"},
            description="Faults answered with a new attempt, counted since the run began. Empty is good.",
        ),
        time_series(
            "Goodput", width=8, height=8, unit="percentunit", highest=1,
            queries={"goodput": f"max(grpo_goodput{{{RUN}}})"},
            description="Share of wall time spent on steps that count, since the run began.",
        ),
        time_series(
            "Detection and recovery", width=8, height=8, unit="s",
            queries={
                "last detection": f"max(grpo_last_detection_seconds{{{RUN}}})",
                "last recovery": f"max(grpo_last_recovery_seconds{{{RUN}}})",
            },
            description="From the fault to its being established, and to the first step after it.",
        ),
    ]  # fmt: skip


def _cost() -> list[BuiltPanel]:
    return [
        row("What it costs"),
        time_series(
            "Waiting in votes", width=12, height=8, unit="percentunit",
            queries={
                "rank {{rank}}": "max by (rank)"
                f" (rate(grpo_rank_vote_wait_seconds_total{{{RUN}}}[$__rate_interval]))",
            },
            description="Share of time a rank waits for the others. The one that waits least is the slow one.",
        ),
        time_series(
            "Memory hygiene", width=12, height=8, unit="percentunit",
            queries={
                "rank {{rank}}": "max by (rank)"
                f" (rate(grpo_rank_hygiene_seconds_total{{{RUN}}}[$__rate_interval]))",
            },
            description="Share of time spent on collecting garbage and giving memory back.",
        ),
    ]  # fmt: skip


def _learning() -> list[BuiltPanel]:
    return [
        row("Learning"),
        time_series(
            "Loss and gradient norm", width=12, height=8, unit="short", from_zero=False,
            queries={
                "loss": f"avg(grpo_rank_loss{{{RUN}}})",
                "gradient norm": f"avg(grpo_rank_grad_norm{{{RUN}}})",
            },
            right_axis={"gradient norm": "short"},
            description="Mean over the ranks that report them; gradient norm on the right.",
        ),
        time_series(
            "Learning rate", width=6, height=8, unit="sci",
            queries={"learning rate": f"avg(grpo_rank_learning_rate{{{RUN}}})"},
            description="As the scheduler last set it.",
        ),
        time_series(
            "Generation", width=6, height=8, unit="short",
            queries={
                "tokens/s": f"sum(rate(grpo_rank_tokens_generated_total{{{RUN}}}[$__rate_interval]))",
                "rewards/s": f"sum(rate(grpo_rank_rewards_scored_total{{{RUN}}}[$__rate_interval]))",
            },
            right_axis={"rewards/s": "short"},
            description="Completion tokens and scored completions a second over all ranks; rewards on the right.",
        ),
    ]  # fmt: skip


def _placed(panels: list[BuiltPanel]) -> list[dict[str, Any]]:
    """Give panels ids and places: left to right on Grafana's 24 columns, a new line when one is full."""
    placed, x, y, line_height = [], 0, 0, 0
    for number, panel in enumerate(panels, start=1):
        if x + panel.width > 24:
            x, y, line_height = 0, y + line_height, 0
        grid = {"h": panel.height, "w": panel.width, "x": x, "y": y}
        placed.append({"id": number, "gridPos": grid, **panel.body})
        x, line_height = x + panel.width, max(line_height, panel.height)
    return placed


def _variables() -> list[dict[str, Any]]:
    return [
        {
            "name": "datasource",
            "label": "Data source",
            "type": "datasource",
            "query": "prometheus",
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 1,
            "regex": "",
            "skipUrlSync": False,
        },
        {
            "name": "run_id",
            "label": "Run",
            "type": "query",
            "datasource": DATASOURCE,
            "definition": "label_values(grpo_run_info,run_id)",
            "query": {
                "qryType": 1,
                "query": "label_values(grpo_run_info,run_id)",
                "refId": "PrometheusVariableQueryEditor-VariableQuery",
            },
            "current": {},
            "hide": 0,
            "includeAll": False,
            "multi": False,
            "options": [],
            "refresh": 2,
            "regex": "",
            "skipUrlSync": False,
            "sort": 1,
        },
    ]


def _annotations() -> list[dict[str, Any]]:
    return [
        {
            "builtIn": 1,
            "datasource": {"type": "grafana", "uid": "-- Grafana --"},
            "enable": True,
            "hide": True,
            "iconColor": "rgba(0, 211, 255, 1)",
            "name": "Annotations & Alerts",
            "type": "dashboard",
        },
        {
            "datasource": DATASOURCE,
            "enable": True,
            "expr": f"max by (cause) (increase(grpo_incidents_total{{{RUN}}}[2m])) > 0",
            "iconColor": "red",
            "name": "Faults",
            "step": "60s",
            "titleFormat": "{{cause}}",
        },
    ]


def dashboard() -> dict[str, Any]:
    """The dashboard as Grafana's JSON model.

    Raises:
        ValueError: a query asks for what the catalogue does not have.
    """
    model: dict[str, Any] = {
        "annotations": {"list": _annotations()},
        "description": "One grpo-run training run. Generated from the metric catalogue.",
        "editable": True,
        "fiscalYearStartMonth": 0,
        "graphTooltip": 1,
        "id": None,
        "links": [],
        "panels": _placed([*_standing(), *_progress(), *_ranks(), *_faults(), *_cost(), *_learning()]),
        "refresh": "30s",
        "schemaVersion": SCHEMA_VERSION,
        "tags": ["grpo-run", "training"],
        "templating": {"list": _variables()},
        "time": {"from": "now-12h", "to": "now"},
        "timepicker": {},
        "timezone": "browser",
        "title": "grpo-run",
        "uid": UID,
        "version": 1,
        "weekStart": "",
    }
    check_dashboard(model)
    return model


def dashboard_text() -> str:
    """The text of `grafana/grpo-run.json`."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"
