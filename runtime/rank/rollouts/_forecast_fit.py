"""Predict the memory of passes from earlier ones, and into how many pieces to split micro-batches.

The memory of a pass grows with its tokens (rows times padded length) and, where attention matrices are
stored, with tokens times length. Measured values of one kind of pass are fitted by non-negative
coefficients for a constant and both terms; the fit is raised until no measured value lies above it.

Ranks must split alike, because TRL reduces metrics over all ranks for every pass, so the rank that needs
the smallest passes decides. A rollout that is generated again after a fault is split as the first time, so
that its sums are rounded alike. Used by `forecast.py`. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

MOST_SIZES = 24
"""Measured sizes that are kept; the smallest leaves first, because predictions are about larger ones."""
CLOSE = 0.98
"""A peak that is lower than predicted, but not below this share of it, changes no fit."""
LEAST_SPREAD = 1.1
"""Measured sizes that are closer to each other than this factor say nothing of a slope: it would be that of
the noise.
"""
_SINGULAR = 1e-12

Size = tuple[int, int]
"""Rows, and their padded length."""


class PeakFit:
    """The peaks of one kind of pass.

    Args:
        earlier: peaks above what is allocated between passes, in bytes, by size, as an earlier attempt has
            measured them. They count until this attempt has measured sizes that are far enough from each
            other.
    """

    def __init__(self, earlier: Mapping[Size, int] | None = None) -> None:
        self._earlier = dict(earlier or {})
        self._own: dict[Size, int] = {}
        self._coefficients: tuple[float, float, float] | None = None

    @property
    def measured(self) -> Mapping[Size, int]:
        """The highest peak of each size that counts."""
        return {**self._earlier, **self._own}

    @property
    def most_tokens(self) -> int:
        """Tokens of the largest pass that was measured; 0 if none was."""
        return max(_tokens(self.measured), default=0)

    def add(self, size: Size, peak_bytes: int) -> bool:
        """Take a measured peak, and return whether it says anything new."""
        if peak_bytes <= self._own.get(size, -1):
            return False
        predicted = self.predict(size) if not self._earlier and _are_spread(self._own) else None
        if predicted is not None and CLOSE * predicted <= peak_bytes <= predicted:
            if size[0] * size[1] <= self.most_tokens:
                return False
        else:
            self._coefficients = None
        self._own[size] = peak_bytes
        if len(self._own) > MOST_SIZES:
            del self._own[min(self._own, key=lambda one: one[0] * one[1])]
        if self._earlier and _are_spread(self._own):
            self._earlier.clear()
            self._coefficients = None
        return True

    def predict(self, size: Size) -> int | None:
        """Return the peak of a pass in bytes; None if nothing was measured."""
        if self._coefficients is None:
            measured = self.measured
            if not measured:
                return None
            self._coefficients = _fitted(measured)
        return int(_value(self._coefficients, _terms(size)))


def _fitted(measured: Mapping[Size, int]) -> tuple[float, float, float]:
    points = [(_terms(size), float(peak)) for size, peak in measured.items()]
    if not _are_spread(measured):
        return 0.0, max(peak / terms[1] for terms, peak in points), 0.0
    best = _smallest_error(points)
    above = max(peak - _value(best, terms) for terms, peak in points)
    return best[0] + max(0.0, above), best[1], best[2]


def _tokens(sizes: Iterable[Size]) -> list[int]:
    return [rows * length for rows, length in sizes]


def _are_spread(sizes: Iterable[Size]) -> bool:
    """Whether sizes are different enough to tell a slope."""
    tokens = _tokens(sizes)
    return bool(tokens) and max(tokens) >= LEAST_SPREAD * min(tokens)


def _terms(size: Size) -> tuple[float, float, float]:
    rows, length = size
    return 1.0, float(rows * length), float(rows * length * length)


def _value(coefficients: Sequence[float], terms: Sequence[float]) -> float:
    return sum(factor * term for factor, term in zip(coefficients, terms, strict=True))


def _smallest_error(points: Sequence[tuple[Sequence[float], float]]) -> tuple[float, float, float]:
    """Return the non-negative coefficients with the smallest sum of squares: the best of all sets that may be
    positive.

    A constant alone is none of them: passes that grow need more memory.
    """
    scale = [max(terms[index] for terms, _ in points) for index in range(3)]
    scaled = [
        ([term / unit for term, unit in zip(terms, scale, strict=True)], peak) for terms, peak in points
    ]
    best, least = (0.0, max(peak / terms[1] for terms, peak in scaled), 0.0), float("inf")
    # the simpler one of two that fit alike
    for chosen in ((1,), (0, 1), (2,), (0, 2), (1, 2), (0, 1, 2)):
        solved = _solve(scaled, chosen)
        if solved is None or min(solved) < 0.0:
            continue
        found = [0.0, 0.0, 0.0]
        for index, value in zip(chosen, solved, strict=True):
            found[index] = value
        error = sum((_value(found, terms) - peak) ** 2 for terms, peak in scaled)
        if error < least * (1.0 - 1e-6):
            best, least = (found[0], found[1], found[2]), error
    return best[0] / scale[0], best[1] / scale[1], best[2] / scale[2]


def _solve(points: Iterable[tuple[Sequence[float], float]], chosen: Sequence[int]) -> list[float] | None:
    """Solve the normal equations for the chosen terms by elimination; None if they have no single
    solution.
    """
    points = list(points)
    rows = [
        [sum(terms[left] * terms[right] for terms, _ in points) for right in chosen]
        + [sum(terms[left] * peak for terms, peak in points)]
        for left in chosen
    ]
    for index in range(len(rows)):
        pivot = max(range(index, len(rows)), key=lambda row: abs(rows[row][index]))
        if abs(rows[pivot][index]) < _SINGULAR * len(points):
            return None
        rows[index], rows[pivot] = rows[pivot], rows[index]
        for other in range(len(rows)):
            if other != index:
                factor = rows[other][index] / rows[index][index]
                rows[other] = [
                    value - factor * one for value, one in zip(rows[other], rows[index], strict=True)
                ]
    return [row[-1] / row[index] for index, row in enumerate(rows)]


MARGIN = 0.05
"""Added to what passes need that are larger than any that was measured: a fit is not exact, and the allocator
wastes some.
"""


class Needed(NamedTuple):
    """What one pass needs above what is allocated between passes, and whether so large a pass has been
    measured.
    """

    peak_bytes: int
    is_known: bool


class ForecastNeed(NamedTuple):
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
    need: ForecastNeed


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
) -> ForecastNeed:
    """Return what one rank needs.

    Args:
        rows: of a whole micro-batch.
        needed: what passes of so many rows need, and with the gradients of earlier ones if the second
            argument is true; None if nothing was measured.
        base_bytes: allocated between passes.
        limit_bytes: what the rank may use; 0 if that is not known.
        repeated: into how many pieces the same rollout was split before a fault; 0 if that is not known.
    """
    whole = 0
    for pieces in choices(rows):
        pass_ = needed(rows_of_pieces(rows, pieces)[0], pieces > 1)
        if pass_ is None:
            return ForecastNeed(1, repeated, 0, 0, limit_bytes)
        peak = base_bytes + pass_.peak_bytes
        whole = whole or peak
        margin = 0 if pass_.is_known else int(MARGIN * pass_.peak_bytes)
        if not limit_bytes or peak + margin <= limit_bytes:
            break
    return ForecastNeed(pieces, repeated, whole, peak, limit_bytes)


def agree(needs: Sequence[ForecastNeed]) -> Agreement:
    """Return what all ranks do, from what each needs, in the order of the ranks. Equal on every rank."""
    rank = max(
        range(len(needs)),
        key=lambda one: (needs[one].pieces, needs[one].whole_bytes - needs[one].limit_bytes),
    )
    pieces = needs[rank].pieces
    if all(need.repeated for need in needs):
        pieces = max(need.repeated for need in needs)
    return Agreement(pieces, rank, needs[rank])
