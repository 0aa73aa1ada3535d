"""Check what a reward function returned, and mark its failures.

`None` keeps TRL's meaning. Called by `_masking.py` around every function. Does not decide what becomes of the
sample (`_selection.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from grpo_run.runtime.features.masking._selection import RETURNED_NAN
from grpo_run.runtime.features.masking.events import MaskingReason
from grpo_run.runtime.rank.points import Failed, failed

SHOWN_CHARACTERS = 40
"""Of a value in a sentence."""
LARGEST = 3.4028234663852886e38
"""The largest number of torch.float32, the type of TRL's table of rewards."""


def check(returned: Any, expected: int) -> tuple[Any, dict[int, str]]:
    """Check what a reward function returned.

    Args:
        expected: the number of completions that it was given.

    Returns:
        What TRL is given instead, and the reason of each reward that is not valid, by position. If all are
        valid, this is what the function returned, unchanged.
    """
    if not isinstance(returned, Iterable) or isinstance(returned, (str, bytes, dict)):
        return _all_failed(expected)
    values: Any = returned if hasattr(returned, "__len__") else list(returned)
    if len(values) != expected:
        return _all_failed(expected)
    reasons = {position: reason for position, value in enumerate(values) if (reason := fault_of(value))}
    if not reasons:
        return values, {}
    replaced = [
        value
        if position not in reasons
        else (RETURNED_NAN if reasons[position] is MaskingReason.nan else failed(reasons[position]))
        for position, value in enumerate(values)
    ]
    return replaced, reasons


def describe(returned: Any, expected: int) -> str:
    """Return what a reward function returned, for a sentence about rewards of which none is valid.

    Args:
        expected: the number of completions that it was given.
    """
    if isinstance(returned, (str, bytes, dict)) or not hasattr(returned, "__len__"):
        return f"{_shown(returned)} for {expected} completions"
    if len(returned) != expected:
        plural = "" if len(returned) == 1 else "s"
        return f"{len(returned)} value{plural} for {expected} completions"
    first = next(iter(returned))
    if isinstance(first, Failed):
        return f"no reward ({first.reason}) for {expected} completions"
    if all(value is None for value in returned):
        return f"None for all {expected} completions"
    return f"{_shown(first)} for the first of {expected} completions"


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - whatever a foreign type raises
        text = "an object"
    short = text if len(text) <= SHOWN_CHARACTERS else f"{text[: SHOWN_CHARACTERS - 1]}…"
    return f"{short} ({type(value).__name__})"


def fault_of(value: Any) -> str | None:
    """Return why one reward is not valid; None if it is, or if it is `None`."""
    if value is None:
        return None
    if isinstance(value, Failed):
        return value.reason
    if isinstance(value, (str, bytes)):
        return MaskingReason.output  # float() would read some of them, torch none
    try:
        number = float(value)
    except OverflowError:
        return MaskingReason.infinite
    except Exception:  # noqa: BLE001 - whatever a foreign type raises, it is no number
        return MaskingReason.output
    if math.isnan(number):
        return MaskingReason.nan
    return None if abs(number) <= LARGEST else MaskingReason.infinite


def _all_failed(expected: int) -> tuple[list[Failed], dict[int, str]]:
    return [failed(MaskingReason.output)] * expected, dict.fromkeys(range(expected), MaskingReason.output)
