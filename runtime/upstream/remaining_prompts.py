"""The data set of AsyncGRPO's process when a call goes on: the prompts that are not done yet.

`async_grpo_names.draw_from` sends it to the process by pickle, in place of the data set. It answers what TRL
asks of a data set there, and is told what is done. Imports nothing heavy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any


class RemainingPrompts:
    """A data set without the prompts that are done, then all passes of it, without end.

    Args:
        dataset: with a length, or a stream.
        first: the first position that is not done.
        done: positions after it that are.
    """

    def __init__(self, dataset: Any, first: int, done: Collection[int]) -> None:
        self._dataset, self._first, self._done = dataset, first, frozenset(done)

    def __len__(self) -> int:
        return len(self._dataset)

    def select(self, indices: Any) -> RemainingPrompts:
        """Return this: TRL asks for the rows from its own first one on, before which all are done."""
        return self

    def __iter__(self) -> Iterator[Any]:
        rows, position = self._dataset, 0
        if hasattr(rows, "select"):  # no row before the first one is read
            position, size = self._first, len(rows)
            rows = rows.select(range(position % size, size))
        while True:
            began = position
            for row in rows:
                if position >= self._first and position not in self._done:
                    yield row
                position += 1
            if position == began:
                return
            rows = self._dataset
