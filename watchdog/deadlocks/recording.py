"""Parse torch's Flight Recorder and join its entries with a rank's collective log.

The parser reads the JSON of the handlers `fr_trace_json` and `dump_nccl_trace_json` (format 2.10). The join
gives one history of collectives for each rank; a group whose two records contradict each other proves
nothing. Called by `runtime/supervisor/detection/_collective_records.py` with the answers of the ranks' worker
servers. Pure; does no I/O and does not judge.
"""

from __future__ import annotations

import heapq
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from pydantic import BaseModel, Field, ValidationError

from grpo_run.watchdog.deadlocks.collectives import (
    BACKWARD,
    Collective,
    CollectiveProgress,
    can_meet,
    dtype_name,
    operation_name,
)


def merge(recorded: Sequence[Collective], logged: Sequence[Collective]) -> tuple[Collective, ...]:
    """Return one rank's collectives from both sources, in the order in which they were enqueued.

    Entries are joined by group and sequence number. The recorder says what was enqueued and whether it has
    completed; the log adds the line, the step, the members, the root and whether a thread waits. An entry of
    only one source keeps its position.
    """
    logged = exclude_reused_groups(tuple(entry for entry in logged if entry.count))
    named = {_key(entry) for entry in logged if entry.operation != BACKWARD}
    entries = [entry for entry in logged if entry.operation != BACKWARD or _key(entry) not in named]
    indices = {_key(entry): index for index, entry in enumerate(entries)}
    known = {_key(record) for record in recorded}
    backwards = {
        entry.group: entry.sequence for entry in logged if entry.operation == BACKWARD and not entry.completed
    }
    merged: list[Collective] = []
    placed = 0  # log entries before this index are in `merged` or in `recorded`
    for record in recorded:
        index = indices.get(_key(record))
        if _key(record) not in named and record.sequence >= backwards.get(record.group, record.sequence + 1):
            record = replace(record, in_backward=True)
        if index is None:
            merged.append(record)
            continue
        merged.extend(entry for entry in entries[placed:index] if _key(entry) not in known)
        placed = max(placed, index)
        merged.append(_joined(record, entries[index]))
    merged.extend(entry for entry in entries[placed:] if _key(entry) not in known)
    return _exclude(merged, _contradictory_groups(recorded, logged))


def exclude_reused_groups(records: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Exclude from proof every group whose sequence numbers decrease.

    Such a group was destroyed and created again under its name. One number then stands for two collectives,
    and other ranks may still be in the earlier group. Excluded records are marked as point-to-point.
    """
    highest: dict[str, int] = {}
    reused = set()
    for record in records:
        if record.point_to_point or record.operation == BACKWARD:
            continue
        if record.sequence < highest.get(record.group, 0):
            reused.add(record.group)
        highest[record.group] = max(record.sequence, highest.get(record.group, 0))
    return _exclude(records, reused)


def _contradictory_groups(recorded: Sequence[Collective], logged: Sequence[Collective]) -> set[str]:
    """Groups of which the log names a collective that the recorder does not have or knows as another one.

    The log's numbers are then not the recorder's: something that is not logged has counted in only one of
    the two. The recorder is read first, so an entry may also be newer than its answer.
    """
    by_key = {_key(record): record for record in recorded if not record.point_to_point}
    oldest: dict[str, int] = {}
    for group, sequence, _ in by_key:
        oldest[group] = min(sequence, oldest.get(group, sequence))
    return {
        entry.group
        for entry in logged
        if not entry.point_to_point
        and entry.operation != BACKWARD
        and entry.group in oldest
        and entry.sequence >= oldest[entry.group]
        and not _is_same(by_key.get(_key(entry)), entry)
    }


def _is_same(record: Collective | None, entry: Collective) -> bool:
    return record is not None and can_meet(record, entry)


def _exclude(records: Iterable[Collective], groups: set[str]) -> tuple[Collective, ...]:
    return tuple(
        replace(record, point_to_point=True) if record.group in groups else record for record in records
    )


def _key(collective: Collective) -> tuple[str, int, bool]:
    return collective.group, collective.sequence, collective.point_to_point


def _joined(record: Collective, entry: Collective) -> Collective:
    waits = entry.progress is CollectiveProgress.waiting and not record.completed
    return replace(
        record,
        progress=CollectiveProgress.waiting if waits else record.progress,
        location=entry.location or record.location,
        members=entry.members or record.members,
        root=entry.root if entry.root >= 0 else record.root,
        step=entry.step if entry.step >= 0 else record.step,
        thread=(waits and entry.thread) or record.thread or entry.thread,
        timeout_seconds=min(record.timeout_seconds, entry.timeout_seconds),
    )


HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose collectives run on the host, so that a thread that waits for one is blocked."""
OWN_GROUPS = "grpo_run/"
"""Prefix of the names of grpo-run's own groups."""
UNNAMED = "#"
"""Prefix of our names for groups to which torch gave none."""


class _Entry(BaseModel):
    """The fields that are read of a recorder's entry."""

    process_group: tuple[str, str]
    pg_id: int
    collective_seq_id: int = Field(ge=0)
    p2p_seq_id: int = Field(default=0, ge=0)
    is_p2p: bool = False
    profiling_name: str
    input_sizes: tuple[tuple[int, ...], ...] = ()
    input_dtypes: tuple[str, ...] = ()
    state: str | None = None
    retired: bool = False
    thread_id: str = ""
    thread_name: str = ""
    timeout_ms: int = 0

    @property
    def backend(self) -> str:
        """`gloo` for `gloo:all_reduce`."""
        return self.profiling_name.partition(":")[0]


class _Group(BaseModel):
    """Configuration of a process group.

    `ranks` is a list written as text; empty if the backend does not know it.
    """

    ranks: str = "[]"


class _Recording(BaseModel):
    """The recorder's answer.

    torch leaves `entries` out while nothing has been recorded; `version` is always there.
    """

    version: str | None = None
    entries: tuple[_Entry, ...] | None = None
    pg_config: dict[str, _Group] = Field(default_factory=dict)


def parse_recording(text: bytes | str) -> tuple[Collective, ...]:
    """Return the collectives of a Flight Recorder answer, oldest first.

    Gloo leaves `state` at `scheduled` and sets `retired` on completion; NCCL updates `state` as well. The
    caller limits the size of `text`.

    Raises:
        ValueError: the text has another format; the message names the first wrong field.
    """
    try:
        recording = _Recording.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the text"
        raise ValueError(f"Flight Recorder answer not understood at {where}: {first['msg']}") from error
    if recording.entries is None:
        if recording.version is None:
            raise ValueError("Flight Recorder answer not understood: neither version nor entries")
        return ()
    members = {name: _ranks(name, group.ranks) for name, group in recording.pg_config.items()}
    backends: dict[str, set[tuple[str, int]]] = {}
    for entry in recording.entries:
        backends.setdefault(_group(entry), set()).add((entry.backend, entry.pg_id))
    # two backends in one group (`cpu:gloo,cuda:nccl`), or two groups that used one name in succession, count
    # separately: their sequence numbers prove nothing. Each rank numbers groups without a name by itself
    ambiguous = {group for group, found in backends.items() if len(found) > 1 or group.startswith(UNNAMED)}
    return exclude_reused_groups(tuple(_collective(entry, members, ambiguous) for entry in recording.entries))


def join_recordings(first: bytes, second: bytes) -> bytes:
    """Return the answers of two recorders of one process as one, with the entries in their order.

    Raises:
        ValueError: one is not an object in JSON.
    """
    try:
        one, other = json.loads(first), json.loads(second)
        if not other.get("entries"):
            return first
        # each keeps its order, also if the clock was set
        entries = heapq.merge(
            one.get("entries") or (), other["entries"], key=lambda entry: entry["time_created_ns"]
        )
        groups = one.get("pg_config", {}) | other.get("pg_config", {})
        return json.dumps(one | {"entries": list(entries), "pg_config": groups}).encode()
    except (ValueError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"Flight Recorder answers not understood: {error!r}") from error


def group_positions(collectives: Iterable[Collective]) -> dict[str, tuple[int, int]]:
    """Return the last enqueued and the last completed sequence number of each process group of a rank.

    Without groups whose numbers ranks do not share, grpo-run's own, and those of which the recorder holds no
    completed collective any more.
    """
    groups: dict[str, list[Collective]] = {}
    for collective in collectives:
        if not collective.point_to_point and not collective.group.startswith(OWN_GROUPS):
            groups.setdefault(collective.group, []).append(collective)
    return {
        group: (
            max(entry.sequence for entry in entries),
            max((entry.sequence for entry in entries if entry.completed), default=0),
        )
        for group, entries in groups.items()
        if any(entry.completed or entry.sequence == 1 for entry in entries)
    }


def _ranks(name: str, text: str) -> tuple[int, ...]:
    try:
        ranks = json.loads(text or "[]")
    except ValueError:
        ranks = None
    if not isinstance(ranks, list) or any(type(rank) is not int for rank in ranks):
        raise ValueError(
            f"Flight Recorder answer not understood at pg_config.{name}.ranks: not a list of ranks"
        )
    return tuple(sorted(ranks))


def _group(entry: _Entry) -> str:
    return entry.process_group[0] or f"{UNNAMED}{entry.pg_id}"


def _collective(entry: _Entry, members: dict[str, tuple[int, ...]], ambiguous: set[str]) -> Collective:
    name = entry.process_group[0]
    completed = entry.retired or entry.state == "completed"
    return Collective(
        group=_group(entry),
        sequence=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        operation=operation_name(entry.profiling_name),
        sizes=entry.input_sizes,
        dtypes=tuple(dtype_name(dtype) for dtype in entry.input_dtypes),
        progress=CollectiveProgress.completed if completed else CollectiveProgress.enqueued,
        # all unnamed groups share one configuration
        members=members.get(name, ()) if name else (),
        point_to_point=entry.is_p2p or _group(entry) in ambiguous,
        timeout_seconds=entry.timeout_ms / 1000 if entry.timeout_ms > 0 else math.inf,
        thread="" if entry.thread_name.startswith("pt_autograd") else entry.thread_id,
        on_device=entry.backend not in HOST_BACKENDS,
    )
