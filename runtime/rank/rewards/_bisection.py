"""Finds the samples that a reward function fails on: which parts of a batch are called, in which order. Pure.

The batch as a whole has failed. `Bisection` gives out its halves, then the halves of each half that fails,
from left to right. Called by `_service.py`, which makes the calls.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Found = TypeVar("Found")


class Bisection(Generic[Found]):
    """One failed call.

    Args:
        samples: the number of samples of the batch.
        failure: of the whole batch.
    """

    def __init__(self, samples: int, failure: Found) -> None:
        self.failed: dict[int, Found] = {}
        """By sample, why it failed."""
        self.passed: list[range] = []
        """Parts that the function has scored, from left to right."""
        self._waiting: list[range] = []
        self._split(range(samples), failure)

    def next(self) -> range | None:
        """Return the next part to call; None if every sample has been decided."""
        return self._waiting[-1] if self._waiting else None

    def pass_part(self) -> None:
        """The part that `next` returned was scored."""
        self.passed.append(self._waiting.pop())

    def fail_part(self, failure: Found) -> None:
        """The part that `next` returned has failed."""
        self._split(self._waiting.pop(), failure)

    def give_up(self, failure: Found) -> None:
        """There is no time left: every sample that is not decided has failed."""
        for part in self._waiting:
            self.failed.update(dict.fromkeys(part, failure))
        self._waiting.clear()

    def _split(self, part: range, failure: Found) -> None:
        if len(part) <= 1:
            self.failed.update(dict.fromkeys(part, failure))
            return
        middle = len(part) // 2
        self._waiting += [part[middle:], part[:middle]]
