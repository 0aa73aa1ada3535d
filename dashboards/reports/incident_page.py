"""Build the report of one incident as a single HTML page.

Called by `grpo-run report --incident`. Stacks are grouped by culprit and the collectives of the ranks
compared. Stacks of ranks that had already failed, and were exiting, are left out. Pure except for reading the
template; does not read the incident's files (`incident_contents.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_run.dashboards.reports.charts import timeline_chart
from grpo_run.dashboards.reports.incident_contents import CollectiveCall
from grpo_run.dashboards.reports.incident_facts import facts_of, plain_title, ranks_in, tags_of
from grpo_run.dashboards.reports.rendering import render

SHOWN_CALLS = 10
BOOTSTRAP = "runtime/rank/bootstrap.py"
STARTS_SCRIPT, EXITS = "_run_script", "_exit"
"""The bootstrap and functions of it, as they appear in stacks."""


Values = dict[str, Any]
"""For the template."""


def stack_groups(folded_stacks: str, culprits: Collection[int]) -> list[Values]:
    """Parse folded stacks: ranks with equal stacks; the groups of culprits come first.

    `exiting` is true if the ranks had failed before, and the stack is that of their end. `user_code` marks
    the innermost frame of the user's own code.
    """
    groups = [_stack_group(text, culprits) for text in folded_stacks.split("\n\n") if text.strip()]
    return sorted(groups, key=lambda group: not group["culprit"])


def call_tables(collectives: Mapping[int, Sequence[CollectiveCall]]) -> list[Values]:
    """Return the last collectives of each process group that any rank called: a row per sequence number, a
    column per rank.
    """
    groups = sorted({call.group for calls in collectives.values() for call in calls})
    return [_call_table(group, collectives) for group in groups]


def _stack_group(text: str, culprits: Collection[int]) -> Values:
    title, *lines = text.strip("\n").split("\n")
    ranks = {int(word) for word in title.rstrip(":").replace(",", " ").split() if word.isdecimal()}
    frames: list[Values] = []
    for line in lines:
        call, _, place = line[2:].rpartition(" (")
        frames.append({"call": call, "place": place.removesuffix(")"), "user_code": line.startswith(">")})
    ours = [
        (number, frame["call"])
        for number, frame in enumerate(frames)
        if frame["place"].rpartition(":")[0].endswith(BOOTSTRAP)
    ]
    # below the script are only the calls that start it
    started = next((number for number, call in ours if call == STARTS_SCRIPT), None)
    return {
        "title": title.rstrip(":").capitalize(),
        "culprit": bool(ranks & set(culprits)),
        "exiting": started is None and any(call == EXITS for _, call in ours),
        "frames": frames[:started],
    }


def _call_table(group: str, collectives: Mapping[int, Sequence[CollectiveCall]]) -> Values:
    every_rank = {
        rank: {call.sequence: call for call in calls if call.group == group}
        for rank, calls in collectives.items()
    }
    by_rank = {rank: calls for rank, calls in every_rank.items() if calls}
    last = sorted({sequence for calls in by_rank.values() for sequence in calls})[-SHOWN_CALLS:]
    return {
        "group": group,
        "ranks": list(by_rank),
        "rows": [(sequence, _cells(sequence, list(by_rank.values()))) for sequence in last],
    }


def _cells(sequence: int, ranks: Sequence[Mapping[int, CollectiveCall]]) -> list[Values]:
    """Return one cell if all ranks made the same call, else one per rank: a call, one that is different from
    most ranks', or none: `not_called`, or `not_recorded`, if the rank's log no longer holds it.
    """
    made = [calls[sequence] for calls in ranks if sequence in calls]
    if len(made) == len(ranks) > 1 and len(set(made)) == 1:
        return [{"kind": "same", "call": made[0]}]
    text, count = Counter(call.text for call in made).most_common(1)[0]
    majority = text if count > len(made) / 2 else None
    return [_cell(sequence, calls, majority) for calls in ranks]


def _cell(sequence: int, calls: Mapping[int, CollectiveCall], majority: str | None) -> Values:
    call = calls.get(sequence)
    if call is not None:
        return {"kind": "call" if call.text == majority else "different", "call": call}
    return {"kind": "not_called" if sequence > max(calls) else "not_recorded"}


NO_VERDICT = "There is no verdict: the supervisor ended while it gathered evidence."


def build(report: Mapping[str, Any]) -> str:
    """Return the page of what `incident_contents.read_report` returns; all texts are escaped."""
    verdict, recovery = report["verdict"] or {}, report["recovery"]
    culprits = ranks_in(verdict.get("culprits"))
    number = report["name"].partition("-")[0]
    sentence = verdict.get("sentence") or NO_VERDICT
    title = plain_title(verdict)
    stacks = stack_groups(report["folded_stacks"], culprits)
    return render(
        "incident.html",
        title=f"{title or sentence} · {report['run_id']}",
        heading=title or sentence,
        further=sentence if title else "",
        number=int(number) if number.isdecimal() else number,
        tags=tags_of(verdict, recovery),
        facts=facts_of(verdict, recovery),
        stacks=[group for group in stacks if not group["exiting"]],
        exiting=[group["title"] for group in stacks if group["exiting"]],
        call_tables=call_tables(report["collectives"]),
        culprits=culprits,
        report=report,
        verdict=verdict,
        timeline=timeline_chart(report["timeline"], culprits) if report["timeline"] else None,
    )
