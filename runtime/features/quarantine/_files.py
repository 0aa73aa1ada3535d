"""Files of quarantined prompts: `quarantine.json` of the run directory, and the prompts that a rank has
recorded.

Called by `supervisor.py`, which writes the first and reads both, and by `rank.py`, which writes the second.
The first is the user's to edit: it is checked whenever it is read.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pydantic

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.features.quarantine.events import PromptDigest, QuarantinedPrompt, RolloutPosition
from grpo_run.runtime.files import write_json

FILE = "quarantine.json"
"""In the run directory."""
MAX_FILE_BYTES = 16 << 20
"""Tens of thousands of prompts."""
_QUARANTINE = pydantic.TypeAdapter(list[QuarantinedPrompt])


class RecordedRollout(pydantic.BaseModel):
    """The prompts of one rank's rollout, in the order of its rows."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    position: RolloutPosition
    prompts: tuple[PromptDigest, ...]


def write_quarantine(path: Path, prompts: Sequence[QuarantinedPrompt]) -> None:
    """Write `quarantine.json` atomically.

    Raises:
        OSError: it cannot be written.
    """
    write_json(path, [one.model_dump() for one in prompts])


def read_quarantine(path: Path) -> list[QuarantinedPrompt] | None:
    """Return the prompts in `quarantine.json`; None if there is no file.

    Raises:
        RunDirectoryError: it cannot be read, or an entry is not valid.
    """
    try:
        with open(path, "rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error.strerror}") from error
    try:
        if len(text) > MAX_FILE_BYTES:
            raise ValueError(f"it is longer than {MAX_FILE_BYTES >> 20} MiB")
        return _QUARANTINE.validate_json(text)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "the file"
        raise RunDirectoryError(
            f"{path}: {where}: {first['msg']}; correct it, or delete the file to have no prompt replaced"
        ) from None
    except ValueError as error:
        raise RunDirectoryError(f"{path}: {error}") from None


def write_rollout(path: Path, rollout: RecordedRollout) -> None:
    """Write the prompts of a rank's rollout.

    Raises:
        OSError: they cannot be written.
    """
    write_json(path, rollout.model_dump(), indent=None, durable=False)


def read_rollout(path: Path, position: RolloutPosition) -> tuple[PromptDigest, ...]:
    """Return the prompts that a rank has recorded at a position; empty if there are none."""
    try:
        with open(path, "rb") as file:
            rollout = RecordedRollout.model_validate(json.loads(file.read(MAX_FILE_BYTES)))
    except (OSError, ValueError):
        return ()  # not written, or by a rank that was killed meanwhile: nothing is known then
    return rollout.prompts if rollout.position == position else ()
