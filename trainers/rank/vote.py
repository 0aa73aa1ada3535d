"""The per-step vote: one all-reduce of a small vector, on a Gloo group that is ours alone.

All ranks start it when their optimizer step is done and collect it before the next one, so it hides behind
work. It says that every rank stands at the same step having taken the same path (minimum and maximum of step and
fingerprint must agree), and carries every rank's requests to all: stop, save, snapshot, a non-finite loss. The group is
built by the bootstrap on a prefix of the attempt's store, so it lives before, beside and after whatever the
script does with the default group, and a wedged NCCL cannot block it.

Who calls: the guard, `start` once a step and `collect` before the next `start`. A vote never decides alone: what
follows is the same function of the same outcome on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from grpo_run.runtime import upstream
from grpo_run.runtime.errors import ConsensusError

DEFAULT_TIMEOUT_SECONDS = 1800.0
"""Torch's own default for Gloo collectives (`torch.distributed.constants.default_pg_timeout`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ballot:
    """What one rank brings to a vote."""

    step: int
    fingerprint: int = 0
    stop: bool = False
    save: bool = False
    snapshot: bool = False
    nonfinite: bool = False
    oom: bool = False

    def encode(self) -> list[int]:
        """The vector reduced by MAX; a value and its negation together give maximum and minimum."""
        return [
            self.step,
            -self.step,
            self.fingerprint,
            -self.fingerprint,
            int(self.stop),
            int(self.save),
            int(self.nonfinite),
            int(self.oom),
            int(self.snapshot),
        ]


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What all ranks know after a vote; equal on every rank."""

    step: int
    stop: bool
    save: bool
    snapshot: bool
    nonfinite: bool
    oom: bool


def decode(vector: list[int]) -> Outcome:
    """Read a reduced vector.

    Raises:
        ConsensusError: ranks stood at different steps or had taken different paths.
    """
    high_step, low_step, high_path, low_path = vector[0], -vector[1], vector[2], -vector[3]
    if high_step != low_step:
        raise ConsensusError(
            f"ranks vote on different steps: the first on {high_step}, the last on {low_step}"
        )
    if high_path != low_path:
        raise ConsensusError(
            f"ranks took different paths to step {high_step}: fingerprints {high_path:#x} and {low_path:#x};"
            " one evaluated, generated or saved where another did not"
        )
    return Outcome(
        step=high_step,
        stop=bool(vector[4]),
        save=bool(vector[5]),
        nonfinite=bool(vector[6]),
        oom=bool(vector[7]),
        snapshot=bool(vector[8]),
    )


Issued = Callable[[str, int, str, torch.Tensor, Any], None]
"""Told of a collective: group's name, sequence number, operation, input, torch's work."""


def _nobody(group: str, sequence: int, operation: str, tensor: torch.Tensor, work: Any) -> None:
    """Nobody wants to know."""


class VoteGroup:
    """The group and the vote under way. One a rank; not thread-safe.

    Args:
        store: the attempt's store, shared by all ranks.
        rank, world_size: as torch's.
        prefix: keeps attempts apart.
        timeout_seconds: deadline of one vote, from its start; a peer may be a whole rollout behind.
        issued: told of each collective as (group's name, its sequence number, operation, input, torch's work).
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        prefix: str,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        issued: Issued = _nobody,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self._issued = issued
        self._name = prefix
        self._sequence = 0
        self._group: Any = None
        self._pending: tuple[torch.Tensor, Any] | None = None
        self.wait_seconds = 0.0
        self.votes = 0
        if world_size > 1:
            self._group = upstream.named_gloo_group(
                PrefixStore(prefix, store), rank, world_size, name=prefix, timeout_seconds=timeout_seconds
            )

    def start(self, ballot: Ballot) -> None:
        """Begin a vote; returns at once. The one before must have been collected."""
        assert self._pending is None, "a vote is under way"
        vector = torch.tensor(ballot.encode(), dtype=torch.int64)
        self._pending = (vector, self._reduce(vector))

    def collect(self) -> Outcome | None:
        """Wait for the vote under way and read it; None when there is none.

        Raises:
            ConsensusError: ranks disagree.
            RuntimeError: a peer is gone, or the deadline passed (torch's own words).
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
        """The largest `value` over all ranks, at once; every rank must call it at the same point."""
        assert self._pending is None, "collect the vote first: both would share the group"
        vector = torch.tensor([value], dtype=torch.int64)
        work = self._reduce(vector)
        if work is not None:
            work.wait()
        return int(vector.item())

    def gather(self, values: list[int]) -> list[list[int]]:
        """Every rank's values (as many on each, below 2**63), by rank, at once."""
        if self._group is None:
            return [values]
        mine = torch.tensor(values, dtype=torch.int64)
        every = [torch.empty_like(mine) for _ in range(self.world_size)]
        self._follow("allgather", mine, self._group.allgather([every], [mine])).wait()
        return [one.tolist() for one in every]

    def _reduce(self, vector: torch.Tensor) -> Any:
        if self._group is None:
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        return self._follow("allreduce", vector, self._group.allreduce([vector], options))

    def _follow(self, operation: str, tensor: torch.Tensor, work: Any) -> Any:
        self._sequence += 1
        self._issued(self._name, self._sequence, operation, tensor, work)
        return work

    def close(self) -> None:
        """Let go of the group; nobody may be voting."""
        self._group = None
