"""Build the report of one incident as a single HTML page.

Called by `grpo-run report`. The page loads nothing: its Content-Security-Policy forbids all connections and
all scripts except its own two, because it quotes messages that may come from anywhere. All values are escaped
by the template engine. Pure except for reading the template; does not read the incident's files
(`contents.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from grpo_run.dashboards.incident_report import formatting
from grpo_run.dashboards.incident_report.contents import Report
from grpo_run.dashboards.incident_report.facts import facts_of, ranks_in, tags_of
from grpo_run.dashboards.incident_report.tables import call_tables, stack_groups
from grpo_run.dashboards.incident_report.timeline_chart import memory_figure, timeline_figure

NO_VERDICT = "There is no verdict: the supervisor ended while it gathered evidence."
MAX_TEXT_CHARACTERS = 32_000
"""A longer text is truncated."""

_TEMPLATES = Path(__file__).with_name("templates")


def build(report: Report, plotly_script: str) -> str:
    """Return the page.

    Args:
        report: what to show; all of its texts are escaped.
        plotly_script: the source of plotly.js, which the page embeds unchanged.
    """
    verdict = report.verdict or {}
    culprits = ranks_in(verdict.get("culprits"))
    charts = {
        "timeline": timeline_figure(report.timeline, culprits) if report.timeline else None,
        "memory": memory_figure(report.resident, report.peak, culprits),
    }
    figures = {name: figure for name, figure in charts.items() if figure is not None}
    scripts = [plotly_script, _template_source("charts.js")] if figures else []
    number = report.name.partition("-")[0]
    return _environment().get_template("report.html").render(
        title=f"{report.name} · {report.run_id}",
        policy=_content_security_policy(scripts),
        style=Markup(_template_source("report.css")),
        number=int(number) if number.isdecimal() else number,
        sentence=verdict.get("sentence") or NO_VERDICT,
        tags=tags_of(report),
        facts=facts_of(report),
        stacks=stack_groups(report.folded_stacks, culprits),
        call_tables=call_tables(report.collectives),
        culprits=culprits,
        report=report,
        verdict=verdict,
        figures=figures,
        figures_json=Markup(json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")),
        scripts=[Markup(script) for script in scripts],
    )  # fmt: skip


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        finalize=_printable,
    )
    names = ("duration", "size", "utc_time", "relative_time", "event_fields")
    environment.filters.update({name: getattr(formatting, name) for name in names})
    return environment


def _printable(value: Any) -> Any:
    """Truncate a long text, and replace lone surrogates, which cannot be encoded."""
    if isinstance(value, Markup):
        return value
    text = str(value)
    text = text if len(text) <= MAX_TEXT_CHARACTERS else text[:MAX_TEXT_CHARACTERS] + "…"
    return text.encode(errors="backslashreplace").decode()


def _content_security_policy(scripts: list[str]) -> str:
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )


@cache
def _template_source(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")
