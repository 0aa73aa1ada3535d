"""Read what the report of a whole run shows: verdict, wall time, curves, faults, memory and configuration.

Called by `grpo-run report`. Works at any moment, also on a copy of a run directory: everything comes through
`RunReader`. Texts are cut and freed of control characters here, for the page, Markdown and JSON alike. Does
not format anything (`run_page.py`).
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.curves import RunCurves
from grpo_run.dashboards.reports.charts import FaultMark, Point
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.wall_states import WallState
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.watchdog.memory.phase_memory import RankMemory

MAX_SENTENCE = 600
MAX_COMMAND = 2_000
MAX_CONFIGURATION = 30_000
SHOWN_INCIDENTS = 200
SHOWN_RANKS = 64
SHOWN_PHASES = 6
LEAST_SECONDS = 0.05
"""Time in no state that is worth a row."""


@dataclass(frozen=True, kw_only=True)
class Incident:
    """One fault. `number` is that of its folder; None if it has none."""

    number: int | None
    at: float
    step: int
    rank: int | None
    cause: str
    sentence: str
    action: str
    reason: str
    detection_seconds: float | None
    recovery_seconds: float | None
    repeated_steps: int | None
    gave_up: bool


@dataclass(frozen=True, kw_only=True)
class RankPeak:
    """The highest memory of a rank in its last attempt, in bytes, and the phase that it was measured in."""

    rank: int
    where: str
    peak_bytes: int
    phase: str
    capacity_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Everything the report shows, as plain data.

    `wall_seconds` is the time by what it was spent on; its sum is the time from the first event to the last.
    `curves` are of the `train()` call with the number `curves_of_call`, and `marks` its faults; `phases` has
    the seconds that phases and callbacks took in its steps, the longest first, and `growth` says which of
    them got slower and slower. `omitted` is the number of earlier incidents that are not listed.
    """

    run_id: str
    state: str
    sentence: str
    step: int
    target_steps: int
    attempts: int
    began_at: float | None
    ended_at: float | None
    goodput: float | None
    wall_seconds: Mapping[str, float]
    curves: Mapping[str, Sequence[Point]]
    curves_of_call: int
    phases: Mapping[str, Sequence[Point]]
    growth: tuple[str, ...]
    marks: tuple[FaultMark, ...]
    incidents: tuple[Incident, ...]
    omitted: int
    memory: tuple[RankPeak, ...]
    memory_notes: tuple[str, ...]
    settings: Mapping[str, str]
    configuration: str
    versions: Mapping[str, str]


def read_run_report(run: RunDirectory) -> RunReport:
    """Read a run.

    Raises:
        RunDirectoryError: it is not a run directory, or cannot be read.
    """
    curves = RunCurves()
    reader = run_reader(run, curves)
    status = reader.read()
    history, recorded = status.history, run.read_run()
    incidents = tuple(_incident(one) for one in history.recoveries)
    inputs = recorded.pop("inputs", None)
    inputs = inputs if isinstance(inputs, dict) else {}
    versions = inputs.get("versions")
    return RunReport(
        run_id=clean(status.run_id, 200),
        state=status.state,
        sentence=clean(status.summary, 4 * MAX_SENTENCE),
        step=history.step,
        target_steps=history.target_steps,
        attempts=history.attempts,
        began_at=history.wall.first,
        ended_at=history.wall.last,
        goodput=history.goodput(),
        wall_seconds=_wall_seconds(history),
        curves=curves.points(),
        curves_of_call=curves.train_call,
        phases=_longest(curves),
        growth=tuple(clean(sentence, MAX_SENTENCE) for sentence in history.pace()),
        marks=_marks(history, curves.train_call),
        incidents=incidents[-SHOWN_INCIDENTS:],
        omitted=max(0, len(incidents) - SHOWN_INCIDENTS),
        memory=_memory(status.memory or reader.last_memory()),
        memory_notes=_memory_notes(history),
        settings=_settings(recorded, history),
        configuration=clean(
            json.dumps(recorded, indent=2, ensure_ascii=False, default=str), MAX_CONFIGURATION
        ),
        versions={clean(name, 100): clean(version, 100) for name, version in versions.items()}
        if isinstance(versions, dict)
        else {},
    )


def _wall_seconds(history: History) -> dict[str, float]:
    """Return seconds by state; what no event has assigned yet comes last."""
    seconds = {state.value: history.wall.seconds[state] for state in WallState}
    first, last = history.wall.first, history.wall.last
    rest = 0.0 if first is None or last is None else last - first - sum(seconds.values())
    return seconds | ({"unfinished step": rest} if rest > LEAST_SECONDS else {})


def _longest(curves: RunCurves) -> dict[str, Sequence[Point]]:
    """The curves of the phases and callbacks that took most time, the longest first."""
    points = {clean(name, 100): curve.points() for name, curve in curves.phases.items()}
    seconds = {name: sum(point[1] for point in one) / len(one) for name, one in points.items() if one}
    longest = sorted(seconds, key=lambda name: -seconds[name])[:SHOWN_PHASES]
    return {name: points[name] for name in longest}


def _incident(recovery: Recovery) -> Incident:
    number = Path(recovery.incident or "").name.partition("-")[0]
    return Incident(
        number=int(number) if number.isdecimal() else None,
        at=recovery.at,
        step=recovery.step,
        rank=recovery.rank,
        cause=clean(recovery.cause, 100),
        sentence=clean(recovery.sentence or recovery.cause, MAX_SENTENCE),
        action=clean(recovery.action, 100).replace("_", " "),
        reason=clean(recovery.reason, MAX_SENTENCE),
        detection_seconds=recovery.detection_seconds,
        recovery_seconds=recovery.recovery_seconds,
        repeated_steps=recovery.lost_steps,
        gave_up=recovery.gave_up,
    )


def _marks(history: History, call: int) -> tuple[FaultMark, ...]:
    return tuple(
        FaultMark(
            step=one.step,
            redone_from=one.from_checkpoint,
            text=clean(one.sentence or one.cause, MAX_SENTENCE),
        )
        for one in history.recoveries[-SHOWN_INCIDENTS:]
        if one.train_call == call
    )


def _memory(ranks: Sequence[RankMemory | None]) -> tuple[RankPeak, ...]:
    peaks = []
    for local_rank, memory in enumerate(ranks[:SHOWN_RANKS]):
        if memory is None or not memory.readings:
            continue
        by_phase = {
            phase.name: one.peak_allocated_bytes if memory.has_device else one.peak_resident_bytes
            for phase, one in memory.phases.items()
        }
        phase = max(by_phase, key=lambda name: by_phase[name], default="")
        peaks.append(
            RankPeak(
                rank=local_rank,
                where="device" if memory.has_device else "host",
                peak_bytes=max(
                    by_phase.get(phase, 0), memory.peak_allocated_bytes if memory.has_device else 0
                ),
                phase=phase,
                capacity_bytes=memory.capacity_bytes or None,
            )
        )
    return tuple(peaks)


def _memory_notes(history: History) -> tuple[str, ...]:
    notes = [f"{name.capitalize()}: {text}" for name, text in history.facts().items()]
    if history.memory_restarts.count:
        notes.append(f"Restarts to free memory: {history.memory_restarts.count}")
    return tuple(clean(note, MAX_SENTENCE) for note in (*notes, *history.notes()))


def _settings(recorded: Mapping[str, Any], history: History) -> dict[str, str]:
    typed = recorded.get("typed")
    commit = recorded.get("git_commit")
    checkpoint = history.checkpoint
    rows = {
        "Command": f"grpo-run launch {shlex.join(map(str, typed))}" if isinstance(typed, list) else "",
        "Working directory": recorded.get("working_directory"),
        "Git commit": commit,
        "Last checkpoint": f"step {checkpoint.step}: {checkpoint.path}" if checkpoint else "",
    }
    return {name: clean(text, MAX_COMMAND) for name, text in rows.items() if text}
