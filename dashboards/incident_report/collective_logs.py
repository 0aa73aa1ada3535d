"""Read the collectives of an incident: the ranks' own logs and the dumps of torch's Flight Recorder.

Called by `contents.py`. Missing or malformed files give fewer calls, never an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.dashboards.incident_report.evidence_files import files_by_rank, read_json


@dataclass(frozen=True, kw_only=True)
class CollectiveCall:
    """One collective in a rank's log. `state` is `enqueued`, `waiting` or `completed`."""

    group: str
    sequence: int
    text: str
    state: str
    place: str = ""


def read_collectives(folder: Path) -> dict[int, tuple[CollectiveCall, ...]]:
    """Return the collectives of each rank.

    A rank's own log has source lines; the Flight Recorder's dump is used if there is no log.
    """
    by_rank: dict[int, tuple[CollectiveCall, ...]] = {}
    for rank, path in files_by_rank(folder, ".json"):
        dump = read_json(path)
        entries = (dump.get("entries") or ()) if isinstance(dump, dict) else ()
        # Sends and receives have no sequence number within the group.
        by_rank[rank] = tuple(
            _from_recorder(entry) for entry in entries if isinstance(entry, dict) and not entry.get("is_p2p")
        )
    for rank, path in files_by_rank(folder, ".notes.json"):
        log = read_json(path)
        calls = tuple(
            _from_log(entry) for entry in (log if isinstance(log, list) else ()) if isinstance(entry, dict)
        )
        if calls:
            by_rank[rank] = calls
    return dict(sorted(by_rank.items()))


def _from_recorder(entry: Mapping[str, Any]) -> CollectiveCall:
    group = entry.get("process_group") or ["?"]
    completed = entry.get("retired") or entry.get("state") == "completed"
    name = str(entry.get("profiling_name") or "?")
    return CollectiveCall(
        group=str(group[0] if isinstance(group, list) else group),
        sequence=_integer(entry.get("collective_seq_id")),
        text=_call_text(name.partition(":")[2] or name, entry.get("input_sizes"), entry.get("input_dtypes")),
        state="completed" if completed else "enqueued",
    )


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
