"""The vote group: grpo-run's own Gloo group for the step vote and small collective decisions.

All ranks start a vote when their optimizer step is done and collect it before the next one, so communication
overlaps with work. The group is built on a prefix of the attempt's store. It is independent of the script's
default process group: it exists before and after that group, and a hung NCCL collective cannot block it.

Called by `calls/step_vote.py` (`start`, `collect`), by everything that decides collectively (`maximum`,
`gather`) and by `consensus.py`. Every rank must make the same calls in the same order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.distributed.distributed_c10d import PrefixStore

from grpo_run.runtime import upstream
from grpo_run.trainers.rank.vote import Vote, VoteResult, decode

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Torch's own default for Gloo collectives (`torch.distributed.constants.default_pg_timeout`)."""

OnCollective = Callable[[str, int, str, torch.Tensor, Any], None]
"""Called with the group's name, sequence number, operation, input tensor and torch's `Work` handle."""


def _ignore(group: str, sequence: int, operation: str, tensor: torch.Tensor, work: Any) -> None:
    """Ignore a collective."""


class VoteGroup:
    """A process group and the vote in progress. One per rank; not thread-safe.

    Args:
        store: the attempt's store, shared by all ranks; unused with one rank.
        rank, world_size: as in torch.
        prefix: the group's name, and its key prefix in the store.
        timeout_seconds: for one collective, from its start. A peer may be a whole rollout behind.
        on_collective: called for each collective that is issued.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        prefix: str,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        on_collective: OnCollective = _ignore,
    ) -> None:
        self.world_size = world_size
        self.wait_seconds = 0.0
        """Time this rank has waited in `collect`."""
        self.votes = 0
        """Number of votes collected."""
        self._on_collective = on_collective
        self._name = prefix
        self._sequence = 0
        self._group: Any = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        if world_size > 1:
            self._group = upstream.named_gloo_group(
                PrefixStore(prefix, store), rank, world_size, name=prefix, timeout_seconds=timeout_seconds
            )

    def start(self, vote: Vote) -> None:
        """Start a vote and return at once. The previous vote must have been collected."""
        assert self._pending is None, "a vote is in progress"
        vector = torch.tensor(vote.encode(), dtype=torch.int64)
        self._pending = (vector, self._all_reduce_max(vector))

    def collect(self) -> VoteResult | None:
        """Wait for the vote in progress and return its result; None if there is none.

        Raises:
            ConsensusError: ranks disagree.
            RuntimeError: a peer is gone or the vote timed out (raised by torch).
        """
        if self._pending is None:
            return None
        vector, work = self._pending
        self._pending = None
        if work is not None:
            began = time.perf_counter()
            work.wait()
            self.wait_seconds += time.perf_counter() - began
        self.votes += 1
        return decode(vector.tolist())

    def maximum(self, value: int) -> int:
        """Return the largest `value` of all ranks. Collective and blocking."""
        return self.maxima([value])[0]

    def maxima(self, values: list[int]) -> list[int]:
        """Return the largest value of all ranks at each position, with one all-reduce.

        Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        assert self._pending is None, "collect the vote first: a collective in between would break its order"
        vector = torch.tensor(values, dtype=torch.int64)
        work = self._all_reduce_max(vector)
        if work is not None:
            work.wait()
        return [int(value) for value in vector.tolist()]

    def gather(self, values: list[int]) -> list[list[int]]:
        """Return every rank's values, ordered by rank. Collective and blocking.

        Args:
            values: as many on every rank, each below 2**63.
        """
        if self._group is None:
            return [values]
        own = torch.tensor(values, dtype=torch.int64)
        gathered = [torch.empty_like(own) for _ in range(self.world_size)]
        self._issued("allgather", own, self._group.allgather([gathered], [own])).wait()
        return [tensor.tolist() for tensor in gathered]

    def close(self) -> None:
        """Release the process group. No vote may be in progress on any rank."""
        self._group = None

    def _all_reduce_max(self, vector: torch.Tensor) -> Any:
        if self._group is None:
            return None
        return self._issued("allreduce", vector, self._group.allreduce([vector], self._options))

    def _issued(self, operation: str, tensor: torch.Tensor, work: Any) -> Any:
        self._sequence += 1
        self._on_collective(self._name, self._sequence, operation, tensor, work)
        return work


def connect_vote_group(
    *,
    rank: int,
    world_size: int,
    prefix: str,
    connect_seconds: float,
    timeout_seconds: float,
    on_collective: OnCollective,
) -> VoteGroup:
    """Connect to the attempt's store (`MASTER_ADDR`, `MASTER_PORT`) and build a vote group on it.

    Args:
        connect_seconds: time limit for reaching the store.
        timeout_seconds: time limit of one collective; see `VoteGroup`.
    """
    store = None
    if world_size > 1:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=connect_seconds),
        )
    return VoteGroup(
        store,
        rank=rank,
        world_size=world_size,
        prefix=prefix,
        timeout_seconds=timeout_seconds,
        on_collective=on_collective,
    )
