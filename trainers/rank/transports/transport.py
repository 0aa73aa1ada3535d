"""The interface of a transport: every rank sends a row of integers, and receives those of all ranks.

Implemented by `shared_memory.py` and `gloo.py`, and used by `rank/vote_group.py`. Plain declarations.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import Enum
from typing import Protocol

Finish = Callable[[], list[list[int]]]
"""Waits for a collective and returns its rows: of each rank, by rank, or a single row with the maximum of each column."""


class Operation(str, Enum):
    """A collective, by torch's name of the process group method."""

    maxima = "allreduce"
    rows = "allgather"


class Transport(Protocol):
    """A transport of one rank. Every rank makes the same calls in the same order."""

    most_values: int
    """Number of integers that a rank can send at once."""

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Send this rank's integers, each below 2**63, and return at once.

        The returned function raises RuntimeError if a peer is gone or does not answer in time.
        """

    def close(self) -> None:
        """Release what the transport holds. No collective may be in progress on any rank."""


class Detached:
    """The transport in a process that was forked from a rank and is not the rank."""

    most_values = sys.maxsize

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Refuse."""
        raise RuntimeError("a process that was forked from a rank cannot vote for it")

    def close(self) -> None:
        """Do nothing."""
