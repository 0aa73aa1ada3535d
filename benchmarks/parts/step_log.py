"""Read the step log that `scripts/grpo.py` appends to at the end of each step. One object per rank.

Called by the recovery and overhead benchmarks. Does not wait; the caller polls.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class StepEnd:
    """The end of a step in one rank. `at_seconds` is monotonic time, which is the same for all processes."""

    at_seconds: float
    step: int
    pid: int


def read_starts(base: Path, rank: int) -> dict[int, float]:
    """Return, by process ID, the seconds from the first line of the script's `main` to its `train()` call."""
    try:
        lines = Path(f"{base}.starts.{rank}").read_text().splitlines()
    except FileNotFoundError:
        return {}
    return {int(pid): float(train_at) - float(began_at) for began_at, train_at, pid in map(str.split, lines)}


class StepLog:
    """The step log of one rank.

    Args:
        base: value of the script's `--step-log`.
        rank: the rank that writes the log.
    """

    def __init__(self, base: Path, rank: int) -> None:
        self._path = Path(f"{base}.{rank}")
        self._position = 0
        self.ends: list[StepEnd] = []

    def update(self) -> None:
        """Read new lines. A file that does not exist yet counts as empty."""
        try:
            with open(self._path, "rb") as file:
                file.seek(self._position)
                data = file.read()
        except FileNotFoundError:
            return
        complete = data[: data.rfind(b"\n") + 1]
        self._position += len(complete)
        for line in complete.decode().splitlines():
            at, step, pid = line.split()
            self.ends.append(StepEnd(at_seconds=float(at), step=int(step), pid=int(pid)))

    @property
    def last(self) -> StepEnd | None:
        """The end of the latest step, or None."""
        return self.ends[-1] if self.ends else None

    def mean_seconds(self, skipped: int) -> float:
        """Return the mean time of a step after the first `skipped` ones, which warm up."""
        return (self.ends[-1].at_seconds - self.ends[skipped - 1].at_seconds) / (len(self.ends) - skipped)
