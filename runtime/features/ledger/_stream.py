"""The prompts that AsyncGRPO's process draws when a call goes on: those of which nothing was trained yet.

Sent to the process by pickle, in place of the data set. Imports nothing, because the process needs nothing
else of it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any


class RemainingPrompts:
    """A data set whose first pass leaves positions out; later passes are those of the data set.

    Args:
        dataset: with a length, or a stream.
        offset: position of the first row of the pass.
        consumed: positions that are left out.
    """

    def __init__(self, dataset: Any, offset: int, consumed: Collection[int]) -> None:
        self._dataset, self._offset, self._consumed = dataset, offset, frozenset(consumed)
        self._first_pass = True

    def __len__(self) -> int:
        return len(self._dataset)

    def select(self, indices: Any) -> RemainingPrompts:
        """Return this: TRL selects the rows from a first one on, before which all are left out."""
        return self

    def __iter__(self) -> Iterator[Any]:
        leave_out, self._first_pass = self._first_pass, False
        if not leave_out:
            yield from self._dataset
            return
        for position, row in enumerate(self._dataset, self._offset):
            if position not in self._consumed:
                yield row


def positions(first: int, consumed: Collection[int]) -> Iterator[int]:
    """Yield the position of each group that the process draws, in its order."""
    position = first
    while True:
        if position not in consumed:
            yield position
        position += 1
