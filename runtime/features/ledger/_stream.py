"""Prompts of AsyncGRPO in the order of its data: which are done, and which are drawn when a call goes on.

The process of the rollouts numbers the groups that it draws, and sends the rows of a group one after
another, the groups in the order in which they are ready. A position is the number of a prompt in the stream,
over all passes of the data. Used by `_async.py`. Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from dataclasses import asdict, dataclass, field
from typing import Any

from grpo_run.runtime.features.ledger._lines import AGAIN, Part, prompt_digest


@dataclass(kw_only=True)
class PromptOrder:
    """What became of the prompts of a stream so far. The trainer uses rows in the order in which it takes
    them.

    Attributes:
        first: the first position that is not done: trained, or left out as a whole.
        done: positions after it that are.
        partial: of prompts that are trained in part, how many rows are used.
        trained: how many prompts are done and have trained rows.
    """

    first: int = 0
    done: list[int] = field(default_factory=list)
    partial: list[tuple[int, int]] = field(default_factory=list)
    trained: int = 0

    def __post_init__(self) -> None:
        left_out, self._given, self._partial = frozenset(self.done), dict(self.partial), dict(self.partial)
        self._drawn = (at for at in itertools.count(self.first) if at not in left_out)
        self._positions, self._prompts = list[int](), dict[int, Any]()
        self._taken, self._used, self._newest = Counter[int](), Counter[int](), -1
        self._waiting, self._collated = deque[tuple[int, int]](), deque[int]()
        self._rows: dict[tuple[str, int], list[int]] = {}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as plain JSON values: the arguments that go on from here."""
        return asdict(self)

    def take(self, number: int, prompt: Any, length: int, reason: str) -> bool:
        """Note a row that the trainer takes from the queue.

        Args:
            number: of its group.
            prompt: of this group.
            reason: why the trainer drops it, "" if it does not.

        Returns:
            whether the trainer gets it. Of a prompt of which a part was trained, it gets the rest.
        """
        while number >= len(self._positions):
            self._positions.append(next(self._drawn))
        self._prompts.setdefault(number, prompt)
        self._newest = number
        self._taken[number] += 1
        again = self._taken[number] <= self._given.get(self._positions[number], 0)
        if again or reason:
            self._use(number, length, AGAIN if again else reason)
        else:
            self._waiting.append((number, length))
        return not again

    def collate(self, rows: int) -> None:
        """Note that a micro-batch has so many rows; it is trained later."""
        self._collated.append(rows)

    def train(self) -> bool:
        """Note that the next micro-batch is trained; return whether its rows were noted."""
        rows = self._collated.popleft() if self._collated else 0
        for _ in range(min(rows, len(self._waiting))):
            self._use(*self._waiting.popleft())
        return rows > 0

    def _use(self, number: int, length: int, reason: str = "") -> None:
        self._used[number] += 1
        self._rows.setdefault((reason, number), []).append(length)
        if not reason:
            self._partial[self._positions[number]] = self._used[number]

    def end_step(self) -> list[Part]:
        """Return what was trained or left out since the last step."""
        parts = [
            Part(self._positions[number], prompt_digest(self._prompts[number]), lengths, reason)
            for (reason, number), lengths in self._rows.items()
        ]
        done = set(self.done)
        for number, taken in list(self._taken.items()):
            # rows come group by group: a row of another one shows that a group is complete
            if number != self._newest and taken == self._used[number]:
                del self._taken[number], self._used[number], self._prompts[number]
                done.add(self._positions[number])
                self.trained += self._partial.pop(self._positions[number], 0) > 0
        while self.first in done:
            done.remove(self.first)
            self.first += 1
        self.done, self.partial, self._rows = sorted(done), list(self._partial.items()), {}
        return parts
