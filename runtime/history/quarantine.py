"""Quarantined prompts: no longer generated from, because generation or rewards failed on them twice at one
step.

The supervisor puts the prompts of the rank that failed into quarantine, where it would otherwise give the run
up, and journals `prompt_quarantined`. `history.py` replays the events, the settings of the next attempt carry
the prompts to the ranks, and `runtime/rank/rollouts/` replaces them. The user can take prompts out again:
they are also in `quarantine.json` of the run directory, which every attempt reads and checks. Each rank
records the prompts of a suspected rollout in a file of its own. Decides nothing.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pydantic

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import write_json

MAX_PREVIEW_CHARACTERS = 200
"""Of a prompt in the file, enough to recognize it."""


class PromptDigest(pydantic.BaseModel):
    """A prompt by the SHA-256 of its content, with the first characters of its text for people."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    sha256: str = pydantic.Field(pattern=r"^[0-9a-f]{64}$")
    preview: str = pydantic.Field(default="", max_length=MAX_PREVIEW_CHARACTERS)


class QuarantinedPrompt(PromptDigest):
    """A prompt that is replaced from one rollout on.

    Attributes:
        train_call: number of the call in the run.
        from_step: the optimizer step for which the rollout is generated; earlier steps that are done again
            keep it.
    """

    train_call: int = pydantic.Field(ge=0)
    from_step: int = pydantic.Field(ge=1)


class RolloutPosition(pydantic.BaseModel):
    """The rollout of one step of one call, whose prompts the ranks record before they generate."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    train_call: int
    step: int


@dataclass(kw_only=True)
class Quarantine:
    """The quarantined prompts of a run so far. `apply` is the only method that changes them."""

    prompts: list[QuarantinedPrompt] = field(default_factory=list)

    def apply(self, record: dict[str, Any]) -> None:
        """Add the prompts of one event."""
        for one in record["prompts"]:
            prompt = QuarantinedPrompt.model_validate(one)
            if prompt not in self.prompts:
                self.prompts.append(prompt)

    def holds(self, position: RolloutPosition) -> bool:
        """Whether prompts were put into quarantine at a position."""
        return any(
            (one.train_call, one.from_step) == (position.train_call, position.step) for one in self.prompts
        )


def quarantined(prompts: Sequence[PromptDigest], position: RolloutPosition) -> list[QuarantinedPrompt]:
    """Return the quarantine of the prompts of a rollout, each prompt once."""
    return [
        QuarantinedPrompt(
            sha256=one.sha256, preview=one.preview, train_call=position.train_call, from_step=position.step
        )
        for one in dict.fromkeys(prompts)
    ]


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
