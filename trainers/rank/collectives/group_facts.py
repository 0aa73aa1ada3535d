"""What the recorder needs to know about a torch process group, read once per group. Called by `recorder.py`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(kw_only=True, slots=True)
class GroupFacts:
    """A torch process group, as far as its log entries need it.

    `reference` returns the group, or None once it is gone. `members` are its global ranks as a bit mask (0
    beyond 64 ranks). `comparable`: its sequence numbers can be compared with other ranks'. `uncounted` is by
    how many its sequence number is ahead of the Flight Recorder's, and `counting` how many calls are about to
    change that.
    """

    name: str
    reference: Callable[[], Any]
    ranks: tuple[int, ...]
    members: int
    on_host: bool
    comparable: bool
    uncounted: int = 0
    counting: int = 0


def examine(group: Any) -> GroupFacts:
    """Return facts about a torch process group."""
    import torch.distributed as dist

    ranks = tuple(dist.get_process_group_ranks(group))
    backends = {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")}
    return GroupFacts(
        name=group.group_name,
        reference=weakref.ref(group),
        ranks=ranks,
        members=0 if max(ranks, default=64) >= 64 else sum(1 << rank for rank in ranks),
        on_host=dist.get_backend(group) == "gloo",
        comparable=len(backends) == 1,
    )
