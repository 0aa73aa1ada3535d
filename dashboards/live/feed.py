"""Read runs for the live page: each once, however many pages show it, and tell what has changed.

`server.py` sends the changes of a `RunFeed` to the pages; `grpo-run top` draws its `shown`. `RunList` has all
runs of the user. Reads run directories as `RunReader` does; nothing here waits for a run or makes it wait.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_run.dashboards.live.curves import RunCurves
from grpo_run.dashboards.live.samples import SampleReader
from grpo_run.dashboards.live.view import MAX_LABEL, clean, view
from grpo_run.runtime.catalog import run_directories
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import DEFAULT_ROOT, RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.evidence.timeline import PhaseTimeline

Points = Mapping[str, Sequence[tuple[int, float, float, float]]]
MOST_RUNS = 300
"""Runs in the list, those that changed last."""


def key_of(directory: Path) -> str:
    """Return the name of a run directory in addresses."""
    return hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()[:16]


class RunFeed:
    """One run, and what was seen of it while it was watched.

    Args:
        directory: of the run.
        wall, monotonic: clocks in seconds; replaced in tests.
    """

    def __init__(
        self,
        directory: RunDirectory,
        *,
        wall: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.directory = directory
        self._wall, self._monotonic = wall, monotonic
        self._curves = RunCurves()
        self._reader = RunReader(directory, self._curves)
        self._timeline = PhaseTimeline()
        self._samples = SampleReader(directory.completions)
        self._seen = -1
        self._lanes_at = 0.0
        self.shown: dict[str, Any] = {}
        """What a page needs that has seen nothing yet, by the name of the event. Replaced by `poll`."""

    @property
    def live(self) -> bool:
        """Whether the run has a supervisor, as far as was seen."""
        return bool(self.shown.get("run", {}).get("live"))

    def poll(self) -> dict[str, Any]:
        """Read the run again; return what has changed, by the name of the event.

        A directory that cannot be read at present gives `{"problem": sentence}`.
        """
        try:
            status = self._reader.read()
        except RunDirectoryError as error:
            problem = clean(error)
            changed = {} if self.shown.get("problem") == problem else {"problem": problem}
            self.shown = {**self.shown, "problem": problem}
            return changed
        shown: dict[str, Any] = {"run": view(status, self._curves.checkpoints, self._wall())}
        changes: dict[str, Any] = {}
        if (samples := self._samples.newest()) is not None:
            shown["samples"] = samples
        shown["lanes"], changes["lanes"] = self._observed_lanes(status)
        if self._curves.changes != self._seen:
            self._seen = self._curves.changes
            points = self._curves.points()
            shown["curves"] = _all_of(points)
            changes["curves"] = _added(self.shown.get("curves", {}).get("points", {}), points)
        else:
            shown["curves"] = self.shown["curves"]
        for name in ("run", "samples"):
            if name in shown and shown[name] != self.shown.get(name):
                changes[name] = shown[name]
        if not changes["lanes"]["ranks"]:
            del changes["lanes"]
        self.shown = shown
        return changes

    def _observed_lanes(self, status: RunStatus) -> tuple[dict[str, Any], dict[str, Any]]:
        """The phases of all ranks by time, and those that were open since the last look."""
        now, before = self._monotonic(), self._lanes_at
        if status.slots:
            ranks = {slot.rank if slot else local: slot for local, slot in enumerate(status.slots)}
            self._timeline.record(ranks, now)
            self._lanes_at = now
        spans: dict[str, list[list[Any]]] = {
            rank: [
                [name, round(now + begin, 3), None if end is None else round(now + end, 3)]
                for name, begin, end in spans
            ]
            for rank, spans in self._timeline.as_json(now)["ranks"].items()
        }
        newer = {
            rank: [span for span in spans if span[2] is None or span[2] >= before - 1]
            for rank, spans in (spans.items() if status.slots else ())
        }
        at = round(self._lanes_at, 3)
        return {"now": at, "ranks": spans}, {"now": at, "ranks": newer}


def _all_of(points: Points) -> dict[str, Any]:
    return {"from": dict.fromkeys(points, 0), "points": points}


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
    """All runs of the user. `poll` reads one of those that have changed, so that it never takes long.

    Args:
        root: the folder of runs in the working directory.
        given: a run that is listed wherever it is; None for none.
    """

    def __init__(self, root: Path = DEFAULT_ROOT, given: RunDirectory | None = None) -> None:
        self._root, self._given = root, given
        self._read: dict[str, tuple[object, dict[str, Any]]] = {}
        self.directories: dict[str, RunDirectory] = {}
        """By key, the run that changed last first."""

    def poll(self) -> None:
        """Look for runs, and read the newest one that has changed since it was read."""
        found: dict[str, tuple[float, RunDirectory]] = {}
        paths = [*([self._given.path] if self._given else []), *run_directories(self._root)]
        for path in paths:
            directory = RunDirectory(path=path)
            found.setdefault(key_of(path), (_changed_at(directory), directory))
        newest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_RUNS]
        self.directories = {key: directory for key, (_, directory) in newest}
        self._read = {key: read for key, read in self._read.items() if key in self.directories}
        for key, (changed_at, directory) in newest:
            # a supervisor that is killed changes no file
            held = directory.owner() is not None
            if self._read.get(key, (None, {}))[0] != (changed_at, held):
                self._read[key] = (changed_at, held), _entry(directory)
                return

    def shown(self) -> list[dict[str, Any]]:
        """Return what a page lists; a run that was not read yet has no state."""
        return [
            {"key": key, "run_id": clean(directory.path.name, MAX_LABEL), "state": None}
            | self._read.get(key, (None, {}))[1]
            for key, directory in self.directories.items()
        ]


def _changed_at(directory: RunDirectory) -> float:
    try:
        return directory.journal.stat().st_mtime
    except OSError:
        return 0.0  # no supervisor has written to it yet


def _entry(directory: RunDirectory) -> dict[str, Any]:
    try:
        status = RunReader(directory).read()
    except RunDirectoryError as error:
        return {"state": "unreadable", "problem": clean(error)}
    history = status.history
    return {
        "run_id": clean(status.run_id, MAX_LABEL),
        "state": status.state,
        "step": history.step,
        "target_steps": history.target_steps,
        "faults": len(history.recoveries),
        "last_event_at": history.time.last,
    }
