"""Votes between nodes: a Gloo group of grpo-run's own.

It is independent of the script's default process group: it exists before and after that group, and a hung
NCCL collective cannot block it. Made by `session.py`.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from grpo_run.runtime.rank.collective_recorder import OwnLog, Recorder
from grpo_run.runtime.rank.transport import Finish, Operation
from grpo_run.runtime.upstream import process_names


def attempt_store(connect_seconds: float) -> TCPStore:
    """Connect to the attempt's store (`MASTER_ADDR`, `MASTER_PORT`).

    Args:
        connect_seconds: time limit.
    """
    return TCPStore(
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=connect_seconds),
    )


class GlooTransport:
    """A Gloo group of all ranks.

    Args:
        store: shared by all ranks.
        rank, world_size: as in torch.
        name: of the group, and its key prefix in the store.
        timeout_seconds: for one collective, from its start.
        recorder: logs the collectives.
    """

    most_values = sys.maxsize

    def __init__(
        self, store: Any, *, rank: int, world_size: int, name: str, timeout_seconds: float, recorder: Recorder
    ) -> None:
        self._world_size = world_size
        self._log = OwnLog(recorder, name, world_size=world_size)
        self._sequence = 0
        self._options = dist.AllreduceOptions()
        self._options.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        self._group: Any = process_names.named_gloo_group(
            PrefixStore(name, store), rank, world_size, name=name, timeout_seconds=timeout_seconds
        )

    def start(self, operation: Operation, values: list[int]) -> Finish:
        """Start a collective; see `Transport`."""
        own = torch.tensor(values, dtype=torch.int64)
        if operation is Operation.maxima:
            rows = [own]
            work = self._group.allreduce([own], self._options)
        else:
            rows = [torch.empty_like(own) for _ in range(self._world_size)]
            work = self._group.allgather([rows], [own])
        self._sequence += 1
        self._log.issued(self._sequence, operation.value, own, work)

        def finish() -> list[list[int]]:
            work.wait()
            return [row.tolist() for row in rows]

        return finish

    def close(self) -> None:
        """Release the group."""
        self._group = None
