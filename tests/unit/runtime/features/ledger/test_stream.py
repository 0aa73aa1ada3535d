"""Whatever part of a stream is trained when a call ends, the next one goes on with exactly the rest."""

from __future__ import annotations

import json
import random
from collections import Counter, deque
from collections.abc import Iterator

import pytest

from grpo_run.runtime.features.ledger._lines import AGAIN
from grpo_run.runtime.features.ledger._stream import PromptOrder

GENERATIONS = 3


class Trainer:
    """Takes rows as TRL's trainer does, one micro-batch ahead of what it trains.

    Args:
        order: of the call.
        source: decides in which order groups are ready.
        micro_batch: rows of one.
    """

    def __init__(self, order: PromptOrder, source: random.Random, micro_batch: int) -> None:
        self.order, self.micro_batch = order, micro_batch
        left_out = set(order.done)
        self._next = (at for at in range(order.first, 10**6) if at not in left_out)
        self._queue = self._rows(source)
        self._ahead: deque[list[int]] = deque()
        self.trained: Counter[int] = Counter()

    def _rows(self, source: random.Random) -> Iterator[tuple[int, int]]:
        flying: list[tuple[int, int]] = []
        number = 0
        while True:
            while len(flying) < 6:
                flying.append((number, next(self._next)))
                number += 1
            ready = flying.pop(source.randrange(len(flying)))
            yield from [ready] * GENERATIONS

    def _read(self) -> None:
        rows: list[int] = []
        while len(rows) < self.micro_batch:
            number, position = next(self._queue)
            if self.order.take(number, "a", 1, ""):
                rows.append(position)
        self.order.collate(len(rows))
        self._ahead.append(rows)

    def step(self) -> None:
        """Take a step, with the next micro-batch read already."""
        if not self._ahead:
            self._read()
        self._read()
        self.order.train()
        self.trained.update(self._ahead.popleft())
        parts = Counter({one.position: len(one.lengths) for one in self.order.end_step() if not one.reason})
        assert parts.total() == self.micro_batch


@pytest.mark.parametrize("micro_batch", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("seed", range(5))
def test_every_prompt_is_trained_as_often_as_it_has_completions(micro_batch: int, seed: int) -> None:
    """Over ten ends at random steps, of which some were taken that no checkpoint holds."""
    source = random.Random(seed)
    trained: Counter[int] = Counter()
    order = PromptOrder()
    for _ in range(10):
        trainer = Trainer(order, source, micro_batch)
        for _ in range(source.randrange(1, 12)):
            trainer.step()
        state = json.dumps(order.state())
        trained += trainer.trained
        for _ in range(source.randrange(4)):
            trainer.step()  # the checkpoint does not have these
        order = PromptOrder(**json.loads(state))
    assert max(trained.values()) == GENERATIONS
    done = {*range(order.first), *order.done}
    partial = dict(order.partial)
    assert {at: rows for at, rows in trained.items() if rows < GENERATIONS} == partial
    assert {at for at, rows in trained.items() if rows == GENERATIONS} == done
    assert order.trained == len(done)


def test_rows_that_are_dropped_are_done_and_not_trained() -> None:
    """And one that is drawn again for a part that was trained is told apart from a stale one."""
    order = PromptOrder(partial=[(0, 1)])
    assert [order.take(0, "a", length, "") for length in (5, 7)] == [False, True]
    assert [order.take(1, "b", length, "stale") for length in (3, 4)] == [True, True]
    order.collate(1)
    order.train()
    found = [(one.position, one.reason, one.lengths) for one in order.end_step()]
    assert found == [(0, AGAIN, [5]), (1, "stale", [3, 4]), (0, "", [7])]
    assert order.state() == {"first": 1, "done": [], "partial": [], "trained": 1}


def test_a_group_is_complete_when_another_one_follows() -> None:
    """Conversations may be split into more rows, or have none."""
    order = PromptOrder()
    for _ in range(3):
        order.take(0, "a", 1, "")
    order.collate(3)
    order.train()
    order.end_step()
    assert (order.first, order.partial) == (0, [(0, 3)])
    order.take(1, "b", 1, "stale")
    order.end_step()
    assert (order.first, order.partial) == (1, [])
    order.take(2, "c", 1, "")
    order.end_step()
    assert (order.first, order.trained) == (2, 1)
