"""The tree of errors, and the exit codes."""

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


def test_the_base_class_cannot_be_raised() -> None:
    """A caller needs a specific class."""
    with pytest.raises(AssertionError, match="subclass"):
        raise GrpoRunError("something")


def test_the_docstring_lists_every_class() -> None:
    """The tree in the module docstring is complete."""
    entry = re.compile(r"^[ │├└─]*([A-Z]\w+)(?:\(\w+\))?(?: {2,}|$)", re.MULTILINE)
    assert set(entry.findall(errors.__doc__ or "")) == set(CLASSES)


@pytest.mark.parametrize(
    "name", sorted(set(CLASSES) - {"GrpoRunError", "Stopped", "AlarmRaised", "Superseded"})
)
def test_every_error_derives_from_the_base_class(name: str) -> None:
    """`except GrpoRunError` catches all of them, and each keeps its message."""
    error = CLASSES[name]("what, where, what to do")
    assert isinstance(error, GrpoRunError)
    assert str(error) == "what, where, what to do"


def test_errors_are_caught_as_what_they_are() -> None:
    """Usage errors as those of argparse. A stop passes through `except Exception` of a script, and so does an
    alarm, because a script that catches exceptions must not save weights that a guard has refused.
    """
    assert issubclass(UsageError, ValueError)
    assert not issubclass(Stopped, Exception)
    assert (Stopped(12).code, Stopped(12).step) == (75, 12)
    assert not issubclass(errors.AlarmRaised, Exception)
    assert issubclass(errors.AlarmRaised, SystemExit)
    assert not issubclass(errors.Superseded, Exception)
    assert errors.Superseded().code == 1


def test_the_exit_codes_are_the_documented_ones() -> None:
    """Batch systems act on them."""
    assert (
        errors.EXIT_FINISHED, errors.EXIT_USAGE, errors.EXIT_STOPPED, errors.EXIT_GAVE_UP
    ) == (0, 2, 75, 93)  # fmt: skip
