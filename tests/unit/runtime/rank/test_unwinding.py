"""An exception that has ended a loop is told from one that is raised after `break`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import pytest

from grpo_run.runtime.rank.unwinding import LeftPlace
from grpo_run.watchdog.observation import Phase

places: list[LeftPlace] = []


class Steps:
    """An iterator that notes where it is destroyed."""

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        return 1

    def __del__(self) -> None:
        places.append(LeftPlace(sys._getframe(1), Phase.optimizer))


def wrapped() -> Iterator[int]:
    """A generator around the loop."""
    yield from Steps()


def looped() -> Iterator[int]:
    """A generator with the loop in it."""
    for step in Steps():  # noqa: UP028 - the loop is the generator's own
        yield step


def raised_in_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        raise ValueError("invalid")


def raised_below_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        try:
            int("x")
        finally:
            len("done")


def raised_again_below_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        try:
            int("x")
        except ValueError:
            len("done")
            raise


def raised_from_another_below_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        try:
            int("x")
        except ValueError as error:
            raise ValueError("invalid") from error


def raised_in_a_context_below_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        with contextlib.suppress(TypeError):
            int("x")


def raised_after_the_loop(steps: Callable[[], Iterator[int]]) -> None:
    for _ in steps():
        break
    raise ValueError("invalid")


def raised_after_a_return(steps: Callable[[], Iterator[int]]) -> None:
    def first() -> int:
        for step in steps():
            return step
        return 0

    first()
    raise ValueError("invalid")


def raised_after_a_caught_exception(steps: Callable[[], Iterator[int]]) -> None:
    with contextlib.suppress(ValueError):
        for _ in steps():
            try:
                int("x")
            finally:
                len("done")
    raise ValueError("invalid")


@pytest.mark.parametrize("steps", [Steps, wrapped, looped])
@pytest.mark.parametrize(
    ("script", "inside"),
    [
        (raised_in_the_loop, True),
        (raised_below_the_loop, True),
        (raised_again_below_the_loop, True),
        (raised_from_another_below_the_loop, True),
        (raised_in_a_context_below_the_loop, True),
        (raised_after_the_loop, False),
        (raised_after_a_return, False),
        (raised_after_a_caught_exception, False),
    ],
)
def test_the_loop_that_an_exception_has_ended_is_known(
    script: Callable[..., None], inside: bool, steps: Callable[[], Iterator[int]]
) -> None:
    """Also if a generator is around the loop, and if the exception has passed a `finally`."""
    places.clear()
    with pytest.raises(ValueError, match="invalid") as caught:
        script(steps)
    (place,) = places
    assert place.is_in(caught.value.__traceback__) is inside
