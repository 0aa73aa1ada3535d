"""Check what a reward function returned, and mark its failures.

A failure is a `Failed`, which is minus infinity to TRL, so that it survives TRL's conversion to a tensor and
its gather over the ranks; `None` keeps TRL's meaning. Called by `sample_masking.py` around every function;
code that calls a function on its own, for example in another process, returns `failed(reason)`. Does not
decide what becomes of the sample (`_masking_selection.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from grpo_run.runtime.history.sample_masking import MaskingReason

RETURNED_NAN = math.inf
"""Stands for NaN in a function's column; TRL uses NaN itself for `None`."""
SHOWN_CHARACTERS = 40
"""Of a value in a sentence."""
LARGEST = 3.4028234663852886e38
"""The largest number of torch.float32, the type of TRL's table of rewards."""


class Failed(float):
    """A reward that could not be computed, made by `failed`. TRL sees minus infinity."""

    reason: MaskingReason


def failed(reason: MaskingReason) -> Failed:
    """Return the reward of a sample for which a function has failed."""
    made = Failed(-math.inf)
    made.reason = reason
    return made


def check(returned: Any, expected: int) -> tuple[Any, dict[int, MaskingReason]]:
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
        return f"no reward ({first.reason.value}) for {expected} completions"
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


def fault_of(value: Any) -> MaskingReason | None:
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


def _all_failed(expected: int) -> tuple[list[Failed], dict[int, MaskingReason]]:
    return [failed(MaskingReason.output)] * expected, dict.fromkeys(range(expected), MaskingReason.output)
