"""Quarantine in a rank: replaces quarantined prompts in the rollouts of a GRPO or RLOO trainer.

The sampler's order is not touched: a quarantined prompt keeps its place, and its rows are replaced before
generation. Every rank replaces the prompts of the same list, so the rows of a group leave together, and are
left out of baseline and loss. `replaced_rows` chooses the rows, and is pure.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from grpo_run.runtime.features.quarantine._files import RecordedRollout, write_rollout
from grpo_run.runtime.features.quarantine.events import MAX_PREVIEW_CHARACTERS, PromptDigest, RolloutPosition
from grpo_run.runtime.features.quarantine.settings import NAME, RankQuarantine
from grpo_run.runtime.features.quarantine.shown import REASON
from grpo_run.runtime.rank.points import RankFeature, RolloutPoints
from grpo_run.runtime.rank.session import Session

Row = Mapping[str, Any]
PROMPT = "prompt"
"""Column of TRL's data sets that holds the prompt: text, or a list of messages."""


def prompt_digest(row: Row) -> PromptDigest:
    """Return the digest of a row's prompt; that of a row without a prompt covers all its columns."""
    prompt = row.get(PROMPT, dict(row))
    # what is not JSON (an image) counts by its type: its text may hold an address in memory
    text = json.dumps(prompt, sort_keys=True, default=lambda value: type(value).__qualname__)
    preview = prompt if isinstance(prompt, str) else text
    return PromptDigest(
        sha256=hashlib.sha256(text.encode()).hexdigest(),
        preview=preview.encode("ascii", "backslashreplace").decode()[:MAX_PREVIEW_CHARACTERS],
    )


def replaced_rows(
    rows: Sequence[Row], quarantined: Collection[str], spare: Callable[[], Row | None]
) -> dict[int, Row]:
    """Return the rows that take the place of quarantined ones, by position.

    Args:
        rows: of this rank's rollout.
        quarantined: SHA-256 of prompts.
        spare: returns a row of the data set that is not quarantined, for a rank all of whose prompts are;
            None if there is no such row.
    """
    kept = [position for position, row in enumerate(rows) if prompt_digest(row).sha256 not in quarantined]
    leaving = sorted(set(range(len(rows))) - set(kept))
    if not leaving:
        return {}
    if kept:
        return {
            position: rows[min(kept, key=lambda other: (abs(other - position), other))]
            for position in leaving
        }
    found = spare()
    return {} if found is None else dict.fromkeys(leaving, found)


MAX_SEARCHED_ROWS = 1000
"""Rows of the data set that are looked at to find one that is not quarantined."""


class PromptQuarantine:
    """Replaces quarantined prompts in the rollouts of one trainer, and records the prompts of a suspected
    rollout.

    Args:
        train_call: number of the call in the run.
    """

    def __init__(self, trainer: Any, session: Session, train_call: int) -> None:
        self._settings = RankQuarantine.model_validate(session.settings.features.get(NAME) or {})
        self._trainer = trainer
        self._session = session
        self._train_call = train_call
        self._prompts = [one for one in self._settings.prompts if one.train_call == train_call]
        self._reasons: list[str] = []

    def row_reasons(self) -> Sequence[str] | None:
        """Return which rows of this rank's last rollout were replaced; None if none can be on any rank."""
        return self._reasons if self._prompts else None

    @property
    def is_needed(self) -> bool:
        """Whether a prompt of this call is quarantined, or its prompts are to be recorded."""
        suspected = self._settings.suspected
        concerns = suspected is not None and suspected.train_call == self._train_call
        return concerns or bool(self._prompts)

    def replace_prompts(self, original: Callable[..., Any], inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace quarantined prompts by others of the data set."""
        return original(self._replace(inputs), *args, **kwargs)

    def _replace(self, rows: Sequence[Row]) -> Sequence[Row]:
        self._reasons = [""] * len(rows)
        if not self._trainer.model.training:
            return rows  # an evaluation measures its own prompts
        step = int(self._trainer.state.global_step) + 1
        position = RolloutPosition(train_call=self._train_call, step=step)
        if position == self._settings.suspected:
            self._record(rows, position)
        quarantined = {one.sha256 for one in self._prompts if one.from_step <= step}
        if not quarantined:
            return rows
        replaced = replaced_rows(rows, quarantined, self._spare(quarantined))
        for row in replaced:
            self._reasons[row] = REASON
        return [replaced.get(row, own) for row, own in enumerate(rows)]

    def _spare(self, quarantined: set[str]) -> Callable[[], Row | None]:
        def find() -> Row | None:
            rows = islice(iter(self._trainer.train_dataset or ()), MAX_SEARCHED_ROWS)
            return next((row for row in rows if prompt_digest(row).sha256 not in quarantined), None)

        return find

    def _record(self, rows: Sequence[Row], position: RolloutPosition) -> None:
        rollout = RecordedRollout(position=position, prompts=tuple(prompt_digest(row) for row in rows))
        path = Path(self._settings.file)
        try:
            write_rollout(path, rollout)
        except OSError as error:
            self._session.warn_in_journal(
                f"{path} cannot be written: {error.strerror}; no prompt can be replaced"
            )


class QuarantinePart(RankFeature):
    """Quarantine at the points of a rank."""

    name = NAME

    def rollouts(self, trainer: Any, session: Session, train_call: int, points: RolloutPoints) -> None:
        """Replace prompts of the trainer's rollouts, where their samples can be left out of the loss."""
        quarantine = PromptQuarantine(trainer, session, train_call)
        points.leaving.append(quarantine.row_reasons)
        if quarantine.is_needed and points.facts.rows_can_leave:
            points.inputs.append(quarantine.replace_prompts)


PART = QuarantinePart()
