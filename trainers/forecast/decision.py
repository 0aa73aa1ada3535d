"""Into how many pieces the micro-batches of a rollout are split: from one rank's prediction, then from those of all ranks. Pure.

Ranks must split alike, because TRL reduces metrics over all ranks for every pass. The rank that needs the smallest passes decides.
A rollout that is generated again after a fault is split as it was the first time, so that its sums are rounded alike. Used by `rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

MARGIN = 0.05
"""Added to what passes need that are larger than any that was measured: a fit is not exact, and the allocator wastes some."""


class Needed(NamedTuple):
    """What one pass needs above what is allocated between passes, and whether so large a pass has been measured."""

    peak_bytes: int
    is_known: bool


class Need(NamedTuple):
    """What one rank contributes to the decision; all are numbers, because ranks exchange them."""

    pieces: int
    """Into how many pieces the rank must split its micro-batches; 1 for none."""
    repeated: int
    """Into how many the same rollout was split before a fault; 0 if that is not known."""
    whole_bytes: int
    """The predicted peak of whole micro-batches; 0 if nothing was measured."""
    split_bytes: int
    """The predicted peak of the pieces."""
    limit_bytes: int
    """What the rank may use; 0 if that is not known."""


class Agreement(NamedTuple):
    """What all ranks do, and the rank that decided."""

    pieces: int
    rank: int
    need: Need


def choices(rows: int) -> list[int]:
    """Return into how many pieces so many rows may be split: powers of two, and at most single rows."""
    found = [1]
    while 2 * found[-1] < rows:
        found.append(2 * found[-1])
    return [*found, rows] if rows > 1 else found


def rows_of_pieces(rows: int, pieces: int) -> list[int]:
    """Return the rows of each piece, the larger ones first; no piece is empty."""
    pieces = max(1, min(pieces, rows))
    whole, rest = divmod(rows, pieces)
    return [whole + 1] * rest + [whole] * (pieces - rest)


def decide(
    rows: int,
    *,
    needed: Callable[[int, bool], Needed | None],
    base_bytes: int,
    limit_bytes: int,
    repeated: int,
) -> Need:
    """Return what one rank needs.

    Args:
        rows: of a whole micro-batch.
        needed: what passes of so many rows need, and with the gradients of earlier ones if the second argument is true; None
            if nothing was measured.
        base_bytes: allocated between passes.
        limit_bytes: what the rank may use; 0 if that is not known.
        repeated: into how many pieces the same rollout was split before a fault; 0 if that is not known.
    """
    whole = 0
    for pieces in choices(rows):
        pass_ = needed(rows_of_pieces(rows, pieces)[0], pieces > 1)
        if pass_ is None:
            return Need(1, repeated, 0, 0, limit_bytes)
        peak = base_bytes + pass_.peak_bytes
        whole = whole or peak
        margin = 0 if pass_.is_known else int(MARGIN * pass_.peak_bytes)
        if not limit_bytes or peak + margin <= limit_bytes:
            break
    return Need(pieces, repeated, whole, peak, limit_bytes)


def agree(needs: Sequence[Need]) -> Agreement:
    """Return what all ranks do, from what each needs, in the order of the ranks. Equal on every rank."""
    rank = max(
        range(len(needs)),
        key=lambda one: (needs[one].pieces, needs[one].whole_bytes - needs[one].limit_bytes),
    )
    pieces = needs[rank].pieces
    if all(need.repeated for need in needs):
        pieces = max(need.repeated for need in needs)
    return Agreement(pieces, rank, needs[rank])
