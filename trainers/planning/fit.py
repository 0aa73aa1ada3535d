"""The peak of a phase over the size of a micro-batch, fitted through traces, and how far another trace is from it.

Called by `prediction.py`, which traces the points. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Point:
    """A traced peak.

    Attributes:
        rows: of the micro-batch.
        length: tokens of a row.
        peak_bytes: what was traced.
    """

    rows: int
    length: int
    peak_bytes: float


@dataclass(frozen=True, kw_only=True)
class Fit:
    """`peak = fixed + token * rows * length + pair * rows * length**2`, in bytes.

    The last term is the attention mask, and the attention matrix where it is stored.

    Attributes:
        residual: the largest distance of a checked point from the fit, over the point's peak.
    """

    fixed_bytes: float
    token_bytes: float
    pair_bytes: float
    residual: float = 0.0

    def at(self, rows: int, length: int) -> float:
        """Return the peak of a size, in bytes."""
        return self.fixed_bytes + rows * length * (self.token_bytes + self.pair_bytes * length)


def fit(base: Point, longer: Point, wider: Point, checked: Sequence[Point]) -> Fit:
    """Return the fit through three points.

    Args:
        base: of the job.
        longer: as many rows, longer ones.
        wider: more rows of the same length.
        checked: other points, for the residual only.
    """
    assert base.rows == longer.rows
    assert base.length < longer.length
    assert base.length == wider.length
    row = (wider.peak_bytes - base.peak_bytes) / (wider.rows - base.rows)
    fixed = base.peak_bytes - row * base.rows
    long_row = (longer.peak_bytes - fixed) / longer.rows
    pair = (long_row / longer.length - row / base.length) / (longer.length - base.length)
    # no token needs less in longer rows, and none needs less than nothing
    pair = max(0.0, min(pair, row / base.length**2))
    found = Fit(fixed_bytes=fixed, token_bytes=row / base.length - pair * base.length, pair_bytes=pair)
    distances = [
        abs(found.at(one.rows, one.length) / one.peak_bytes - 1) for one in checked if one.peak_bytes
    ]
    return replace(found, residual=max(distances, default=0.0))
