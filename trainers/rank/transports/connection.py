"""Choose and connect the transport of a vote group. Called by `rank/session.py`."""

from __future__ import annotations

from grpo_run.runtime.board.board import Board
from grpo_run.trainers.rank.collectives.own_log import OwnLog
from grpo_run.trainers.rank.collectives.recorder import Recorder
from grpo_run.trainers.rank.transports.shared_memory import SharedMemoryTransport
from grpo_run.trainers.rank.transports.transport import Transport
from grpo_run.watchdog.deadlocks.positions import MIN_TIMEOUT_SECONDS


def connect_transport(
    name: str,
    *,
    rank: int,
    world_size: int,
    local_world_size: int,
    board: Board,
    attempt: int,
    recorder: Recorder,
    connect_seconds: float,
    timeout_seconds: float,
) -> Transport | None:
    """Return the transport of a group: the board if all ranks share it, otherwise Gloo; None for a single rank.

    Args:
        name: of the group, one of `runtime.board.exchange.CHANNELS`.
        rank, world_size, local_world_size: as in torch elastic's environment variables.
        board: of this node, writable.
        attempt: the attempt.
        recorder: logs the collectives.
        connect_seconds: time limit for all ranks to connect.
        timeout_seconds: time limit of one collective. A peer may be a whole rollout behind.
    """
    if world_size == 1:
        return None
    if local_world_size == world_size:
        exchange = board.exchange(rank, attempt=attempt, channel=name)
        if exchange is not None:
            limited = timeout_seconds < MIN_TIMEOUT_SECONDS
            log = OwnLog(recorder, name, world_size=world_size, limited=limited)
            return SharedMemoryTransport(exchange, rank=rank, timeout_seconds=timeout_seconds, log=log)
    # imports torch, which takes seconds in a fresh interpreter
    from grpo_run.trainers.rank.transports.gloo import GlooTransport, attempt_store

    return GlooTransport(
        attempt_store(connect_seconds),
        rank=rank,
        world_size=world_size,
        name=name,
        timeout_seconds=timeout_seconds,
        log=OwnLog(recorder, name, world_size=world_size),
    )
