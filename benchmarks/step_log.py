"""Reads what `scripts/grpo.py` writes at the end of each step, as it grows. One object a rank.

Called by the recovery and overhead benchmarks. Does not wait: the caller polls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """A rank has ended a step; `at_seconds` is monotonic time of this machine, the same for all processes."""

    at_seconds: float
    step: int
    pid: int


class StepLog:
    """The file of one rank.

    Args:
        base: the script's `--step-log`.
        rank: of the writer.
    """

    def __init__(self, base: Path, rank: int) -> None:
        self._path = Path(f"{base}.{rank}")
        self._position = 0
        self.ends: list[StepEnd] = []

    def update(self) -> None:
        """Read what has been written since; a file that is not there yet is empty."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in whole.decode().splitlines():
            at, step, pid = line.split()
            self.ends.append(StepEnd(at_seconds=float(at), step=int(step), pid=int(pid)))

    @property
    def last(self) -> StepEnd | None:
        """The latest step."""
        return self.ends[-1] if self.ends else None
