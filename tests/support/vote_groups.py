"""Stand-ins for the vote group of a rank: one that counts, and one that connects ranks in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

TIMEOUT_SECONDS = 30.0
"""A rank that does not vote fails the test after this time, like a vote that times out."""


class ScriptedVotes:
    """A vote group whose all-reduces return `answer(values)`; records the values of this rank."""

    def __init__(self, answer: Callable[[list[int]], list[int]] = lambda values: values) -> None:
        self.answer = answer
        self.sent: list[list[int]] = []

    def maxima(self, values: list[int]) -> list[int]:
        """Record the values and return the answer."""
        self.sent.append(list(values))
        return self.answer(values)

    def maximum(self, value: int) -> int:
        """Return the answer for a single value."""
        return self.maxima([value])[0]


class ThreadVotes:
    """The vote group of one of several ranks in threads; `count` is the number of all-reduces."""

    def __init__(self, shared: _Shared, rank: int) -> None:
        self._shared = shared
        self._rank = rank
        self.count = 0

    def maxima(self, values: list[int]) -> list[int]:
        """Return the maxima over all ranks; raise if a rank does not vote, or votes on something else."""
        self.count += 1
        return self._shared.reduce(self._rank, values)

    def maximum(self, value: int) -> int:
        """Return the maximum of a single value."""
        return self.maxima([value])[0]

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return every rank's values, ordered by rank."""
        self.count += 1
        return self._shared.exchange(self._rank, values)


class _Shared:
    def __init__(self, ranks: int) -> None:
        self.barrier = threading.Barrier(ranks)
        self.values: list[list[int]] = [[] for _ in range(ranks)]

    def exchange(self, rank: int, values: list[int]) -> list[list[int]]:
        self.values[rank] = list(values)
        self.barrier.wait(TIMEOUT_SECONDS)
        assert len({len(other) for other in self.values}) == 1, (
            f"ranks vote on different things: {self.values}"
        )
        rows = list(self.values)
        self.barrier.wait(TIMEOUT_SECONDS)
        return rows

    def reduce(self, rank: int, values: list[int]) -> list[int]:
        return [max(column) for column in zip(*self.exchange(rank, values), strict=True)]


def thread_votes(ranks: int) -> list[ThreadVotes]:
    """Return connected vote groups, one per rank."""
    shared = _Shared(ranks)
    return [ThreadVotes(shared, rank) for rank in range(ranks)]


def run_ranks(*ranks: Callable[[], Any]) -> list[Any]:
    """Run each rank in a thread and return their results; raise the first error."""
    results: list[Any] = [None] * len(ranks)
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank] = ranks[rank]()
        except BaseException as error:  # noqa: BLE001 - raised in the thread of the test
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT_SECONDS)
        assert not thread.is_alive(), "a rank did not return"
    if errors:
        raise errors[0]
    return results
