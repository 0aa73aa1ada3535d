"""Checks what a reward function has returned: one number or None for each completion. Pure. Called by
`_worker.py`.
"""

from __future__ import annotations

from typing import Any


class OutputError(ValueError):
    """A reward function has returned something else than one number or None for each completion."""


def checked(output: Any, expected: int) -> list[Any]:
    """Return the output as a list of int, float, bool and None.

    NaN and infinities are numbers here: what they mean is decided where rewards are combined.

    Args:
        output: any iterable, also a tensor or an array.
        expected: the number of completions.

    Raises:
        OutputError: the number of values is another one, or a value is not a number.
    """
    if output is None or isinstance(output, (str, bytes, dict)):
        raise OutputError(f"returned {_name(output)} instead of a list of {expected} rewards")
    try:
        values = list(output)
    except TypeError:
        raise OutputError(f"returned {_name(output)} instead of a list of {expected} rewards") from None
    if len(values) != expected:
        raise OutputError(f"returned {len(values)} rewards, but {expected} were expected, one per completion")
    return [_number(value, index) for index, value in enumerate(values)]


def _number(value: Any, index: int) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if not isinstance(value, (str, bytes)):
        try:
            return float(value)  # a scalar of NumPy or torch
        except (TypeError, ValueError):
            pass
    raise OutputError(f"returned {_name(value)} as reward {index}, which is not a number")


def _name(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
