"""Parser for the JSON of torch's Flight Recorder (handler `fr_trace_json`, format 2.10).

Called by `runtime.detection.collective_records` with what a rank's worker server answered. Reads the text it
is given and does no I/O. Does not judge.
"""

from __future__ import annotations

import json
import math

from pydantic import BaseModel, Field, ValidationError

from grpo_run.watchdog.deadlocks.collectives import (
    Collective,
    CollectiveProgress,
    dtype_name,
    operation_name,
)
from grpo_run.watchdog.deadlocks.history import exclude_reused_groups

HOST_BACKENDS = ("gloo", "mpi")
"""Backends whose collectives run on the host, so that a thread that waits for one is blocked."""
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
