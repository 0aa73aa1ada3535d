"""`break` and `return` are told from exceptions, in every statement around them and through generators."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_run.runtime.rank.loops.steps import discarded_on_purpose

seen: list[bool] = []


class Items:
    """What `for` iterates over; the iterator is an object of its own."""

    def __iter__(self) -> Iterator[int]:
        return Iteration()


class Iteration(Iterator[int]):
    """Records how it was discarded."""

    def __next__(self) -> int:
        return 1

    def __del__(self) -> None:
        seen.append(discarded_on_purpose(sys._getframe(1)))


class Bar:
    """A progress bar: a generator in an object, as tqdm's."""

    def __init__(self, items: Any) -> None:
        self.items = items

    def __iter__(self) -> Iterator[int]:
        try:
            for item in self.items:  # noqa: UP028 - as tqdm does it
                yield item
        finally:
            len("closed")


def by_break() -> None:
    for _ in Items():
        break


def by_break_with_a_name() -> None:
    items = Items()
    for _ in items:
        break
    len([items])


def by_return() -> int:
    for _ in Items():
        return len("value")
    return 0


def by_break_in_finally() -> None:
    for _ in Items():
        try:
            break
        finally:
            len("finally")


def by_break_in_with() -> None:
    for _ in Items():
        with contextlib.suppress(ValueError):
            break


def by_break_in_except() -> None:
    for _ in Items():
        try:
            raise ValueError
        except ValueError:
            break


def by_return_from_two_loops() -> int:
    for _ in Items():
        for number in range(3):
            return number
    return 0


def by_break_of_a_progress_bar() -> None:
    for _ in Bar(Items()):
        break


def by_break_of_a_progress_bar_with_a_name() -> None:
    bar = Bar(Items())
    for _ in bar:
        break
    len([bar])


def by_break_of_enumerate_and_generators() -> None:
    for _ in enumerate(item for item in (item for item in Items())):
        break


def raised() -> None:
    for _ in Items():
        raise ValueError


def raised_below() -> None:
    for _ in Items():
        int("no number")


def raised_and_handled() -> None:
    with contextlib.suppress(ValueError):
        for _ in Items():
            int("no number")


def raised_through_finally_and_with() -> None:
    for _ in Items():
        try:
            with contextlib.nullcontext():
                raise ValueError
        finally:
            len("finally")


def raised_with_a_name() -> None:
    def inner() -> None:
        iterator = iter(Items())
        for _ in iterator:
            int("no number")

    with contextlib.suppress(ValueError):
        inner()
    len("goes on")


def raised_in_a_progress_bar() -> None:
    for _ in Bar(Items()):
        raise ValueError


def exited() -> None:
    for _ in Items():
        sys.exit(0)


def interrupted() -> None:
    for _ in Items():
        signal.raise_signal(signal.SIGINT)


def thrown_into_a_generator() -> None:
    def inner() -> Iterator[int]:
        yield from Items()

    generator: Any = inner()
    next(generator)
    with contextlib.suppress(ValueError):
        generator.throw(ValueError())


def closed_by_its_owner() -> None:
    def inner() -> Iterator[int]:
        for item in Items():  # noqa: UP028 - the iterator must be on this frame
            yield item

    generator: Any = inner()
    next(generator)
    generator.close()


def with_a_name_deleted() -> None:
    iterator = iter(Items())
    next(iterator)
    del iterator


@pytest.mark.parametrize(
    "leave",
    [
        by_break, by_break_with_a_name, by_return, by_break_in_finally, by_break_in_with, by_break_in_except,
        by_return_from_two_loops, by_break_of_a_progress_bar, by_break_of_a_progress_bar_with_a_name,
        by_break_of_enumerate_and_generators,
    ],
)  # fmt: skip
def test_a_loop_is_left_on_purpose(leave: Callable[[], object]) -> None:
    """Once, when the statement is executed."""
    seen.clear()
    leave()
    assert seen == [True]


@pytest.mark.parametrize(
    "leave",
    [
        raised, raised_below, raised_and_handled, raised_through_finally_and_with, raised_with_a_name,
        raised_in_a_progress_bar, exited, interrupted, thrown_into_a_generator, closed_by_its_owner,
        with_a_name_deleted,
    ],
)  # fmt: skip
def test_an_exception_is_never_taken_for_a_break(leave: Callable[[], object]) -> None:
    """Neither is anything else that discards an iterator."""
    seen.clear()
    with contextlib.suppress(BaseException):
        leave()
    assert seen == [False]
