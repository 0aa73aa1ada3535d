"""The input of the command of `--on-end`: a JSON object about the run that has ended. Reads one file.

Called by `on_end.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import RunStatus, read_status

SCHEMA = 1
MAX_VERDICT_BYTES = 1 << 20
"""A verdict has a few kilobytes; with the tracebacks of all ranks, some hundred."""
STATUS_FIELDS = (
    "step", "target_steps", "attempts", "goodput", "checkpoint", "snapshot_step", "own_training",
    "own_checkpoint", "recoveries", "warnings",
)  # fmt: skip
"""Fields of `grpo-run status --json` that say how a run has ended."""


def end_record(
    *, run_id: str, directory: Path, state: str, exit_code: int, sentence: str, status: RunStatus | None
) -> dict[str, Any]:
    """Return the object.

    Args:
        run_id, directory: of the run.
        state: `finished`, `stopped` or `failed`.
        exit_code: with which `grpo-run launch` exits.
        sentence: how the run ended.
        status: of the run; None if it could not be read, and then its fields are null.
    """
    fields: dict[str, Any] = dict.fromkeys(STATUS_FIELDS)
    incident: str | None = None
    if status is not None:
        values = status.as_json()
        fields = {name: values[name] for name in STATUS_FIELDS}
        recoveries = status.history.recoveries
        incident = recoveries[-1].incident if recoveries else None
    return {
        "schema": SCHEMA,
        "run_id": run_id,
        "run_directory": str(directory),
        "node": os.uname().nodename,
        "state": state,
        "exit_code": exit_code,
        "sentence": sentence,
        **fields,
        "incident": incident,
        "verdict": read_verdict(Path(incident)) if incident is not None else None,
    }


def read_verdict(incident: Path) -> dict[str, Any] | None:
    """Return the verdict of an incident; None if its file is missing or not valid."""
    try:
        with open(incident / "verdict.json", "rb") as file:
            value = json.loads(file.read(MAX_VERDICT_BYTES))
    except (OSError, ValueError):
        return None
    return value if isinstance(value, dict) else None


def status_or_none(directory: RunDirectory) -> RunStatus | None:
    """Read the status of a run whose launch has failed; None where that fails too."""
    try:
        return read_status(directory)
    except Exception:  # noqa: BLE001 - what is known of the end is told in any case
        return None
