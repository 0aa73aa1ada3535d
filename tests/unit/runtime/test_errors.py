"""The tree of errors."""

from __future__ import annotations

import inspect
import re

import pytest

from grpo_run.runtime import errors
from grpo_run.runtime.errors import GrpoRunError, Stopped, UsageError

CLASSES = {
    name: kind
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, BaseException) and kind.__module__ == errors.__name__
}


def test_the_base_refuses_to_be_raised() -> None:
    """Whoever catches wants to know which one it is."""
    with pytest.raises(AssertionError, match="subclass"):
        raise GrpoRunError("something")


def test_the_docstring_lists_every_class() -> None:
    """The tree at the top of the file is the whole tree."""
    entry = re.compile(r"^[ │├└─]*([A-Z]\w+)(?:\(\w+\))?(?: {2,}|$)", re.MULTILINE)
    assert set(entry.findall(errors.__doc__ or "")) == set(CLASSES)


@pytest.mark.parametrize("name", sorted(set(CLASSES) - {"GrpoRunError", "Stopped"}))
def test_every_error_is_ours(name: str) -> None:
    """One `except GrpoRunError` catches all that is raised on purpose, and each carries its message."""
    error = CLASSES[name]("what, where, what to do")
    assert isinstance(error, GrpoRunError)
    assert str(error) == "what, where, what to do"


def test_usage_errors_are_value_errors() -> None:
    """So that library callers and argparse types may treat them as such."""
    assert issubclass(UsageError, ValueError)


def test_stopping_is_no_error() -> None:
    """It passes through `except Exception` of the user's script and exits with 75."""
    stopped = Stopped(12)
    assert not isinstance(stopped, Exception)
    assert (stopped.code, stopped.step) == (75, 12)


def test_the_exit_codes_are_the_contract() -> None:
    """Batch systems act on these numbers."""
    assert (
        errors.EXIT_FINISHED, errors.EXIT_USAGE, errors.EXIT_STOPPED, errors.EXIT_GAVE_UP
    ) == (0, 2, 75, 93)  # fmt: skip
