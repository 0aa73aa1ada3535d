"""How the calls of all ranks reach every rank: over grpo-run's own group, or over torch's default group.

Under `grpo-run launch` the first call connects a vote group of its own (`rank/vote_group.py`), so that the
calls mix neither with the step vote nor with collectives of the script. Elsewhere, for example under torchrun,
they are an `all_gather` on torch's default group. Called by `functions.py`. Does not compare calls.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.consensus.call import Call
from grpo_run.trainers.rank.session import Session, current, is_forked_from_rank
from grpo_run.watchdog.deadlocks.collectives import CONSENSUS_GROUP

if TYPE_CHECKING:
    from grpo_run.trainers.rank.vote_group import VoteGroup

_groups: dict[Session, VoteGroup] = {}


def exchange(call: Call) -> list[list[int]] | None:
    """Send this rank's call and return every rank's, in the order of the ranks; None with one rank. Collective.

    Raises:
        UsageError: no process group connects the ranks.
    """
    session = current()
    if session is not None:
        if session.world_size == 1:
            return None
        if session not in _groups:
            _groups[session] = session.connect_vote_group(CONSENSUS_GROUP)
        return _groups[session].gather(call.encode())
    if is_forked_from_rank():
        raise UsageError(
            f"{call.site.text} was called in a process that a rank has forked: call it in the rank itself"
        )
    return _gather_on_default_group(call)


def _gather_on_default_group(call: Call) -> list[list[int]] | None:
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                f"{call.site.text} was called before the ranks were connected (WORLD_SIZE is"
                f" {os.environ['WORLD_SIZE']}): call torch.distributed.init_process_group first, or start the script with"
                " grpo-run launch"
            )
        return None
    ranks = distributed.get_world_size()
    if ranks == 1:
        return None
    import torch

    own = torch.tensor(call.encode(), dtype=torch.int64, device=_device(distributed.get_backend_config()))
    gathered = [torch.empty_like(own) for _ in range(ranks)]
    distributed.all_gather(gathered, own)
    return [tensor.tolist() for tensor in gathered]


def _device(backends: str) -> str:
    """Return the kind of device on which the default group communicates; the CPU if it can.

    Args:
        backends: torch's configuration of the group: `cpu:gloo,cuda:nccl`.
    """
    kinds = [part.partition(":")[0] for part in backends.split(",")]
    return "cpu" if "cpu" in kinds else kinds[0]
