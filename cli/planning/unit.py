"""The unit in which the figures of one prediction are printed. Used by `output.py` and `explained.py`."""

from __future__ import annotations

from dataclasses import dataclass

_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A unit.

    Attributes:
        name: as it is printed.
        size: in bytes.
        digits: after the point.
    """

    name: str
    size: int
    digits: int

    @property
    def visible_bytes(self) -> float:
        """The smallest size that is not printed as 0."""
        return float(self.size * 10**-self.digits / 2)

    def text(self, size: float) -> str:
        """Return a size without the unit."""
        return f"{size / self.size:.{self.digits if abs(size) < 100 * _GIB else 0}f}"

    def range(self, low: float, high: float) -> str:
        """Return a range, or one figure if its ends are equal."""
        return self.text(low) if low == high else f"{self.text(low)}-{self.text(high)}"

    def said(self, size: float) -> str:
        """Return a size with the unit."""
        return f"{self.text(size)} {self.name}"


GIB = Unit(name="GiB", size=_GIB, digits=2)
MIB = Unit(name="MiB", size=1 << 20, digits=1)


def unit_of(allocated_bytes: float) -> Unit:
    """Return the unit for a job whose tensors need this much: a small one would be all zeros in GiB."""
    return GIB if allocated_bytes >= _GIB else MIB
