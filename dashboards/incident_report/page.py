"""One incident as one page: what happened, who, where, what was done, and everything that was seen.

Called by `grpo-run report`. The page is a single file that loads nothing: a policy in it forbids every connection
and every script but the two it was built with, since the messages it quotes are anybody's. Pure: takes a `Report`,
returns HTML. Does not read files (`contents.py`) or choose what to do about the incident.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any

from grpo_run.dashboards.incident_report import markup
from grpo_run.dashboards.incident_report.contents import Call, Report
from grpo_run.dashboards.incident_report.style import SCRIPT, STYLE
from grpo_run.dashboards.incident_report.timeline_chart import Figure, memory_figure, timeline_figure

SHOWN_CALLS = 10
CONFIDENCE = {
    "proved": "by what the ranks left behind",
    "deadline": "a time limit ran out, and nothing proves more",
    "inferred": "the cause itself was not seen",
    "unknown": "too little could be seen",
}
NO_VERDICT = "No verdict was reached: the supervisor ended while it gathered evidence."
ENVELOPE = frozenset({"time", "monotonic", "run", "attempt", "rank", "step", "event"})


def build(report: Report, plotly_script: str) -> str:
    """The page.

    Args:
        report: what to show; all of its texts are escaped here.
        plotly_script: the source of plotly.js, put into the page as it is.
    """
    verdict = report.verdict or {}
    culprits = _ranks(verdict.get("culprits"))
    figures: dict[str, Figure] = {}
    sections = [
        markup.section("Timeline", _timeline(report, culprits, figures)),
        markup.section("Where every rank stood", _stacks(report, culprits)),
        markup.section("Collectives", _collectives(report, culprits)),
        markup.section("Memory", _memory(report, culprits, figures)),
        markup.section("Last events", _events(report)),
        markup.section("What could not be seen", _missing(report)),
    ]
    sentence = str(verdict.get("sentence") or NO_VERDICT)
    data = json.dumps(figures, separators=(",", ":")).replace("<", "\\u003c")
    scripts = [plotly_script, SCRIPT] if figures else []
    allowed = " ".join(f"'sha256-{_digest(script)}'" for script in scripts) or "'none'"
    policy = (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:;"
        " base-uri 'none'; form-action 'none'"
    )
    charts = "".join(f"<script>{script}</script>\n" for script in scripts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<link rel="icon" href="data:,">\n'
        f"<title>{markup.text(f'{report.name} · {report.run_id}')}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"{_head(report, sentence, verdict)}{_facts(report, verdict)}{''.join(sections)}"
        "<footer>Written by grpo-run. This page is complete: it needs no network.</footer>\n"
        f'<script type="application/json" id="figures">{data}</script>\n{charts}</body>\n</html>\n'
    )


def _head(report: Report, sentence: str, verdict: Mapping[str, Any]) -> str:
    number = report.name.partition("-")[0]
    when = (
        datetime.fromtimestamp(report.at, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC") if report.at else ""
    )
    words = [f"Incident {int(number) if number.isdecimal() else number}", f"run {report.run_id}", when]
    eyebrow = "".join(f"<span>{markup.text(word)}</span>" for word in words if word)
    tags = ""
    if verdict:
        healed = report.recovery is not None and report.recovery.recovery_seconds is not None
        outcome = (
            "recovered" if healed else _words(report.action.name) if report.action else "outcome not known"
        )
        outcome_class = "" if healed else ' class="alarm"'
        tags = (
            f'<ul class="tags"><li class="alarm">{markup.text(_words(verdict.get("cause")))}</li>'
            f"<li>{markup.text(verdict.get('confidence') or 'confidence not known')}</li>"
            f"<li{outcome_class}>{markup.text(outcome)}</li></ul>\n"
        )
    advice = verdict.get("advice") or ()
    return f'<p class="eyebrow">{eyebrow}</p>\n<h1>{markup.text(sentence)}</h1>\n{tags}' + (
        f'<aside class="advice"><h2>What to change</h2>{markup.listed(advice)}</aside>\n' if advice else ""
    )


def _facts(report: Report, verdict: Mapping[str, Any]) -> str:
    if not verdict:
        return ""
    culprits = _ranks(verdict.get("culprits"))
    locations = verdict.get("locations")
    located = locations if isinstance(locations, Mapping) else {}
    confidence = str(verdict.get("confidence") or "unknown")
    recovery = report.recovery
    rows = [
        ("Cause", f"<code>{markup.text(verdict.get('cause') or 'unknown')}</code>"),
        ("Who", markup.text(_rank_words(culprits)) if culprits else "no rank of this node is named"),
        ("Where", markup.text(_where(verdict))),
        ("Line", _location(verdict.get("location")) or _lines(culprits, located)),
        ("Confidence", markup.text(f"{confidence}, {CONFIDENCE[confidence]}" if confidence in CONFIDENCE else confidence)),
        ("Mismatch", f"<pre>{markup.text(_plain(verdict['mismatch']))}</pre>" if verdict.get("mismatch") else ""),
        ("Waiting", _waiters(_ranks(verdict.get("waiters")), located)),
        ("Done about it", markup.text(_action(report))),
        ("Found out after", _seconds(recovery.detection_seconds) if recovery else ""),
        ("Recovered after", _seconds(recovery.recovery_seconds) if recovery else ""),
        ("Steps done again", str(recovery.lost_steps) if recovery and recovery.lost_steps is not None else ""),
        ("Tried before", markup.listed(verdict["tried"]) if verdict.get("tried") else ""),
    ]  # fmt: skip
    listed = "".join(f"<dt>{name}</dt><dd>{value}</dd>\n" for name, value in rows if value)
    traceback = str(verdict.get("traceback") or "")
    folded = (
        f'<details><summary>Traceback</summary><pre class="traceback">{markup.text(traceback)}</pre></details>'
        if traceback
        else ""
    )
    return f'<div class="card"><dl class="facts">\n{listed}</dl>{folded}</div>\n'


def _timeline(report: Report, culprits: Collection[int], figures: dict[str, Figure]) -> str:
    figure = timeline_figure(report.timeline, culprits) if report.timeline else None
    if figure is None:
        return markup.none("No timeline was recorded with this incident.")
    figures["timeline"] = figure
    lead = "Phases as the supervisor saw them, up to the incident. Drag to see what came earlier."
    return f'<p class="lead">{lead}</p>{markup.chart("timeline", "Phases of every rank before the incident")}'


def _stacks(report: Report, culprits: Collection[int]) -> str:
    groups = [group for group in report.folded_stacks.split("\n\n") if group.strip()]
    if not groups:
        return markup.none("No rank's stack could be had.")
    lead = "Main threads, the innermost call first; ranks at the same calls are together, and the user's line is marked."
    cards = [_stack(group, culprits) for group in groups]
    return f'<p class="lead">{lead}</p>' + "".join(
        card for _, card in sorted(cards, key=lambda card: not card[0])
    )


def _stack(group: str, culprits: Collection[int]) -> tuple[bool, str]:
    """Whether a culprit is in the group, and its card."""
    title, *lines = group.strip("\n").split("\n")
    members = {int(word) for word in title.rstrip(":").replace(",", " ").split() if word.isdecimal()}
    blamed = bool(members & set(culprits))
    shown = []
    for line in lines:
        call, _, place = line[2:].rpartition(" (")
        text = f'{markup.text(call)} <span class="where">{markup.text(place.removesuffix(")"))}</span>'
        shown.append(f"<mark>{text}</mark>" if line.startswith(">") else text)
    head = f"<header>{markup.text(title.rstrip(':').capitalize())}</header>"
    frames = "\n".join(shown)
    return blamed, f'<div class="card stack{" alarm" if blamed else ""}">{head}<pre>{frames}</pre></div>\n'


def _collectives(report: Report, culprits: Collection[int]) -> str:
    if not any(report.collectives.values()):
        return markup.none("No collective was recorded.")
    lead = (
        "The last collectives of each process group. Set off: calls that differ from what most ranks"
        " called, and calls that a rank has not made. One line for all where they agree."
    )
    groups = sorted({call.group for calls in report.collectives.values() for call in calls})
    tables = "".join(_calls_of(group, report.collectives, culprits) for group in groups)
    return f'<p class="lead">{lead}</p><div class="card scroll">{tables}</div>'


def _calls_of(group: str, collectives: Mapping[int, Sequence[Call]], culprits: Collection[int]) -> str:
    by_rank = {
        rank: {call.sequence: call for call in calls if call.group == group}
        for rank, calls in collectives.items()
    }
    by_rank = {rank: calls for rank, calls in by_rank.items() if calls}
    last = sorted({sequence for calls in by_rank.values() for sequence in calls})[-SHOWN_CALLS:]
    columns = "".join(
        f"<th>{f'<b>rank {rank}</b>' if rank in culprits else f'rank {rank}'}</th>" for rank in by_rank
    )
    rows = [
        f'<tr><td class="number">{sequence}</td>{_calls_cells(sequence, list(by_rank.values()))}</tr>\n'
        for sequence in last
    ]
    caption = f"Group {markup.text(group)}"
    return (
        f'<table><caption>{caption}</caption><thead><tr><th class="number">no.</th>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>\n"
    )


def _calls_cells(sequence: int, ranks: Sequence[Mapping[int, Call]]) -> str:
    """One cell for all ranks where they agree, else one a rank."""
    made = [calls[sequence] for calls in ranks if sequence in calls]
    if len(made) == len(ranks) > 1 and len(set(made)) == 1:
        return f'<td class="code all" colspan="{len(ranks)}">{_call(made[0])}</td>'
    text, votes = Counter(call.text for call in made).most_common(1)[0]
    usual = text if votes > len(made) / 2 else None
    cells = []
    for calls in ranks:
        call = calls.get(sequence)
        if call is not None:
            cells.append(f'<td class="code{"" if call.text == usual else " odd"}">{_call(call)}</td>')
        elif sequence > max(calls):
            cells.append('<td class="odd">not called</td>')
        else:
            cells.append("<td>…</td>")  # older than what is recorded
    return "".join(cells)


def _call(call: Call) -> str:
    state = " · ".join(part for part in (call.state, call.place) if part)
    return f'{markup.text(call.text)} <span class="state">{markup.text(state)}</span>'


def _memory(report: Report, culprits: Collection[int], figures: dict[str, Figure]) -> str:
    parts = []
    if report.node_total and report.node_available is not None:
        share = report.node_available / report.node_total
        parts.append(
            f'<p class="lead">{_bytes(report.node_available)} of {_bytes(report.node_total)} of this node were'
            f" available, {share:.0%}.</p>"
        )
    figure = memory_figure(report.resident, report.peak, culprits)
    if figure is None:
        parts.append(markup.none("No rank's memory could be read."))
    else:
        figures["memory"] = figure
        parts.append(markup.chart("memory", "Memory of every rank"))
    if report.gpus:
        rows = [
            [
                f"GPU {gpu.get('index')}",
                _bytes(gpu.get("used_bytes")),
                _bytes(gpu.get("total_bytes")),
                ", ".join(
                    f"{user.get('pid')} ({_bytes(user.get('used_bytes'))})"
                    for user in gpu.get("processes", ())
                )
                or "–",
            ]
            for gpu in report.gpus
        ]
        parts.append(
            f'<div class="card scroll" style="margin-top:.85rem">{markup.table(["", "used", "of", "by process"], rows)}</div>'
        )
    return "".join(parts)


def _events(report: Report) -> str:
    if not report.events:
        return markup.none("No events were kept with this incident.")
    rows = [
        [
            _ago(event.get("time"), report.at),
            str(event.get("event") or "?"),
            "" if event.get("rank") is None else str(event["rank"]),
            "" if event.get("step") is None else str(event["step"]),
            _fields(event),
        ]
        for event in reversed(report.events)
    ]
    table = markup.table(["seconds", "event", "rank", "step", ""], rows, numbers={0, 2, 3}, codes={1}, long=4)
    return f'<p class="lead">From the journal, the latest first.</p><div class="card scroll">{table}</div>'


def _missing(report: Report) -> str:
    if report.verdict is None:
        return markup.none(
            "What was asked for and did not come is written with the verdict, and there is none."
        )
    missing = report.verdict.get("missing_evidence") or ()
    if not missing:
        return markup.none("Nothing: everything that was asked for came.")
    return f'<ul class="missing">{"".join(f"<li>{markup.text(line)}</li>" for line in missing)}</ul>'


# pieces


def _waiters(waiters: Sequence[int], located: Mapping[str, Any]) -> str:
    return _lines(waiters, located) or (markup.text(_rank_words(waiters)) if waiters else "")


def _lines(ranks: Sequence[int], located: Mapping[str, Any]) -> str:
    """Each rank's line; nothing where no rank's is known."""
    if not any(located.get(str(rank)) for rank in ranks):
        return ""
    lines = [f"rank {rank}: {_location(located.get(str(rank))) or 'line not known'}" for rank in ranks]
    return f"<ul>{''.join(f'<li>{line}</li>' for line in lines)}</ul>"


def _location(location: Any) -> str:
    if not isinstance(location, Mapping):
        return ""
    place = f"{location.get('file')}:{location.get('line')}"
    return f"<code>{markup.text(place)}</code> in <code>{markup.text(location.get('function'))}</code>"


def _where(verdict: Mapping[str, Any]) -> str:
    step, phase = verdict.get("step"), verdict.get("phase")
    return (f"step {step}" if step is not None else "step not known") + (f", phase {phase}" if phase else "")


def _action(report: Report) -> str:
    if report.action is None:
        return "the journal does not say"
    return _words(report.action.name) + (f": {report.action.reason}" if report.action.reason else "")


def _fields(event: Mapping[str, Any]) -> str:
    rest = {key: value for key, value in event.items() if key not in ENVELOPE and value is not None}
    text = "  ".join(f"{key}={_plain(value)}" for key, value in rest.items())
    return text if len(text) <= 300 else text[:300] + "…"


def _ago(time: Any, at: float | None) -> str:
    if not isinstance(time, (int, float)):
        return ""
    if at is None:
        return datetime.fromtimestamp(time, timezone.utc).strftime("%H:%M:%S")
    return f"{time - at:+.2f}".replace("-", "−")


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _rank_words(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) != 1 else ''} {', '.join(map(str, ranks))}"


def _ranks(value: Any) -> tuple[int, ...]:
    return tuple(rank for rank in value if isinstance(rank, int)) if isinstance(value, list) else ()


def _words(name: Any) -> str:
    return str(name or "cause not known").replace("_", " ")


def _seconds(seconds: float | None) -> str:
    if seconds is None or not math.isfinite(seconds):
        return ""
    return f"{seconds:.2f} s" if seconds < 60 else f"{seconds / 60:.1f} min"


def _bytes(count: Any) -> str:
    if not isinstance(count, int):
        return "unknown"
    return f"{count / 1024**3:.1f} GiB" if count >= 1024**3 else f"{count / 1024**2:.0f} MiB"


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
