"""Collective operations as ranks enqueued them: one shape for Gloo's and NCCL's records, and for our own notes.

A record comes from torch's Flight Recorder (every collective, also those that C++ issues; no line of code) or from
the rank's notes on the board (those issued from Python; with the line, and whether the thread is waiting). Both are
keyed by process group and the group's sequence number. Called by the supervisor's watch and by `proof.py`.
Reads text it is given and does no I/O; says whether two operations can meet, not who is wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

from pydantic import BaseModel, Field, ValidationError

from grpo_run.watchdog.verdict import Location

DEFAULT_GROUP = "0"  # torch's name for the group of all ranks
BACKWARD = "backward"  # our note that DDP will all-reduce gradients from this sequence number on

# Operations whose inputs hold equally many elements on every rank. Absent: gather, scatter and all_to_all.
EVEN_OPERATIONS = frozenset({"all_reduce", "all_gather", "broadcast", "reduce", "reduce_scatter", "barrier"})


class Progress(IntEnum):
    """How far one rank is with one collective."""

    enqueued = 1
    waiting = 2  # and a thread of the rank is blocked until it completes
    completed = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective operation on one rank.

    `group` is the process group's name (`0` is the default group's), equal on all its ranks. `sequence` counts
    the group's collectives from 1. `operation` is torch's name without the backend: `all_reduce`, `all_gather`.
    `sizes` and `dtypes` are the inputs'; no sizes means not known. `members` are the group's global ranks, empty
    where not known. `step` is the optimizer step under way, -1 where not known. `point_to_point` marks sends and
    receives, whose sequence numbers are not shared by the group. `thread` tells apart the threads of one rank
    that issue collectives; empty where not known, and for autograd's threads, which work for any other thread.
    `waiter` is the thread blocked in it, where that is known to be another. `timeout_seconds` is when it fails by itself.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    progress: Progress
    location: Location | None = None
    members: tuple[int, ...] = ()
    step: int = -1
    point_to_point: bool = False
    thread: str = ""
    waiter: str = ""
    timeout_seconds: float = math.inf


_NAMES = {
    "allreduce": "all_reduce",
    "sparse_all_reduce": "all_reduce",
    "sparse_allreduce": "all_reduce",
    "allgather": "all_gather",
    "alltoall": "all_to_all",
    "reducescatter": "reduce_scatter",
    "all_reduce_barrier": "barrier",
    "allreduce_barrier": "barrier",
    "recvanysource": "recv",
    "recv_anysource": "recv",
}
_VARIANT = re.compile(r"(_base|_oop|_single|_into_tensor|_tensor|_coalesced)+$")

_DTYPES = {
    "float64": "Double", "float32": "Float", "float16": "Half", "bfloat16": "BFloat16", "int64": "Long",
    "int32": "Int", "int16": "Short", "int8": "Char", "uint8": "Byte", "bool": "Bool", "complex64": "ComplexFloat",
    "complex128": "ComplexDouble", "float8_e4m3fn": "Float8_e4m3fn", "float8_e5m2": "Float8_e5m2",
}  # fmt: skip


def operation_name(raw: str) -> str:
    """One name for an operation, whether from a recorder (`nccl:_all_gather_base`) or a method (`_allgather_base`).

    A coalesced or flat-tensor variant gets the name of the operation it does. What is not known keeps its name.
    """
    words = raw.rsplit(":", 1)[-1].split()
    name = words[0].lower().lstrip("_") if words else ""
    name = _VARIANT.sub("", name)
    return _NAMES.get(name, name)


def dtype_name(raw: str) -> str:
    """The recorder's name of a dtype (`Float`) for Python's (`torch.float32`); others are returned as they are."""
    return _DTYPES.get(raw.removeprefix("torch."), raw)


class _Entry(BaseModel):
    """The fields of a recorder's entry that are read."""

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


class _Group(BaseModel):
    """A process group's configuration; `ranks` is a list written as text, empty where the backend does not know."""

    ranks: str = "[]"


class _Recording(BaseModel):
    """The recorder's whole answer."""

    entries: tuple[_Entry, ...]
    pg_config: dict[str, _Group] = Field(default_factory=dict)


def parse_recorder(text: bytes | str) -> tuple[Collective, ...]:
    """The collectives in the JSON that torch's handler `fr_trace_json` (format 2.10) answers with, oldest first.

    Gloo leaves `state` at `scheduled` and sets `retired` on completion; NCCL moves `state` as well. The caller
    bounds the size of `text`. Raises ValueError with one line that names the first field that is wrong.
    """
    try:
        recording = _Recording.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(str(part) for part in first["loc"]) or "the text"
        raise ValueError(f"Flight Recorder answer not understood at {where}: {first['msg']}") from error
    members = {name: _ranks(name, group.ranks) for name, group in recording.pg_config.items()}
    backends: dict[str, set[tuple[str, int]]] = {}
    for entry in recording.entries:
        life = (entry.profiling_name.partition(":")[0], entry.pg_id)
        backends.setdefault(_group(entry), set()).add(life)
    # two backends in one group (`cpu:gloo,cuda:nccl`), or two groups that had the name one after the other, count
    # apart: such numbers prove nothing
    ambiguous = {group for group, found in backends.items() if len(found) > 1}
    return _without_past_lives(tuple(_collective(entry, members, ambiguous) for entry in recording.entries))


def _without_past_lives(records: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Take from proof every group whose numbers fall: it was destroyed and made anew under its old name.

    Then a number stands for two collectives, and other ranks may still be in the group's earlier life.
    """
    highest: dict[str, int] = {}
    reborn = set()
    for record in records:
        if record.point_to_point or record.operation == BACKWARD:
            continue
        if record.sequence < highest.get(record.group, 0):
            reborn.add(record.group)
        highest[record.group] = max(record.sequence, highest.get(record.group, 0))
    return tuple(
        replace(record, point_to_point=True) if record.group in reborn else record for record in records
    )


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
    return entry.process_group[0] or f"#{entry.pg_id}"


def _collective(entry: _Entry, members: dict[str, tuple[int, ...]], ambiguous: set[str]) -> Collective:
    name = entry.process_group[0]
    completed = entry.retired or entry.state == "completed"
    return Collective(
        group=_group(entry),
        sequence=entry.p2p_seq_id if entry.is_p2p else entry.collective_seq_id,
        operation=operation_name(entry.profiling_name),
        sizes=entry.input_sizes,
        dtypes=tuple(dtype_name(dtype) for dtype in entry.input_dtypes),
        progress=Progress.completed if completed else Progress.enqueued,
        # An unnamed group's configuration is shared by all unnamed groups.
        members=members.get(name, ()) if name else (),
        point_to_point=entry.is_p2p or _group(entry) in ambiguous,
        timeout_seconds=entry.timeout_ms / 1000 if entry.timeout_ms > 0 else math.inf,
        thread="" if entry.thread_name.startswith("pt_autograd") else entry.thread_id,
    )


def merge(recorded: Sequence[Collective], noted: Sequence[Collective]) -> tuple[Collective, ...]:
    """One rank's collectives from both sources, in the order in which they were enqueued.

    Joined by group and sequence. The recorder says what was enqueued and whether it completed; the note adds
    line, step, members and whether a thread waits. What only one source holds is kept, in its place.
    """
    noted = _without_past_lives(tuple(noted))
    spoken = {_key(note) for note in noted if note.operation != BACKWARD}
    notes = [note for note in noted if note.operation != BACKWARD or _key(note) not in spoken]
    places = {_key(note): index for index, note in enumerate(notes)}
    known = {_key(record) for record in recorded}
    merged: list[Collective] = []
    taken = 0  # notes before this index are placed
    for record in recorded:
        index = places.get(_key(record))
        if index is None:
            merged.append(record)
            continue
        merged.extend(note for note in notes[taken:index] if _key(note) not in known)
        taken = max(taken, index)
        merged.append(_joined(record, notes[index]))
    merged.extend(note for note in notes[taken:] if _key(note) not in known)
    return tuple(merged)


def _key(collective: Collective) -> tuple[str, int, bool]:
    return collective.group, collective.sequence, collective.point_to_point


def _joined(record: Collective, note: Collective) -> Collective:
    waits = note.progress is Progress.waiting and record.progress is not Progress.completed
    return replace(
        record,
        progress=Progress.waiting if waits else record.progress,
        location=note.location or record.location,
        members=note.members or record.members,
        step=note.step if note.step >= 0 else record.step,
        thread=record.thread or note.thread,
        waiter=note.waiter,
    )


def share_group(rank: int, collective: Collective, other_rank: int, other: Collective) -> bool:
    """Whether two ranks' records are of one process group: names may repeat over groups that share no rank."""
    if collective.group != other.group:
        return False
    if collective.members and other.members:
        return collective.members == other.members and rank in other.members and other_rank in other.members
    known = collective.members or other.members
    return not known or (rank in known and other_rank in known)


def can_meet(one: Collective, other: Collective) -> bool:
    """Whether two ranks' operations at the same place complete one another, as far as is known.

    Counts of elements are compared, not shapes: [2, 3] and [6] meet. Gloo records a reduce_scatter as the
    all_reduce it is made of. NCCL records several operations started together as one without sizes, `coalesced`.
    """
    names = {one.operation, other.operation}
    if len(names) == 1 and BACKWARD in names:
        return True
    if BACKWARD in names:
        return names <= {BACKWARD, "all_reduce", "broadcast", "coalesced"}
    if "coalesced" in names:
        return True
    if len(names) > 1 and names != {"all_reduce", "reduce_scatter"}:
        return False
    if one.dtypes and other.dtypes and set(one.dtypes) != set(other.dtypes):
        return False
    if not names <= EVEN_OPERATIONS or not one.sizes or not other.sizes:
        return True
    return _elements(one) == _elements(other)


def _elements(collective: Collective) -> int:
    return sum(math.prod(size) for size in collective.sizes)
