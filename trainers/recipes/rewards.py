"""Verifiable reward functions for TRL: `(completions, **columns) -> list[float]`, each value between 0 and 1.

TRL calls them for every batch of completions and uses their names as metric names. They are plain
module-level functions, so they can be pickled. A completion is text, or a conversation whose last message is
the model's.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any

from grpo_run.trainers.recipes.problems import MARKER, final_answer

Completion = str | Sequence[Mapping[str, Any]]

_TOTAL = re.compile(r"(?:.*=)?([0-9]+)\s*", re.DOTALL)


def completion_text(completion: Completion) -> str:
    """Return the text that the model generated."""
    return completion if isinstance(completion, str) else str(completion[-1]["content"])


def correct_sum(completions: Sequence[Completion], total: Sequence[int], **columns: Any) -> list[float]:
    """Return 1 if the text after the last `=` (all of it, if there is none) is the total, else 0."""
    scores = []
    for completion, expected in zip(completions, total, strict=True):
        match = _TOTAL.fullmatch(completion_text(completion))
        scores.append(float(match is not None and match[1] == str(expected)))
    return scores


def correct_answer(completions: Sequence[Completion], answer: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 if the number after the last `####` equals the reference answer, else 0.

    `72.00` and `$72` equal `72`.
    """
    return [
        float(final_answer(completion_text(completion)) == Decimal(expected))
        for completion, expected in zip(completions, answer, strict=True)
    ]


def answer_format(completions: Sequence[Completion], **columns: Any) -> list[float]:
    """Return 1 if the completion has one `####` line, at its end, with exactly one number, else 0."""
    scores = []
    for completion in completions:
        text = completion_text(completion).rstrip()
        _, *tails = text.split(MARKER)
        scores.append(float(len(tails) == 1 and "\n" not in tails[0] and final_answer(text) is not None))
    return scores
