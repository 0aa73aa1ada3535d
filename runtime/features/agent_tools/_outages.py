"""Which exceptions of a tool or environment are failures of its infrastructure. Pure.

They are known by names: of a class, or of a base of it, and also those of the exception from which it was
raised, because clients wrap what the system says in exceptions of their own. No library is imported to
compare classes. What we raise ourselves counts, too. Used by `_calls.py`, and by the worker, whose errors
do not leave its process.
"""

from __future__ import annotations

from collections.abc import Iterable

from grpo_run.runtime.errors import ConfigError

DEFAULT_NAMES = ("ConnectionError", "TimeoutError", "gaierror")
"""A server that is away or does not answer, and a name that is not resolved. Other errors of the system are a
tool's own: a file that the model asks for may not exist."""
NONE = "none"


def parse_names(text: str) -> tuple[str, ...]:
    """Parse the value of the option: names separated by commas, or `none`.

    Raises:
        ConfigError: a name is none of a class.
    """
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if not name.replace(".", "_").isidentifier():
            raise ConfigError(f"--infrastructure-errors {text}: {name!r} is no name of an exception")
    return () if names == (NONE,) else names


def names_of(error: BaseException | None) -> frozenset[str]:
    """Return the names of an exception's classes, with and without their modules, and of those from which it
    was raised.
    """
    names: set[str] = set()
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        names.update(getattr(error, "class_names", ()))  # of an exception in a worker
        for kind in type(error).__mro__:
            names |= {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"}
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return frozenset(names)


class CallEndedError(TimeoutError):
    """A call was ended by us.

    Args:
        limit: after so many seconds.
        how: as a participle.
        where: the line of the script in which it was, as `file.py:40`; "" if there is none.
    """

    def __init__(self, limit: float, how: str, where: str = "") -> None:
        super().__init__(f"no answer within {limit:g} s")
        self.limit, self.how, self.where = limit, how, where


class OtherAnswerError(Exception):
    """An environment that was to be brought to where it was answers otherwise than before."""


def is_outage(error: BaseException, names: Iterable[str]) -> bool:
    """Whether an exception is one of ours, or of those that the user names."""
    return isinstance(error, (CallEndedError, OtherAnswerError)) or not names_of(error).isdisjoint(names)
