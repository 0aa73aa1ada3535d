"""Checkpoints that the script scheduled and that will never be on its disk: skipped, discarded or refused.

A checkpoint that `save_total_limit` would have deleted by now is not missed, nor is one that the run has
saved since, after it went back. Part of `runtime.history.history`. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

MAX_NAMED = 3
"""Of them in one sentence."""


@dataclass(kw_only=True)
class _Lost:
    path: str
    reason: str
    limit: int | None
    newer: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class LostCheckpoints:
    """The lost checkpoints of one run, by call and step. `apply_*` raise `LookupError` or `ValueError`."""

    _lost: dict[tuple[int, int], _Lost] = field(default_factory=dict)

    def apply_failed(self, record: Mapping[str, Any]) -> None:
        """A checkpoint could not be saved; only one that is `lost` is not tried again."""
        if not record.get("lost"):
            return
        limit = record.get("limit")
        self._lost[int(record["train_call"]), int(record["step"])] = _Lost(
            path=str(record["path"]), reason=str(record["reason"]), limit=int(limit) if limit else None
        )

    def apply_published(self, record: Mapping[str, Any]) -> None:
        """A checkpoint is on disk, or a snapshot of the run."""
        if not record.get("scheduled") or not self._lost:
            return
        call, step = int(record.get("train_call") or 0), int(record["step"])
        self._lost.pop((call, step), None)
        for (lost_call, lost_step), lost in list(self._lost.items()):
            if lost_call == call and lost_step < step:
                lost.newer.add(step)
                if lost.limit is not None and len(lost.newer) >= lost.limit:
                    del self._lost[lost_call, lost_step]

    @property
    def sentence(self) -> str:
        """Which are missing, and why; empty if none is."""
        if not self._lost:
            return ""
        missing = [self._lost[key] for key in sorted(self._lost)]
        names = ", ".join(lost.path for lost in missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        are = "is" if len(missing) == 1 else "are"
        return f"{names}{more}, which the script scheduled, {are} not on disk: {missing[0].reason}"
