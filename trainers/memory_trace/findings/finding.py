"""A finding of a memory trace: what is kept, since when, where it was made, and who holds it. Plain data.

Made by `making.py`, said by `sentences.py`, written to the journal as fields.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

KINDS = ("growth", "graph", "cycle", "traceback", "padding", "dropped_graph", "growing_tensor", "filling")


@dataclass(frozen=True, kw_only=True)
class Place:
    """A line of a file, and the function there."""

    file: str
    line: int | None
    function: str | None = None


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What was found.

    Attributes:
        kind: one of `KINDS`.
        tensors: how many are alive.
        bytes: what their storages take.
        shape: of the newest, with its `dtype`.
        since_step: the step in which the oldest was made.
        steps: in how many steps it grew, or was seen.
        made_at: the line of the script; None if it was not recorded.
        made_in: the line of a library below it.
        holder: in words, `list 'history' of Collector`; None if nothing that has a name holds it.
        held_at: where the holder is assigned, or the exception was raised.
        details: further figures of the kind.
    """

    kind: str
    tensors: int
    bytes: int
    shape: tuple[int, ...]
    dtype: str
    since_step: int
    steps: int
    made_at: Place | None = None
    made_in: Place | None = None
    holder: str | None = None
    held_at: Place | None = None
    details: dict[str, Any]

    @property
    def key(self) -> str:
        """Equal for the same finding of another rank or attempt: kind, holder, and the line where that is or what it holds is made."""
        place = self.held_at or self.made_at
        where = [place.file, str(place.line)] if place is not None else list(map(str, self.shape[1:]))
        return "|".join([self.kind, self.holder or "", *where])

    def as_json(self) -> dict[str, Any]:
        """Return the fields as JSON values."""
        return asdict(self)
