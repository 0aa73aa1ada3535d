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

from grpo_run.dashboards.curves import RunCurves
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
    """All runs of the user.

    Args:
        root: the folder of runs in the working directory.
        given: a run that is listed wherever it is; None for none.
    """

    def __init__(self, root: Path = DEFAULT_ROOT, given: RunDirectory | None = None) -> None:
        self._root, self._given = root, given
        self._changed: dict[str, tuple[float, bool]] = {}
        self._entries: dict[str, tuple[object, dict[str, Any]]] = {}
        self.directories: dict[str, RunDirectory] = {}
        """By key, the run that changed last first."""

    def find(self) -> None:
        """Look for runs, and which of them have changed."""
        found: dict[str, tuple[float, RunDirectory]] = {}
        for path in [*([self._given.path] if self._given else []), *run_directories(self._root)]:
            directory = RunDirectory(path=path)
            found.setdefault(key_of(path), (_changed_at(directory), directory))
        newest = sorted(found.items(), key=lambda item: -item[1][0])[:MOST_RUNS]
        # a supervisor that is killed changes no file
        self._changed = {key: (at, directory.owner() is not None) for key, (at, directory) in newest}
        self.directories = {key: directory for key, (_, directory) in newest}

    def read(self, watched: Mapping[str, Mapping[str, Any]], seconds: float) -> None:
        """Read runs that have changed since they were read, for about so many seconds.

        Args:
            watched: what is known of the runs that are watched anyway, as `view` returns it.
        """
        ends = time.monotonic() + seconds
        for key, directory in self.directories.items():
            if key in watched:
                self._entries[key] = self._changed[key], _entry(watched[key])
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
        return _entry(view(RunReader(directory).read(), (), time.time()))
    except RunDirectoryError as error:
        return {"state": "unreadable", "problem": clean(error)}


def _entry(run: Mapping[str, Any]) -> dict[str, Any]:
    names = ("run_id", "state", "step", "target_steps", "last_event_at")
    return {name: run[name] for name in names} | {"faults": len(run["incidents"])}
