"""Read an incident's files for its report: verdict, action taken, evidence, and the ranks' collectives.

Called by `grpo-run report`. Collectives come from the ranks' own logs; dumps of torch's Flight Recorder are
left to the reader. Evidence may be missing or malformed; that is never an error, and the page reports it.
Does not format anything (`incident_page.py`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launching.reading import run_reader

MAX_FILE_BYTES = 4 * 1024 * 1024
MAX_VERDICT_BYTES = 64 * 1024 * 1024
"""A verdict quotes the traceback of the script, whatever its length."""


def read_text(path: Path, most_bytes: int = MAX_FILE_BYTES) -> str:
    """The first bytes of a file; empty if it cannot be read."""
    try:
        with open(path, "rb") as file:
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""  # was not gathered; the page reports it


def read_json(path: Path, most_bytes: int = MAX_FILE_BYTES) -> Any:
    """The JSON value of a file; None if the file is missing, longer or malformed."""
    try:
        return json.loads(read_text(path, most_bytes))
    except ValueError:
        return None


def read_sizes(path: Path) -> dict[str, int]:
    """The lines `Name:  123 kB` of a file from /proc, in bytes."""
    sizes = {}
    for line in read_text(path).splitlines():
        words = line.split()
        if len(words) == 3 and words[2] == "kB" and words[1].isdecimal():
            sizes[words[0].rstrip(":")] = int(words[1]) * 1024
    return sizes


def files_by_rank(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """The files `rank<N><suffix>` of a folder, by rank."""
    if not folder.is_dir():
        return []
    named = [
        (path.name.removeprefix("rank").removesuffix(suffix), path) for path in folder.glob(f"rank*{suffix}")
    ]
    return sorted((int(number), path) for number, path in named if number.isdecimal())


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective in a rank's log. `state` is `enqueued`, `waiting` or `completed`."""

    group: str
    sequence: int
    text: str
    state: str
    place: str = ""


def read_collectives(folder: Path) -> dict[int, tuple[CollectiveCall, ...]]:
    """Return the last collectives of each rank, from its own log."""
    by_rank: dict[int, tuple[CollectiveCall, ...]] = {}
    for rank, path in files_by_rank(folder, ".notes.json"):
        log = read_json(path)
        calls = tuple(
            _from_log(entry) for entry in (log if isinstance(log, list) else ()) if isinstance(entry, dict)
        )
        if calls:
            by_rank[rank] = calls
    return by_rank


def _from_log(entry: Mapping[str, Any]) -> CollectiveCall:
    return CollectiveCall(
        group=str(entry.get("group", "?")),
        sequence=_integer(entry.get("sequence")),
        text=_call_text(str(entry.get("operation") or "?"), entry.get("sizes"), entry.get("dtypes")),
        state=str(entry.get("progress") or ""),
        place=str(entry.get("at") or ""),
    )


def _call_text(operation: str, sizes: Any, dtypes: Any) -> str:
    """For example `all_reduce [3, 4] Float`."""
    shapes = sizes if isinstance(sizes, str) else " ".join(map(str, sizes or ()))
    types = dtypes if isinstance(dtypes, str) else " ".join(dict.fromkeys(map(str, dtypes or ())))
    return " ".join(part for part in (operation, shapes, types) if part)


def _integer(value: Any) -> int:
    return value if isinstance(value, int) else -1


SHOWN_EVENTS = 40


def find_incident(run: RunDirectory, wanted: str | None) -> Path:
    """Return the directory of an incident, given as `3`, `0003` or `0003-signal`; None selects the latest.

    Raises:
        RunDirectoryError: there is no such incident.
    """
    folders = {
        int(path.name[:4]): path
        for path in (sorted(run.incidents.iterdir()) if run.incidents.is_dir() else [])
        if path.name[:4].isdigit() and path.is_dir()
    }
    if not folders:
        found = run_reader(run).history().notes()
        where = f"; `grpo-run status {run.path}` shows what was found in it" if found else ""
        raise RunDirectoryError(f"{run.path} has no incidents to report{where}")
    if wanted is None:
        return folders[max(folders)]
    number = wanted.partition("-")[0]
    if not number.isdecimal() or int(number) not in folders:
        known = ", ".join(map(str, folders))
        raise RunDirectoryError(f"no incident {wanted!r} in {run.path}; known incidents: {known}")
    return folders[int(number)]


def read_report(run: RunDirectory, incident: Path) -> dict[str, Any]:
    """Return everything the report of an incident shows.

    `verdict` is the content of `verdict.json`, or None if the supervisor ended before writing it. `recovery`
    is what the journal has of the incident. `resident` and `peak` are the current and highest memory of each
    rank in bytes, `phase_memory` what it has measured by phase (`RankMemory.as_json`). `timeline` is the
    content of `timeline.json`. `notes` has what features have found in the run, as lines.

    Raises:
        RunDirectoryError: its `verdict.json` is damaged.
    """
    history = run_reader(run).history()
    recoveries = [one for one in history.recoveries if Path(one.incident or "").name == incident.name]
    memory = {rank: read_sizes(path) for rank, path in files_by_rank(incident / "memory", ".status")}
    node = read_sizes(incident / "memory" / "node.txt")
    gpus = read_json(incident / "memory" / "gpu.json")
    timeline = read_json(incident / "timeline.json")
    return {
        "name": incident.name,
        "run_id": history.run_id or run.path.name,
        "verdict": _read_verdict(incident / "verdict.json"),
        "recovery": recoveries[-1] if recoveries else None,
        "timeline": timeline if isinstance(timeline, dict) else None,
        "folded_stacks": read_text(incident / "stacks" / "folded.txt"),
        "resident": {rank: sizes["VmRSS"] for rank, sizes in memory.items() if "VmRSS" in sizes},
        "peak": {rank: sizes["VmHWM"] for rank, sizes in memory.items() if "VmHWM" in sizes},
        "phase_memory": _by_rank(read_json(incident / "memory" / "phases.json")),
        "node_total": node.get("MemTotal"),
        "node_available": node.get("MemAvailable"),
        "gpus": tuple(gpus.get("devices", ())) if isinstance(gpus, dict) else None,
        "collectives": read_collectives(incident / "collectives"),
        "events": tuple(deque(_records(incident / "events.jsonl"), SHOWN_EVENTS)),
        "notes": (*history.notes(), *history.ended()),
    }


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of the journal that were saved with the incident, whatever their events are."""
    for line in read_text(path).splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue  # the first one may be a part
        if isinstance(record, dict) and "event" in record:
            yield record


def _by_rank(value: Any) -> dict[int, Mapping[str, Any]]:
    """What the ranks have measured; a damaged file gives nothing."""
    if not isinstance(value, dict):
        return {}
    return {
        int(rank): memory
        for rank, memory in value.items()
        if rank.isdecimal() and isinstance(memory, dict) and isinstance(memory.get("phases"), dict)
    }


def _read_verdict(path: Path) -> Mapping[str, Any] | None:
    if not path.exists():
        return None
    verdict = read_json(path, MAX_VERDICT_BYTES)
    if not isinstance(verdict, dict):
        raise RunDirectoryError(f"cannot read the verdict: {path} is not a JSON object")
    return verdict
