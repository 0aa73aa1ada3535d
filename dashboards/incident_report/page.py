"""Build the report of one incident as a single HTML page.

Called by `grpo-run report`. Stacks are grouped by culprit and the collectives of the ranks compared. The
page loads nothing: its Content-Security-Policy forbids all connections and all scripts except its own two,
because it quotes messages that may come from anywhere. The template engine escapes all values. Pure except
for reading the template; does not read the incident's files (`contents.py`).
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from grpo_run.dashboards.incident_report import facts
from grpo_run.dashboards.incident_report.contents import CollectiveCall, IncidentReport
from grpo_run.dashboards.incident_report.facts import facts_of, ranks_in, tags_of
from grpo_run.dashboards.incident_report.timeline_chart import timeline_figure

SHOWN_CALLS = 10


@dataclass(frozen=True, kw_only=True)
class StackFrame:
    """One call of a stack. `user_code` marks the innermost frame of the user's own code."""

    call: str
    place: str
    user_code: bool


@dataclass(frozen=True, kw_only=True)
class StackGroup:
    """Ranks with equal stacks. `culprit` is true if one of them is a culprit."""

    title: str
    culprit: bool
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One cell of the table of collectives.

    `kind` is `same` (one cell for all ranks), `call`, `different` (from most ranks' call), `not_called`, or
    `not_recorded` (the rank's log no longer holds it). `call` is None for the last two.
    """

    kind: Literal["same", "call", "different", "not_called", "not_recorded"]
    call: CollectiveCall | None = None


@dataclass(frozen=True, kw_only=True)
class CallTable:
    """The last collectives of one process group: a row per sequence number, a column per rank."""

    group: str
    ranks: tuple[int, ...]
    rows: tuple[tuple[int, tuple[Cell, ...]], ...]


def stack_groups(folded_stacks: str, culprits: Collection[int]) -> list[StackGroup]:
    """Parse folded stacks; the groups of culprits come first."""
    groups = [_stack_group(text, culprits) for text in folded_stacks.split("\n\n") if text.strip()]
    return sorted(groups, key=lambda group: not group.culprit)


def call_tables(collectives: Mapping[int, Sequence[CollectiveCall]]) -> list[CallTable]:
    """One table per process group that any rank called."""
    groups = sorted({call.group for calls in collectives.values() for call in calls})
    return [_call_table(group, collectives) for group in groups]


def _stack_group(text: str, culprits: Collection[int]) -> StackGroup:
    title, *lines = text.strip("\n").split("\n")
    ranks = {int(word) for word in title.rstrip(":").replace(",", " ").split() if word.isdecimal()}
    frames = []
    for line in lines:
        call, _, place = line[2:].rpartition(" (")
        frames.append(StackFrame(call=call, place=place.removesuffix(")"), user_code=line.startswith(">")))
    return StackGroup(
        title=title.rstrip(":").capitalize(), culprit=bool(ranks & set(culprits)), frames=tuple(frames)
    )


def _call_table(group: str, collectives: Mapping[int, Sequence[CollectiveCall]]) -> CallTable:
    every_rank = {
        rank: {call.sequence: call for call in calls if call.group == group}
        for rank, calls in collectives.items()
    }
    by_rank = {rank: calls for rank, calls in every_rank.items() if calls}
    last = sorted({sequence for calls in by_rank.values() for sequence in calls})[-SHOWN_CALLS:]
    return CallTable(
        group=group,
        ranks=tuple(by_rank),
        rows=tuple((sequence, _cells(sequence, list(by_rank.values()))) for sequence in last),
    )


def _cells(sequence: int, ranks: Sequence[Mapping[int, CollectiveCall]]) -> tuple[Cell, ...]:
    """One cell if all ranks made the same call, else one cell per rank."""
    made = [calls[sequence] for calls in ranks if sequence in calls]
    if len(made) == len(ranks) > 1 and len(set(made)) == 1:
        return (Cell(kind="same", call=made[0]),)
    text, count = Counter(call.text for call in made).most_common(1)[0]
    majority = text if count > len(made) / 2 else None
    return tuple(_cell(sequence, calls, majority) for calls in ranks)


def _cell(sequence: int, calls: Mapping[int, CollectiveCall], majority: str | None) -> Cell:
    call = calls.get(sequence)
    if call is not None:
        return Cell(kind="call" if call.text == majority else "different", call=call)
    return Cell(kind="not_called" if sequence > max(calls) else "not_recorded")


NO_VERDICT = "There is no verdict: the supervisor ended while it gathered evidence."
MAX_TEXT_CHARACTERS = 32_000
"""A longer text is truncated."""

_TEMPLATES = Path(__file__).with_name("templates")


def build(report: IncidentReport, plotly_script: str) -> str:
    """Return the page.

    Args:
        report: what to show; all of its texts are escaped.
        plotly_script: the source of plotly.js, which the page embeds unchanged.
    """
    verdict = report.verdict or {}
    culprits = ranks_in(verdict.get("culprits"))
    figure = timeline_figure(report.timeline, culprits) if report.timeline else None
    figures = {"timeline": figure} if figure is not None else {}
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
    environment.filters.update({name: getattr(facts, name) for name in names})
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
