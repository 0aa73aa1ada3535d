"""When a collective can complete: which members it needs, and whether two ranks' operations fit together.

Used by `positions.py`, `proof.py`, `culprit.py` and `sentences.py`. Says only what holds for Gloo and NCCL
alike, and for every algorithm that they may choose: whatever may complete counts as able to. What torch records of
each call is tested in `tests/integration/test_collective_records.py`.
"""

from __future__ import annotations

import math

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective

NEEDS_EVERY_MEMBER = frozenset({"all_reduce", "all_gather", "reduce_scatter", "barrier", BACKWARD})
"""Operations that no member can complete before every member has enqueued them. A broadcast completes on the
ranks that have received it, and `gather`, `scatter` and `all_to_all` may move nothing between two ranks."""
COMPARED_SIZES = frozenset({"all_reduce", "all_gather", "reduce", "reduce_scatter", "barrier"})
"""Operations that fail or never complete if members' inputs differ in bytes. A broadcast into a larger tensor
completes."""

_ITEM_BYTES = {
    "Double": 8, "Float": 4, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1, "Byte": 1,
    "Bool": 1, "ComplexFloat": 8, "ComplexDouble": 16, "Float8_e4m3fn": 1, "Float8_e5m2": 1,
}  # fmt: skip


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
