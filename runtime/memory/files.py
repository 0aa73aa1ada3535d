"""Files about memory in the run directory: facts of a call, and forecasts.

    memory_facts.json              facts of a `train()` call, written by ranks, read by the supervisor
    memory_forecast/rank-N.jsonl   what rank N's passes needed, and how it split each rollout

A rank reads its forecast file in the next attempt; the first line says what the others hold for. Appending
does not wait for a disk, as replacing the file would; a line that was cut when the rank died is left out.
Predicts and decides nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import pydantic

from grpo_run.runtime.files import replace_file, write_json
from grpo_run.runtime.memory.facts import MemoryFacts

FILE_NAME = "memory_facts.json"
"""Name of the file in the run directory."""


def write_facts(run_directory: Path, facts: MemoryFacts) -> None:
    """Write the facts, atomically and with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    write_json(run_directory / FILE_NAME, facts.model_dump(mode="json"), durable=False)


def read_facts(run_directory: Path) -> MemoryFacts | None:
    """Return the facts of the last `train()` call that began; None if there are none, or they cannot be
    read.
    """
    try:
        return MemoryFacts.model_validate_json((run_directory / FILE_NAME).read_bytes())
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None


FORECAST_FOLDER = "memory_forecast"
"""Name of the folder in the run directory."""
MAX_FORECAST_BYTES = 1 << 18
"""A file that has grown to this size is written anew, with what still counts: after some thousand
rollouts.
"""
MOST_ROLLOUTS = 64
"""Rollouts that are kept; a recovery repeats a few."""
MOST_SIZES = 24
"""Sizes of passes that are kept of each kind, as many as a fit keeps."""

Entry = tuple[int, int, int]
"""Rows, padded length, and the peak in bytes."""


class SplitRollout(pydantic.BaseModel):
    """How the micro-batches of one rollout were split."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    rollout: int
    """The number of the micro-step for which it was generated."""
    rows: int
    """Of a micro-batch."""
    length: int
    """To which the rows of this rank are padded."""
    pieces: int = pydantic.Field(ge=1)


class ForecastLine(pydantic.BaseModel):
    """What one line of the file adds."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")
    passes: tuple[Entry, ...] = ()
    """Of forward and backward passes: the peaks above what is allocated between passes, without gradients."""
    scoring: tuple[Entry, ...] = ()
    """Likewise of passes that score a rollout."""
    rollouts: tuple[SplitRollout, ...] = ()
    """The last ones, oldest first."""


class ForecastRecord(ForecastLine):
    """What one rank keeps of its forecasts; the first line of the file."""

    train_call: int
    world_size: int
    plan: str
    """The memory plan in effect, without the size of micro-batches: with another one, passes need something
    else.
    """


class ForecastFile:
    """The file of one rank, as it writes it.

    Args:
        run_directory: of the run.
        rank: whose file it is.
    """

    def __init__(self, run_directory: Path, rank: int) -> None:
        self._path = _path(run_directory, rank)

    def append(
        self,
        *,
        passes: Iterable[Entry] = (),
        scoring: Iterable[Entry] = (),
        rollouts: Iterable[SplitRollout] = (),
    ) -> bool:
        """Add a line, and return whether the file is so long by now that it is to be begun anew.

        Raises:
            OSError: it cannot be written.
        """
        line = ForecastLine(passes=tuple(passes), scoring=tuple(scoring), rollouts=tuple(rollouts))
        text = line.model_dump_json(exclude_defaults=True).encode() + b"\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        try:
            os.write(descriptor, text)
            return os.fstat(descriptor).st_size > MAX_FORECAST_BYTES
        finally:
            os.close(descriptor)

    def begin(self, record: ForecastRecord) -> None:
        """Replace the file by one that holds a record only.

        Raises:
            OSError: it cannot be written.
        """
        self._path.parent.mkdir(mode=0o700, exist_ok=True)
        replace_file(self._path, record.model_dump_json().encode() + b"\n")


def read_forecast(run_directory: Path, rank: int) -> ForecastRecord | None:
    """Return what a rank has kept; None if there is nothing, or it cannot be read."""
    try:
        first, *lines = _path(run_directory, rank).read_bytes().splitlines()
        record = ForecastRecord.model_validate_json(first)
        parts: list[ForecastLine] = [record]
        for line in lines:
            try:
                parts.append(ForecastLine.model_validate_json(line))
            except ValueError:
                continue  # cut
    except (OSError, ValueError):  # pydantic's error is a ValueError
        return None
    rollouts = {one.rollout: one for part in parts for one in part.rollouts}
    return record.model_copy(
        update={
            "passes": _highest(entry for part in parts for entry in part.passes),
            "scoring": _highest(entry for part in parts for entry in part.scoring),
            "rollouts": tuple(rollouts[number] for number in sorted(rollouts)[-MOST_ROLLOUTS:]),
        }
    )


def _path(run_directory: Path, rank: int) -> Path:
    return run_directory / FORECAST_FOLDER / f"rank-{rank}.jsonl"


def _highest(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """The highest peak of each size; of too many, those of the largest passes."""
    peaks: dict[tuple[int, int], int] = {}
    for rows, length, peak in entries:
        if rows > 0 and length > 0:
            peaks[rows, length] = max(peak, peaks.get((rows, length), 0))
    largest = sorted(peaks, key=lambda size: size[0] * size[1])[-MOST_SIZES:]
    return tuple((rows, length, peaks[rows, length]) for rows, length in largest)
