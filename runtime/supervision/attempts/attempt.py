"""One attempt on this node: its number, files and ranks, and what has been observed of them.

The supervisor creates an `Attempt` before the agent starts ranks and drops it when the next one begins. Does
not start or terminate processes and takes no decision.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.runtime.record.commits import Commit, newest_commit
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision.attempts.exits import Exits
from grpo_run.runtime.supervision.memory.growth import MemoryGrowth
from grpo_run.watchdog.accounting.phase_memory import RankMemory
from grpo_run.watchdog.evidence.timeline import Timeline
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.out_of_memory.retries import RetryWatch


class Attempt:
    """State of one attempt.

    Args:
        run: the run directory.
        number: of the attempt, 0 for the first one of the run.
        warn: receives (rank, text) for warnings about exits.
        rank_of_place: global rank by place; a place is a local rank, and the index of its slot on the board.
        world_size: number of ranks on all nodes.
    """

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        *,
        warn: Callable[[int, str], None],
        rank_of_place: Mapping[int, int] = MappingProxyType({}),
        world_size: int = 0,
    ) -> None:
        self.number = number
        self.files = AttemptFiles(run, number)
        self.rank_of_place = dict(rank_of_place)
        self.place_of_rank = {rank: place for place, rank in self.rank_of_place.items()}
        self.world_size = world_size
        self.exits = Exits(self.files, warn)
        self.timeline = Timeline()
        self.growth = MemoryGrowth()
        self.retries = RetryWatch()
        self._has_devices = True
        """Of the ranks' memory on devices."""
        self.committed = (0, 0)
        """(train call, step) of the newest step committed in this attempt."""

    @property
    def on_several_nodes(self) -> bool:
        """Whether other nodes have ranks too."""
        return self.world_size > len(self.rank_of_place)

    def outputs(self, output: Output) -> dict[tuple[int, int], Path]:
        """The files that the local ranks print to, by rank and descriptor: 1, and 2 where that has one of its own."""
        files = {(rank, 1): self.files.log(rank) for rank in self.place_of_rank}
        if output is Output.apart:
            files |= {(rank, 2): self.files.errors(rank) for rank in self.place_of_rank}
        return files

    @property
    def sockets(self) -> dict[int, str]:
        """The path of the worker server's socket of each local rank."""
        return {rank: str(self.files.socket(rank)) for rank in self.place_of_rank}

    def by_rank(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return process ids by global rank, from process ids by place."""
        return {self.rank_of_place[place]: pid for place, pid in pids.items()}

    def make_files(self, notify: Callable[[str], None]) -> None:
        """Create the directory of the attempt, elsewhere if the disk of the run does not take it.

        Raises:
            OSError: it cannot be created anywhere.
        """
        error = self.files.make()
        if error is not None:
            full = error.errno in NO_SPACE_ERRNOS
            reason = (
                "the disk of the run directory is full"
                if full
                else f"the run directory cannot be used: {error}"
            )
            notify(f"{reason}; the ranks' output of attempt {self.number} is in {self.files.folder}")

    def read_slots(self, board: Board) -> dict[int, Slot | None]:
        """Read the slot of every local rank; None for one that cannot be read."""
        slots = board.read_all()
        return {rank: slots[place] for place, rank in self.rank_of_place.items()}

    def read_memory(self, board: Board) -> dict[int, RankMemory]:
        """Read what the local ranks have measured of their memory."""
        found = {rank: board.rank_memory(place) for place, rank in self.rank_of_place.items()}
        return {rank: memory for rank, memory in found.items() if memory is not None}

    def new_commit(self, slots: Mapping[int, Slot | None], board: Board) -> Commit | None:
        """Return the newest committed step if it is new in this attempt, else None."""
        commit = newest_commit(slots, self.world_size)
        if commit is None:
            return None
        position = (commit.train_call, commit.step)
        known = self.committed if commit.train_call == self.committed[0] else (0, 0)
        if position <= max(known, (commit.train_call, commit.resumed_step)):
            return None  # the next call of the script may have a lower number in the run
        self.committed = position
        self.growth.committed(lambda: self.read_memory(board))
        self._watch_retries(commit.step, slots, board)
        return commit

    def _watch_retries(self, step: int, slots: Mapping[int, Slot | None], board: Board) -> None:
        if not self._has_devices:
            return
        memory = self.read_memory(board)
        # a rank that has measured nothing yet may have one
        self._has_devices = any(one.has_device or not one.readings for one in memory.values()) or not memory
        tokens = sum(slot.tokens_generated for slot in slots.values() if slot is not None)
        self.retries.committed(step, time.monotonic(), tokens, memory)

    def have_loaded(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether the ranks have loaded what they resume from: they have finished a step, or save already."""
        saving = any(slot is not None and slot.phase is Phase.checkpoint for slot in slots.values())
        return saving or self.committed != (0, 0)
