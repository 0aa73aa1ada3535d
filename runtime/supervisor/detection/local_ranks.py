"""The ranks of this node in the current attempt, as the hang detectors address them. Plain data."""

from __future__ import annotations

from dataclasses import dataclass

from grpo_run.runtime.board.board import Board


@dataclass(frozen=True, kw_only=True)
class LocalRanks:
    """Where to read each rank of this node; all mappings are by global rank.

    `local_ranks` is the index of each rank's slot. `pids` and `sockets` (of torch's worker servers) lose a rank
    when its process exits. `world_size` counts the ranks of all nodes.
    """

    board: Board
    local_ranks: dict[int, int]
    pids: dict[int, int]
    sockets: dict[int, str]
    world_size: int

    @property
    def are_whole_world(self) -> bool:
        """Whether no rank runs on another node."""
        return len(self.local_ranks) == self.world_size

    def remove(self, rank: int) -> None:
        """Forget the process of a rank that has exited; its slot stays readable."""
        self.pids.pop(rank, None)
        self.sockets.pop(rank, None)
