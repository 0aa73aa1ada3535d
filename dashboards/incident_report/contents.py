"""An incident's files, read for its report: verdict, what was done about it, and the evidence that is there.

Called by `grpo-run report`. Evidence may be missing or cut short, and that is not an error: it is left out here and
said on the page. Does not format anything (`page.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.record.history import History, Recovery
from grpo_run.runtime.record.journal import read_journal
from grpo_run.runtime.record.run_directory import RunDirectory

MAX_FILE_BYTES = 4 * 1024 * 1024
SHOWN_EVENTS = 40


@dataclass(frozen=True, kw_only=True)
class Call:
    """One collective as one rank recorded or noted it. `state` is `enqueued`, `waiting` or `completed`."""

    group: str
    sequence: int
    text: str
    state: str
    place: str = ""


@dataclass(frozen=True, kw_only=True)
class Action:
    """What the supervisor did about an incident: journal's word and reason."""

    name: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Everything a report shows, in plain data.

    `verdict` is `verdict.json`, None where the supervisor ended before it wrote one. `at` is wall time in seconds.
    Memory is in bytes by rank: `resident` now, `peak` at its highest. `timeline` is `timeline.json`.
    """

    name: str
    run_id: str
    verdict: Mapping[str, Any] | None
    at: float | None = None
    recovery: Recovery | None = None
    action: Action | None = None
    timeline: Mapping[str, Any] | None = None
    folded_stacks: str = ""
    resident: Mapping[int, int] = field(default_factory=dict)
    peak: Mapping[int, int] = field(default_factory=dict)
    node_total: int | None = None
    node_available: int | None = None
    gpus: tuple[Mapping[str, Any], ...] | None = None
    collectives: Mapping[int, tuple[Call, ...]] = field(default_factory=dict)
    events: tuple[Mapping[str, Any], ...] = ()


def find_incident(run: RunDirectory, wanted: str | None) -> Path:
    """The directory of an incident given by number (`3`, `0003`, `0003-signal`), or of the latest.

    Raises:
        RunDirectoryError: there is none.
    """
    folders = {
        int(path.name[:4]): path
        for path in (sorted(run.incidents.iterdir()) if run.incidents.is_dir() else [])
        if path.name[:4].isdigit() and path.is_dir()
    }
    if not folders:
        raise RunDirectoryError(f"{run.path} has no incidents: nothing to report")
    if wanted is None:
        return folders[max(folders)]
    number = wanted.partition("-")[0]
    if not number.isdecimal() or int(number) not in folders:
        there = ", ".join(map(str, folders))
        raise RunDirectoryError(f"no incident {wanted!r} in {run.path}; there are: {there}")
    return folders[int(number)]


def read_report(run: RunDirectory, incident: Path) -> Report:
    """Read an incident.

    Raises:
        RunDirectoryError: its `verdict.json` is damaged.
    """
    journal = _Journal.of(read_journal(run.journal), incident.name)
    status = {rank: _kibibytes(path) for rank, path in _by_rank(incident / "memory", ".status")}
    node = _kibibytes(incident / "memory" / "node.txt")
    gpus = _json(incident / "memory" / "gpu.json")
    timeline = _json(incident / "timeline.json")
    return Report(
        name=incident.name,
        run_id=journal.history.run_id or run.path.name,
        verdict=_verdict(incident / "verdict.json"),
        at=journal.at,
        recovery=journal.recovery,
        action=journal.action,
        timeline=timeline if isinstance(timeline, dict) else None,
        folded_stacks=_text(incident / "stacks" / "folded.txt"),
        resident={rank: sizes["VmRSS"] for rank, sizes in status.items() if "VmRSS" in sizes},
        peak={rank: sizes["VmHWM"] for rank, sizes in status.items() if "VmHWM" in sizes},
        node_total=node.get("MemTotal"),
        node_available=node.get("MemAvailable"),
        gpus=tuple(gpus.get("devices", ())) if isinstance(gpus, dict) else None,
        collectives=_collectives(incident / "collectives"),
        events=_events(incident / "events.jsonl"),
    )


@dataclass(kw_only=True)
class _Journal:
    """What the journal knows of one incident."""

    history: History
    at: float | None = None
    recovery: Recovery | None = None
    action: Action | None = None

    @classmethod
    def of(cls, records: Iterable[Mapping[str, Any]], name: str) -> _Journal:
        found = cls(history=History())
        here = False
        for record in records:
            found.history.apply(dict(record))
            if record["event"] == "incident":
                here = Path(record.get("incident") or "").name == name
                if here:
                    found.at = record.get("time")
                    found.recovery = found.history.recoveries[-1]
            elif record["event"] == "action" and here:
                found.action = Action(
                    name=str(record.get("action") or ""), reason=str(record.get("reason") or "")
                )
                here = False
        return found


def _verdict(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    verdict = _json(path)
    if not isinstance(verdict, dict):
        raise RunDirectoryError(f"{path} is not a JSON object: the verdict cannot be read")
    return verdict


def _collectives(folder: Path) -> dict[int, tuple[Call, ...]]:
    """A rank's notes where it has them (they know the line), else what the Flight Recorder recorded."""
    found: dict[int, tuple[Call, ...]] = {}
    for rank, path in _by_rank(folder, ".json"):
        recorded = _json(path)
        entries = (recorded.get("entries") or ()) if isinstance(recorded, dict) else ()
        # sends and receives are not numbered by the group
        found[rank] = tuple(
            _recorded(entry) for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")
        )
    for rank, path in _by_rank(folder, ".notes.json"):
        notes = _json(path)
        calls = tuple(
            _noted(note) for note in (notes if isinstance(notes, list) else ()) if isinstance(note, dict)
        )
        if calls:
            found[rank] = calls
    return dict(sorted(found.items()))


def _recorded(entry: Mapping[str, Any]) -> Call:
    group = entry.get("process_group") or ["?"]
    completed = entry.get("retired") or entry.get("state") == "completed"
    return Call(
        group=str(group[0] if isinstance(group, list) else group),
        sequence=_whole(entry.get("collective_seq_id")),
        text=_call_text(
            str(entry.get("profiling_name") or "?").partition(":")[2]
            or str(entry.get("profiling_name") or "?"),
            entry.get("input_sizes"),
            entry.get("input_dtypes"),
        ),
        state="completed" if completed else "enqueued",
    )


def _noted(note: Mapping[str, Any]) -> Call:
    return Call(
        group=str(note.get("group", "?")),
        sequence=_whole(note.get("sequence")),
        text=_call_text(str(note.get("operation") or "?"), note.get("sizes"), note.get("dtypes")),
        state=str(note.get("progress") or ""),
        place=str(note.get("at") or ""),
    )


def _call_text(operation: str, sizes: Any, dtypes: Any) -> str:
    """`all_reduce [3, 4] Float`."""
    shapes = sizes if isinstance(sizes, str) else " ".join(map(str, sizes or ()))
    kinds = dtypes if isinstance(dtypes, str) else " ".join(dict.fromkeys(map(str, dtypes or ())))
    return " ".join(part for part in (operation, shapes, kinds) if part)


def _whole(value: Any) -> int:
    return value if isinstance(value, int) else -1


def _events(path: Path) -> tuple[Mapping[str, Any], ...]:
    events = []
    for line in _text(path).splitlines()[-SHOWN_EVENTS:]:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # cut short
        if isinstance(value, dict):
            events.append(value)
    return tuple(events)


def _by_rank(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """Files `rankN<suffix>` by rank."""
    if not folder.is_dir():
        return []
    named = [
        (path.name.removeprefix("rank").removesuffix(suffix), path) for path in folder.glob(f"rank*{suffix}")
    ]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


def _kibibytes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a /proc file, in bytes."""
    sizes = {}
    for line in _text(path).splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdecimal():
            sizes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes


def _text(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return file.read(MAX_FILE_BYTES).decode(errors="replace")
    except OSError:
        return ""  # not gathered; the page says so


def _json(path: Path) -> Any:
    try:
        return json.loads(_text(path))
    except ValueError:
        return None
