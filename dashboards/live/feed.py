"""Read runs for the live page: each once, however many pages show it, and tell what has changed.

`server.py` sends the changes of a `RunFeed` to the pages; `grpo-run top` draws its `shown`. `RunList` has all
runs of the user. Reads run directories as `RunReader` does; nothing here waits for a run or makes it wait.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.dashboards.curves import RunCurves, charts_of
from grpo_run.dashboards.live.samples import SampleReader
from grpo_run.dashboards.live.values import all_values, sampled
from grpo_run.dashboards.live.view import view
from grpo_run.dashboards.run_facts import MAX_LABEL
from grpo_run.runtime.catalog import run_directories
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.launching.reading import run_reader
from grpo_run.watchdog.evidence.timeline import PhaseTimeline

Points = Mapping[str, Sequence[tuple[int, float, float, float]]]
MOST_RUNS = 300
"""Runs in the list, those that changed last."""
MOST_SPANS = 1000
"""Phases in the lane of what runs beside the ranks."""


def key_of(directory: Path) -> str:
    """Return the name of a run directory in addresses."""
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]


class RunFeed:
    """One run, and what was seen of it while it was watched.

    Args:
        directory: of the run.
        monotonic: clock in seconds; replaced in tests.
    """

    def __init__(self, directory: RunDirectory, *, monotonic: Callable[[], float] = time.monotonic) -> None:
        self.directory = directory
        self._monotonic = monotonic
        self._curves = RunCurves()
        self._reader = run_reader(directory, self._curves)
        self._timeline = PhaseTimeline()
        self._beside: dict[str, list[list[Any]]] = {}
        self._samples = SampleReader(directory.completions)
        self._drawn = -1
        self._sampled = (0, 0)
        self._status: RunStatus | None = None
        self._lock = threading.Lock()
        self._sent: dict[str, Any] = {}
        self.shown: dict[str, Any] = {}
        """What a page needs that has seen nothing yet, by the name of the event. Replaced by `read`."""

    @property
    def urgent(self) -> bool:
        """Whether the run has got better or worse since `changes` was called."""
        return _tone(self.shown) != _tone(self._sent)

    def read(self) -> None:
        """Read the run again. A directory that cannot be read at present is the event `problem`."""
        with self._lock:
            self._read()

    def points(self) -> Points:
        """Return all points of the run's curves, by their keys."""
        points: Points = (self.shown.get("curves") or {}).get("points", {})
        return points

    def values(self) -> dict[str, Any]:
        """Return the present values of all metrics; empty before the first reading."""
        with self._lock:
            return {} if self._status is None else all_values(self._status, charts_of(self._status.history))

    def _read(self) -> None:
        try:
            status = self._reader.read()
        except RunDirectoryError as error:
            self.shown = {**self.shown, "problem": clean(error)}
            return
        self._status = status
        charts = charts_of(status.history)
        position = status.history.train_call, status.history.step
        if status.slots and position != self._sampled and position[0] == self._curves.train_call:
            self._sampled = position
            for key, value in sampled(status, charts):
                self._curves.add(key, position[1], value)
        shown: dict[str, Any] = {"run": view(status, self._curves.checkpoints, time.time())}
        shown["layout"] = [
            {"key": one.key, "group": one.group, "title": one.title, "unit": one.unit} for one in charts
        ]
        if (samples := self._samples.newest()) is not None:
            shown["samples"] = samples
        shown["lanes"] = self._lanes(status)
        shown["curves"] = self.shown.get("curves")
        if self._curves.changes != self._drawn:
            self._drawn = self._curves.changes
            phases = self._curves.longest_phases()
            points = self._curves.points() | {f"phase_seconds/{name}": one for name, one in phases.items()}
            shown["curves"] = {"from": dict.fromkeys(points, 0), "points": points}
        self.shown = shown

    def changes(self) -> dict[str, Any]:
        """Return what has changed since the last call, by the name of the event."""
        before, shown = self._sent, self.shown
        self._sent = shown
        changes: dict[str, Any] = {
            name: shown[name]
            for name in ("layout", "run", "samples", "problem")
            if name in shown and shown[name] != before.get(name)
        }
        curves = shown.get("curves")
        if curves is not None and curves is not before.get("curves"):
            changes["curves"] = _added((before.get("curves") or {}).get("points", {}), curves["points"])
        since = before.get("lanes", {}).get("now", 0.0)
        if (lanes := shown.get("lanes", {})).get("now", 0.0) > since:
            newer = {
                rank: [span for span in spans if span[2] is None or span[2] >= since - 1]
                for rank, spans in lanes["ranks"].items()
            }
            changes["lanes"] = {"now": lanes["now"], "ranks": newer}
        return changes

    def _lanes(self, status: RunStatus) -> dict[str, Any]:
        """The phases of all ranks by time: of each its name, begin and end, None while it lasts."""
        now = self._monotonic()
        if not status.slots:
            before: dict[str, Any] = self.shown.get("lanes", {"now": 0.0, "ranks": {}})
            return before
        self._timeline.record(
            {slot.rank if slot else local: slot for local, slot in enumerate(status.slots)}, now
        )
        self._note_beside(status, round(now, 3))
        return {
            "now": round(now, 3),
            "ranks": {
                rank: [
                    [name, round(now + begin, 3), None if end is None else round(now + end, 3)]
                    for name, begin, end in spans
                ]
                for rank, spans in self._timeline.as_json(now)["ranks"].items()
            }
            | self._beside,
        }

    def _note_beside(self, status: RunStatus, now: float) -> None:
        """Note the phases of what runs beside the ranks, by its name."""
        open_phases = {one.phase for slot in status.slots if slot is not None for one in slot.phases}
        for part in status.history.parts:
            for name, phase in part.beside(open_phases).items():
                spans = self._beside.setdefault(name, [])
                if not spans or spans[-1][0] != phase:
                    spans[-1:] = [[*span[:2], now] for span in spans[-1:]]
                    spans.append([phase, now, None])
                    del spans[:-MOST_SPANS]


def _tone(shown: Mapping[str, Any]) -> object:
    return shown.get("run", {}).get("tone")


def _added(before: Points, points: Points) -> dict[str, Any]:
    """The points from the first one on that is not as before."""
    begins = {}
    for name, curve in points.items():
        old = before.get(name, ())
        same = min(len(old), len(curve))
        # what is new is at the end, so look from there
        while same and old[same - 1] != curve[same - 1]:
            same -= 1
        if same and (old[0] != curve[0] or old[same // 2] != curve[same // 2]):
            same = 0  # drawn in wider groups
        begins[name] = same
    return {"from": begins, "points": {name: curve[begins[name] :] for name, curve in points.items()}}


class RunList:
    """All runs of the user.

    Args:
        root: the folder of runs in the working directory; None to list the given run alone.
        given: a run that is listed wherever it is; None for none.
    """

    def __init__(self, root: Path | None = DEFAULT_ROOT, given: RunDirectory | None = None) -> None:
        self._root, self._given = root, given
        self._changed: dict[str, tuple[float, bool]] = {}
        self._entries: dict[str, tuple[object, dict[str, Any]]] = {}
        self.directories: dict[str, RunDirectory] = {}
        """By key, the run that changed last first."""

    @property
    def active(self) -> list[str]:
        """The keys of runs with a live supervisor, the one that changed last first."""
        return [key for key, (_, live) in self._changed.items() if live]

    def find(self) -> None:
        """Look for runs, and which of them have changed."""
        found: dict[str, tuple[float, RunDirectory]] = {}
        others = [] if self._root is None else run_directories(self._root)
        for path in [*([self._given.path] if self._given else []), *others]:
            directory = RunDirectory(path=path)
            found.setdefault(key_of(path), (_changed_at(directory), directory))
        newest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_RUNS]
        # a supervisor that is killed changes no file
        self._changed = {key: (at, directory.owner() is not None) for key, (at, directory) in newest}
        self.directories = {key: directory for key, (_, directory) in newest}

    def read(self, watched: Mapping[str, Mapping[str, Any] | None], seconds: float) -> None:
        """Read runs that have changed since they were read, for about so many seconds.

        Args:
            watched: what is known of the runs that are watched anyway, as `view` returns it; None for one
                that is being read for the first time.
        """
        ends = time.monotonic() + seconds
        for key, directory in self.directories.items():
            if key in watched:
                if (known := watched[key]) is not None:
                    self._entries[key] = self._changed[key], _entry(known)
            elif self._entries.get(key, (None, {}))[0] != self._changed[key] and time.monotonic() < ends:
                self._entries[key] = self._changed[key], _read(directory)

    def shown(self) -> list[dict[str, Any]]:
        """Return what a page lists; a run that was not read yet has no state."""
        return [
            {"key": key, "run_id": clean(directory.path.name, MAX_LABEL), "state": None}
            | self._entries.get(key, (None, {}))[1]
            for key, directory in self.directories.items()
        ]


def _changed_at(directory: RunDirectory) -> float:
    try:
        return directory.journal.stat().st_mtime
    except OSError:
        return 0.0  # no supervisor has written to it yet


def _read(directory: RunDirectory) -> dict[str, Any]:
    try:
        return _entry(view(run_reader(directory).read(), (), time.time()))
    except RunDirectoryError as error:
        return {"state": "unreadable", "problem": clean(error)}


def _entry(run: Mapping[str, Any]) -> dict[str, Any]:
    names = ("run_id", "state", "step", "target_steps", "last_event_at")
    return {name: run[name] for name in names} | {"faults": len(run["incidents"])}
