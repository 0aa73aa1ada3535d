"""The files of the forecast: for each rank, `memory_forecast/rank-N.json` in the run directory.

A rank writes its file after each rollout, and reads it in the next attempt: what passes have needed, and how the micro-batches of
the last rollouts were split. Does not predict (`trainers.forecast`).
"""

from __future__ import annotations

import json
from pathlib import Path

import pydantic

from grpo_run.runtime.files import write_json

FOLDER = "memory_forecast"
"""Name of the folder in the run directory."""
MAX_BYTES = 1 << 18
"""Far above the size of any such file. A larger one is not read."""
MOST_ROLLOUTS = 64
"""Rollouts that are kept; a recovery repeats a few."""


class SplitRollout(pydantic.BaseModel):
    """How the micro-batches of one rollout were split."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    rollout: int
    """The number of the micro-step for which it was generated."""
    rows: int
    """Of a micro-batch."""
    length: int
    """To which the rows of this rank are padded."""
    pieces: int = pydantic.Field(ge=1)


class ForecastRecord(pydantic.BaseModel):
    """What one rank keeps of its forecasts."""

    model_config = pydantic.ConfigDict(frozen=True, extra="ignore")
    train_call: int
    world_size: int
    plan: str
    """The memory plan in effect, without the size of micro-batches: with another one, passes need something else."""
    passes: tuple[tuple[int, int, int], ...] = ()
    """Of forward and backward passes: rows, length, and the peak above what is allocated between passes, without gradients."""
    scoring: tuple[tuple[int, int, int], ...] = ()
    """Likewise of passes that score a rollout."""
    rollouts: tuple[SplitRollout, ...] = ()
    """The last ones, oldest first."""


def write_forecast(run_directory: Path, rank: int, record: ForecastRecord) -> None:
    """Write the file of a rank, atomically and with mode 0600.

    Raises:
        OSError: the file cannot be written.
    """
    folder = run_directory / FOLDER
    folder.mkdir(mode=0o700, exist_ok=True)
    write_json(folder / f"rank-{rank}.json", record.model_dump(mode="json"), indent=None, durable=False)


def read_forecast(run_directory: Path, rank: int) -> ForecastRecord | None:
    """Return what a rank has kept; None if there is nothing, or it cannot be read."""
    path = run_directory / FOLDER / f"rank-{rank}.json"
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        return ForecastRecord.model_validate(json.loads(path.read_bytes()))
    except (OSError, ValueError, RecursionError):  # pydantic's error is a ValueError
        return None
