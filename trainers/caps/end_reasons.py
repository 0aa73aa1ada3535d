"""Why completions ended, and how a completion is cut where a cap ended it.

Pure. Called by `rollout.py`. Does not decide whether a completion takes part in the loss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from grpo_run.watchdog.observation import EndReason

CAPPED = frozenset({EndReason.repetition, EndReason.deadline})
"""Reasons for which a completion is cut. Without the cap it would have gone on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Cut:
    """Where and why a cap ended a completion.

    Args:
        length: tokens of the completion that were generated.
    """

    length: int
    reason: EndReason


def cut(tokens: Sequence[int], at: Cut | None) -> list[int]:
    """Return a completion without what was generated after a cap had ended it: padding, or tokens nobody asked for.

    No end-of-sequence token is added, so the trainer takes the completion for what it is: not finished.
    """
    return list(tokens if at is None else tokens[: at.length])


def end_reason(
    tokens: Sequence[int], at: Cut | None, *, end_tokens: Collection[int], max_length: int
) -> EndReason:
    """Return why a completion ended.

    Args:
        tokens: as the trainer has it, after it was cut.
        at: where a cap ended it, if one did.
        end_tokens: the tokens that end a completion.
        max_length: in tokens.
    """
    if at is not None and at.length <= len(tokens):
        return at.reason
    if tokens and tokens[-1] in end_tokens:
        return EndReason.eos
    return EndReason.length if len(tokens) >= max_length else EndReason.eos
