"""A collective operation of one rank, which members it needs, and whether two operations match.

One type covers Gloo's and NCCL's records and the collective log. A record comes from torch's Flight
Recorder (every collective, also those issued by C++, without a source line) or from the collective log on
the board (those issued from Python, with the source line and whether a thread is blocked). Both are
identified by process group and sequence number. The matching rules state only what holds for Gloo and NCCL
alike and for every algorithm that they may choose: whatever may complete counts as able to. What torch
records of each call is tested in `tests/integration/test_collective_records.py`. Pure.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import IntEnum

from grpo_run.watchdog.verdict import Location

DEFAULT_GROUP = "0"
"""Torch's name for the group of all ranks."""
BACKWARD = "backward"
"""Entry of the collective log: from this sequence number on, DDP will all-reduce gradients."""
CONSENSUS_GROUP = "grpo_run/consensus"
"""Name of the group of the calls of `grpo_run.trainers.consensus`; a call's sequence number is its count."""


class CollectiveProgress(IntEnum):
    """How far one rank is with one collective."""

    enqueued = 1
    waiting = 2  # enqueued, and a thread of the rank is blocked until it completes
    completed = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """One collective operation on one rank.

    `group` is the name of the process group, the same on all its ranks. `sequence` counts the group's
    collectives from 1. `operation` is torch's name without the backend: `all_reduce`, `all_gather`. `sizes`
    and `dtypes` describe the inputs; empty if unknown. `members` are the group's global ranks; empty if
    unknown. `root` is the global rank that a broadcast comes from or a reduction goes to; -1 if unknown.
    `step` is the current optimizer step; -1 if unknown. `point_to_point` marks sends, receives and whatever
    else has sequence numbers that ranks do not share. `thread` is the thread that issued the collective, and
    the one that is blocked in it while `progress` is `waiting`; empty if unknown, and for autograd's threads,
    which work for any other thread. `timeout_seconds` is after what time the operation itself fails; 0 if the
    script gave it a limit of its own. `on_device` marks collectives that the host does not wait for,
    `in_memory` those of grpo-run that travel through the board, which torch does not know: its records lack
    them. `in_backward` marks those that C++ issued during a DDP backward pass that has not ended. `count` is
    how many collectives a log entry stands for; a backward that has ended may have issued none.
    """

    group: str
    sequence: int
    operation: str
    sizes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    progress: CollectiveProgress
    location: Location | None = None
    members: tuple[int, ...] = ()
    root: int = -1
    step: int = -1
    point_to_point: bool = False
    thread: str = ""
    timeout_seconds: float = math.inf
    on_device: bool = False
    in_memory: bool = False
    in_backward: bool = False
    count: int = 1

    @property
    def completed(self) -> bool:
        """Whether the operation has completed on this rank."""
        return self.progress is CollectiveProgress.completed


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
    "float64": ("Double", 8), "float32": ("Float", 4), "float16": ("Half", 2), "bfloat16": ("BFloat16", 2),
    "int64": ("Long", 8), "int32": ("Int", 4), "int16": ("Short", 2), "int8": ("Char", 1),
    "uint8": ("Byte", 1), "bool": ("Bool", 1), "complex64": ("ComplexFloat", 8),
    "complex128": ("ComplexDouble", 16), "float8_e4m3fn": ("Float8_e4m3fn", 1),
    "float8_e5m2": ("Float8_e5m2", 1),
}  # fmt: skip
"""The recorder's name of each of Python's dtypes, and the bytes of an element."""
_RECORDER_DTYPES = {python: recorder for python, (recorder, _) in _DTYPES.items()}
_PYTHON_DTYPES = {recorder: python for python, recorder in _RECORDER_DTYPES.items()}


def operation_name(raw: str) -> str:
    """Return one name per operation, for a recorder's name or a method of a process group.

    For example `all_gather` for `nccl:_all_gather_base` and for `_allgather_base`.
    A coalesced or flat-tensor variant gets the name of its base operation. An unknown name is returned
    unchanged.
    """
    words = raw.rsplit(":", 1)[-1].split()
    name = words[0].lower().lstrip("_") if words else ""
    name = _VARIANT.sub("", name)
    return _NAMES.get(name, name)


def dtype_name(raw: str) -> str:
    """Return the recorder's name (`Float`) of a dtype (`torch.float32`); other names are unchanged."""
    return _RECORDER_DTYPES.get(raw.removeprefix("torch."), raw)


def python_dtype_name(name: str) -> str:
    """Return Python's name (`float32`) for the recorder's name of a dtype; other names are unchanged."""
    return _PYTHON_DTYPES.get(name, name)


def share_group(rank: int, collective: Collective, other_rank: int, other: Collective) -> bool:
    """Whether two ranks' records belong to one process group.

    Groups without a common rank may share a name.
    """
    if collective.group != other.group:
        return False
    if collective.members and other.members:
        return collective.members == other.members and rank in other.members and other_rank in other.members
    known = collective.members or other.members
    return not known or (rank in known and other_rank in known)


NEEDS_EVERY_MEMBER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier", BACKWARD})
"""Operations that no member can complete before every member has enqueued them. A broadcast completes on the
ranks that have received it, and `gather`, `scatter` and `all_to_all` may move nothing between two ranks."""
COMPARED_SIZES = frozenset({"all_reduce", "all_gather", "reduce", "reduce_scatter", "barrier"})
"""Operations that fail or never complete if members' inputs differ in bytes. A broadcast into a larger tensor
completes."""

_ITEM_BYTES = dict(_DTYPES.values())


def needed_members(rank: int, collective: Collective) -> tuple[int, ...] | None:
    """Return the other ranks without which `rank` cannot complete its operation; None for all of a group
    whose members are unknown.
    """
    if collective.sizes and collective.operation != "barrier" and element_count(collective) == 0:
        return ()  # Gloo completes it without communication
    if collective.operation in NEEDS_EVERY_MEMBER or (
        collective.operation == "reduce" and collective.root == rank
    ):
        if not collective.members:
            return None
        return tuple(member for member in collective.members if member != rank)
    if collective.operation == "broadcast" and collective.root not in (-1, rank):
        return (collective.root,)
    return ()


def can_meet(one: Collective, other: Collective) -> bool:
    """Whether two ranks' operations with the same sequence number can complete one another, as far as known.

    Compares bytes, not shapes and types: [2, 3] and [6] can meet, and so can int8 and uint8, although the
    result is of no use. Gloo records a reduce_scatter as the all_reduces that implement it. NCCL records
    several operations started together as one operation without sizes, `coalesced`.
    """
    names = {one.operation, other.operation}
    if BACKWARD in names:
        return names <= {BACKWARD, "all_reduce", "broadcast", "coalesced"}
    if "coalesced" in names:
        return True
    if len(names) > 1:
        return names == {"all_reduce", "reduce_scatter"}
    if not names <= COMPARED_SIZES:
        return True
    sizes = size_bytes(one), size_bytes(other)
    return None in sizes or sizes[0] == sizes[1]


def element_count(collective: Collective) -> int:
    """Return the number of elements of all inputs together."""
    return sum(math.prod(size) for size in collective.sizes)


def size_bytes(collective: Collective) -> int | None:
    """Return the size of all inputs together in bytes; None if it is not known."""
    if not collective.sizes or not collective.dtypes or not _ITEM_BYTES.keys() >= set(collective.dtypes):
        return None
    if len(set(collective.dtypes)) == 1:
        return element_count(collective) * _ITEM_BYTES[collective.dtypes[0]]
    if len(collective.dtypes) != len(collective.sizes):
        return None
    return sum(
        math.prod(size) * _ITEM_BYTES[dtype]
        for size, dtype in zip(collective.sizes, collective.dtypes, strict=True)
    )
