"""A run as a Chrome trace for Perfetto: what the supervisor has seen, and the phases of ranks before faults.

Called by `grpo-run trace`. One process of the trace is the run, with a lane each for attempts, steps, saves
and faults; one is each rank, with a lane of phases. Phases are known for the last steps before each incident
only.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.reports.charts import spans_of
from grpo_run.dashboards.reports.incident_contents import read_json
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointPublished,
    CheckpointStaged,
    RunEnded,
    RunStarted,
    StepCommitted,
    TrainStarted,
)
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

MOST_PHASES = 200_000
"""Slices of phases over all incidents, the last ones first."""
RUN = 1
"""Process of the run in the trace; that of rank 0 has the next number."""
ATTEMPTS, STEPS, SAVES, FAULTS = 1, 2, 3, 4
MAX_NAME = 300

Slice = tuple[str, float, float, dict[str, Any]]
"""Name, begin and end in seconds since the epoch, and further values."""


class _Lanes:
    """Follows the journal, and keeps the slices of the run's lanes."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Forget everything."""
        self.attempts: list[Slice] = []
        self.steps: list[Slice] = []
        self.saves: list[Slice] = []
        self._since: tuple[int, int, float] | None = None
        self._attempt: tuple[int, float] | None = None

    def apply(self, event: Event, history: History) -> None:
        """Take one event of the journal."""
        time = event.time
        match event:
            case AttemptStarted(attempt=int(number)):
                self.end_attempt(time)
                self._attempt = number, time
            case AttemptEnded() | RunEnded() | RunStarted():
                self.end_attempt(time)
                self._since = None
            case TrainStarted(rank=0 | None):
                self._since = event.train_call, event.step or 0, time
            case StepCommitted(train_call=int(call), step=step):
                at = event.committed_at or time
                if self._since is not None and self._since[0] == call and step > self._since[1]:
                    first = self._since[1] + 1
                    name = f"step {step}" if first == step else f"steps {first}–{step}"
                    self.steps.append((name, self._since[2], at, {"train_call": call}))
                self._since = call, step, at
            case CheckpointStaged(seconds=float(seconds)) | CheckpointPublished(seconds=float(seconds)):
                name = "snapshot" if isinstance(event, CheckpointStaged) else "checkpoint"
                self.saves.append((f"{name} {event.step}", time - seconds, time, {}))

    def end_attempt(self, time: float) -> None:
        """End the attempt that is open, if there is one."""
        if self._attempt is not None:
            number, begin = self._attempt
            self.attempts.append((f"attempt {number}", begin, time, {}))
            self._attempt = None


def read_trace(run: RunDirectory) -> dict[str, Any]:
    """Return the trace as a JSON object.

    Raises:
        RunDirectoryError: the journal cannot be read.
    """
    lanes = _Lanes()
    history = run_reader(run, lanes).history()
    begin, last = history.wall.first or 0.0, history.wall.last or 0.0
    lanes.end_attempt(last)
    events = [_named("process_name", RUN, 0, f"run {clean(history.run_id or run.path.name, MAX_NAME)}")]
    for lane, name, slices in (
        (ATTEMPTS, "attempts", lanes.attempts),
        (STEPS, "steps", lanes.steps),
        (SAVES, "saves", lanes.saves),
        (FAULTS, "faults", [part for one in history.recoveries for part in _fault(one)]),
    ):
        events.append(_named("thread_name", RUN, lane, name))
        events += [_slice(RUN, lane, begin, *one) for one in slices]
    return {"displayTimeUnit": "ms", "traceEvents": events + _phases(run, history, begin)}


def _fault(recovery: Recovery) -> list[Slice]:
    """Detection and recovery of one fault; a fault that was not recovered has no recovery."""
    detected = recovery.at + (recovery.detection_seconds or 0.0)
    details = {"sentence": clean(recovery.sentence, MAX_NAME), "action": clean(recovery.action, MAX_NAME)}
    slices: list[Slice] = [(f"detection: {clean(recovery.cause, MAX_NAME)}", recovery.at, detected, details)]
    if recovery.recovery_seconds is not None:
        slices.append(("recovery", detected, recovery.at + recovery.recovery_seconds, details))
    return slices


def _phases(run: RunDirectory, history: History, begin: float) -> list[dict[str, Any]]:
    """The phases of ranks before each incident: timelines say when a phase was before their own time."""
    events: list[dict[str, Any]] = []
    ranks: set[int] = set()
    for recovery in reversed(history.recoveries):
        timeline = read_json(run.incidents / Path(recovery.incident or "?").name / "timeline.json")
        if not isinstance(timeline, dict):
            continue
        written = recovery.at + (recovery.detection_seconds or 0.0)
        for rank, spans in spans_of(timeline).items():
            ranks.add(rank)
            events += [
                _slice(
                    RUN + 1 + rank, 1, begin, one.phase,
                    written + one.begin, written + one.end, {"open": True} if one.is_open else {},
                )
                for one in spans
            ]  # fmt: skip
        if len(events) > MOST_PHASES:
            break
    names = [_named("process_name", RUN + 1 + rank, 0, f"rank {rank}") for rank in sorted(ranks)]
    return names + events[:MOST_PHASES]


def _named(kind: str, process: int, lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": lane, "args": {"name": name}}


def _slice(
    process: int, lane: int, origin: float, name: str, begin: float, end: float, values: dict[str, Any]
) -> dict[str, Any]:
    """A complete event; times in microseconds since the run began, because Perfetto loses digits of larger
    ones.
    """
    return {
        "ph": "X", "name": name, "pid": process, "tid": lane, "ts": round((begin - origin) * 1e6),
        "dur": max(0, round((end - begin) * 1e6)), **({"args": values} if values else {}),
    }  # fmt: skip
