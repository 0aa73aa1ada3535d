"""Which rows of a rollout are replaced, and by which. Pure; called by `attach.py`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from grpo_run.runtime.rollouts.quarantine import MAX_PREVIEW_CHARACTERS, PromptDigest

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
        spare: returns a row of the data set that is not quarantined, for a rank all of whose prompts are; None if there
            is no such row.
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
