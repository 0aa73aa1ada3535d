"""The vote group: grpo-run's own group of all ranks for the step vote and small collective decisions.

All ranks start a vote when their optimizer step is done and collect it before the next one, so communication
overlaps with work. The ranks of one node vote through the board, which costs no thread; with several nodes, through a
Gloo group of grpo-run's own (`transports/`).

Called by `calls/step_vote.py` (`start`, `collect`), by everything that decides collectively (`maximum`,
`gather`) and by `consensus.py`. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import time

from grpo_run.trainers.rank.transports.transport import Detached, Finish, Operation, Transport
from grpo_run.trainers.rank.vote import Vote, VoteResult, decode


class VoteGroup:
    """A group of all ranks and the vote in progress. One per rank; not thread-safe.

    Args:
        transport: connects the ranks; None for the only rank of a run.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self.wait_seconds = 0.0
        """Time this rank has waited in `collect`."""
        self.votes = 0
        """Number of votes collected."""
        self._transport = transport
        self._pending: Finish | None = None

    def start(self, vote: Vote) -> None:
        """Start a vote and return at once. The previous vote must have been collected."""
        assert self._pending is None, "a vote is in progress"
        self._pending = self._start(Operation.maxima, vote.encode())

    def collect(self) -> VoteResult | None:
        """Wait for the vote in progress and return its result; None if there is none.

        Raises:
            ConsensusError: ranks disagree.
            RuntimeError: a peer is gone or the vote timed out.
        """
        if self._pending is None:
            return None
        finish, self._pending = self._pending, None
        began = time.perf_counter()
        rows = finish()
        if self._transport is not None:
            self.wait_seconds += time.perf_counter() - began
        self.votes += 1
        return decode(_maxima(rows))

    def maximum(self, value: int) -> int:
        """Return the largest `value` of all ranks. Collective and blocking."""
        return self.maxima([value])[0]

    def maxima(self, values: list[int]) -> list[int]:
        """Return the largest value of all ranks at each position. Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        return _maxima(self._all(Operation.maxima, values))

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return every rank's values, ordered by rank. Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        return self._all(Operation.rows, values)

    def detach(self) -> None:
        """In a process that was forked from the rank: take part in nothing from now on."""
        if self._transport is not None:
            self._transport = Detached()

    def close(self) -> None:
        """Release the transport. No vote may be in progress on any rank."""
        if self._transport is not None:
            self._transport.close()

    def _all(self, operation: Operation, values: list[int]) -> list[list[int]]:
        assert self._pending is None, "collect the vote first: a collective in between would break its order"
        most = self._transport.most_values if self._transport is not None else len(values)
        rows = self._start(operation, values[:most])()
        for begin in range(most, len(values), most):
            more = self._start(operation, values[begin : begin + most])()
            rows = [row + part for row, part in zip(rows, more, strict=True)]
        return rows

    def _start(self, operation: Operation, values: list[int]) -> Finish:
        if self._transport is None:
            return lambda: [values]
        return self._transport.start(operation, values)


def _maxima(rows: list[list[int]]) -> list[int]:
    return [max(column) for column in zip(*rows, strict=True)]
