"""Quarantined prompts: what the journal says of them, and what is replayed from it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pydantic

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.history import HistoryPart

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


class PromptQuarantined(Event, kw_only=True):
    """Prompts are replaced from the next attempt on. `prompts` are JSON objects of `QuarantinedPrompt`."""

    private_fields: ClassVar[tuple[str, ...]] = ("prompts",)

    prompts: list[dict[str, Any]]


@dataclass(kw_only=True)
class Quarantine(HistoryPart):
    """The quarantined prompts of a run so far. `apply` is the only method that changes them."""

    EVENTS: ClassVar[tuple[type[Event], ...]] = (PromptQuarantined,)

    prompts: list[QuarantinedPrompt] = field(default_factory=list)

    def apply(self, event: PromptQuarantined) -> None:
        """Add the prompts of one event."""
        for one in event.prompts:
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


PART = Quarantine
