"""Read what the report of a whole run shows: verdict, wall time, curves, faults, memory and configuration.

Called by `grpo-run report` and `grpo-run demo`. Works at any moment, also on a copy of a run directory:
everything comes through `RunReader`. Texts are cut and freed of control characters here, for the page,
Markdown and JSON alike. Does not format anything (`run_page.py`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.curves import RunCurves, charts_of
from grpo_run.dashboards.run_facts import facts_of, memory_of
from grpo_run.runtime.features import modules
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.host_status import HostStatus, read_hosts
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.wall_states import WallState
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.watchdog.text import rank_names

MAX_CONFIGURATION = 30_000
SHOWN_INCIDENTS = 200
SHOWN_RANKS = 64
MOST_POINTS = 200
"""Of a curve: charts are small."""
LEAST_SECONDS = 0.05
"""Time in no state that is worth a row."""


def read_run_report(run: RunDirectory) -> dict[str, Any]:
    """Return everything the report shows, as JSON values.

    `wall_seconds` is the time by what it was spent on; its sum is the time from the first event to the last.
    `curves` are of the `train()` call with the number `curves_of_call`, by keys of `charts`, and `marks` its
    faults; `phases` has the seconds that phases and callbacks took in its steps, the longest first, and
    `growth` says which of them got slower and slower. `no_gradient` is the time of all ranks on steps, and
    what of it has taught nothing, by why. `data` has what features say of the data. `number` of an incident
    is that of its folder; None if it has none. `omitted` is the number of earlier incidents that are not
    listed.

    Raises:
        RunDirectoryError: it is not a run directory, or cannot be read.
    """
    curves = RunCurves()
    reader = run_reader(run, curves)
    status = reader.read()
    history, recorded, facts = status.history, run.read_run(), facts_of(status)
    incidents = [{"number": _number(one["folder"]), **one} for one in facts["incidents"]]
    inputs = recorded.pop("inputs", None)
    versions = inputs.get("versions") if isinstance(inputs, dict) else None
    memory = map(memory_of, (status.memory or reader.last_memory())[:SHOWN_RANKS])
    return facts | {
        "sentence": clean(status.summary),
        "began_at": history.wall.first,
        "ended_at": history.wall.last,
        "wall_seconds": _wall_seconds(history),
        "charts": [{"key": one.key, "group": one.group, "title": one.title} for one in charts_of(history)],
        "curves": curves.points(MOST_POINTS),
        "curves_of_call": curves.train_call,
        "checkpoints": [one["step"] for one in curves.checkpoints if one["train_call"] == curves.train_call],
        "phases": curves.longest_phases(MOST_POINTS),
        "no_gradient": _no_gradient(history, curves),
        "growth": list(map(clean, history.pace())),
        "marks": [
            {"step": one["step"], "redone_from": one["from_checkpoint"], "text": one["sentence"]}
            for one in incidents[-SHOWN_INCIDENTS:]
            if one["train_call"] == curves.train_call
        ],
        "incidents": incidents[-SHOWN_INCIDENTS:],
        "omitted": max(0, len(incidents) - SHOWN_INCIDENTS),
        "memory": [{"rank": rank, **one} for rank, one in enumerate(memory) if one is not None],
        "memory_notes": _memory_notes(history),
        "data": [clean(line) for module in modules("report") for line in module.lines(run, history)],
        "settings": _settings(recorded, history, read_hosts(run.hosts)),
        "configuration": clean(
            json.dumps(recorded, indent=2, ensure_ascii=False, default=str), MAX_CONFIGURATION
        ),
        "versions": {clean(name, 100): clean(version, 100) for name, version in versions.items()}
        if isinstance(versions, dict)
        else {},
    }


def _number(folder: str | None) -> int | None:
    number = (folder or "").partition("-")[0]
    return int(number) if number.isdecimal() else None


def _wall_seconds(history: History) -> dict[str, float]:
    """Return seconds by state; what no event has assigned yet comes last."""
    seconds = {state.value: history.wall.seconds[state] for state in WallState}
    first, last = history.wall.first, history.wall.last
    rest = 0.0 if first is None or last is None else last - first - sum(seconds.values())
    return seconds | ({"unfinished step": rest} if rest > LEAST_SECONDS else {})


def _no_gradient(history: History, curves: RunCurves) -> dict[str, Any]:
    """The hours of all ranks on steps, and those that bought no gradient. What was logged of the newest call
    stands for all steps; a group whose rewards are equal counts as its share of a step.
    """
    productive, redone = (history.wall.seconds[state] for state in (WallState.productive, WallState.redone))
    step_seconds = curves.mean("step_seconds") or history.step_seconds() or 0.0
    seconds = {"groups with equal rewards": (curves.mean("zero_variance_groups") or 0.0) * productive}
    seconds |= {
        why: steps * step_seconds for part in history.parts for why, steps in part.without_gradient().items()
    } | {"steps done again": redone}
    hours = max(1, history.world_size) / 3600
    return {
        "total_hours": (productive + redone) * hours,
        "hours": {why: one * hours for why, one in seconds.items() if one > 0},
    }


def _memory_notes(history: History) -> list[str]:
    notes = [f"{name.capitalize()}: {text}" for name, text in history.facts().items()]
    return [clean(note) for note in (*notes, *history.notes())]


def _settings(recorded: Mapping[str, Any], history: History, hosts: Sequence[HostStatus]) -> dict[str, str]:
    typed = recorded.get("typed")
    commit = recorded.get("git_commit")
    checkpoint = history.checkpoint
    rows = {
        "Command": f"grpo-run launch {shlex.join(map(str, typed))}" if isinstance(typed, list) else "",
        "Working directory": recorded.get("working_directory"),
        "Git commit": commit,
        "Hosts": ", ".join(
            f"{host.name} ({rank_names(one.rank for one in host.ranks)})" for host in hosts if host.ranks
        ),
        "Last checkpoint": f"step {checkpoint.step}: {checkpoint.path}" if checkpoint else "",
    }
    return {name: clean(text) for name, text in rows.items() if text}
