"""One attempt on this node: its number, files and ranks, which ranks have exited, and which failed.

The supervisor creates an `Attempt` before the agent starts ranks, adds the exits that the agent reports,
and drops it when the next attempt begins. The incident investigation waits briefly for further exits. Reads
the error files that ranks write. Starts and terminates no process and decides nothing; which rank caused a
failure is determined in `watchdog/diagnosis/exits.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_STOPPED
from grpo_run.runtime.files import NO_SPACE_ERRNOS
from grpo_run.runtime.history.attempt_files import AttemptFiles
from grpo_run.runtime.history.progress import Commit, newest_commit
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import Output
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.watchdog.diagnosis.exits import end_text
from grpo_run.watchdog.evidence.timeline import PhaseTimeline
from grpo_run.watchdog.memory.error_patterns import OUTPUT_BYTES, needs_output, reported_in
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Exit, Phase, RankError, RankState, Slot


class Exits:
    """Exits of one attempt, in the order in which they were observed.

    Args:
        warn: receives (rank, text) for a rank that crashed after its script had completed, or left it with
            code 0.
    """

    def __init__(self, files: AttemptFiles, warn: Callable[[int, str], None]) -> None:
        self._files = files
        self._warn = warn
        self.seen: list[Exit] = []
        self.seen_at: dict[int, float] = {}
        """By rank, in seconds since the epoch."""

    @property
    def failed(self) -> list[Exit]:
        """Exits of ranks whose script did not complete."""
        return [exit for exit in self.seen if not exit.completed]

    @property
    def stopped(self) -> bool:
        """Whether a rank exited because all ranks agreed to stop."""
        return any(exit.exit_code == EXIT_STOPPED for exit in self.seen)

    def add(self, exits: Iterable[Exit], slots: Mapping[int, Slot | None]) -> None:
        """Record exits, each with its error file and with whether its script completed.

        Args:
            exits: new exits.
            slots: the latest reading of each rank's slot; None for one that could not be read.
        """
        for exit in exits:
            slot = slots.get(exit.rank)
            done = slot is not None and slot.state is RankState.done
            if done and exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED):
                self._warn(
                    exit.rank,
                    f"rank {exit.rank} {end_text(exit)} after its script had completed; its work is not lost",
                )
            # a script may end with os._exit(0) after its last train() call, but not inside one
            training = slot is not None and slot.state is RankState.training
            left = exit.exit_code == EXIT_FINISHED and not done and not training
            if left:
                if slot is not None and slot.has_returned:
                    how = "while threads of its script ran"
                else:
                    called = slot is not None and slot.train_call
                    how = "after its last train() call" if called else "by itself"
                    how = f"{how}, without running the script's last line"
                text = f"rank {exit.rank} exited with code 0 {how} (os._exit?); it counts as finished"
                self._warn(exit.rank, text)
            self.seen.append(self._explained(replace(exit, completed=done or left)))
            self.seen_at[exit.rank] = time.time()

    def _explained(self, exit: Exit) -> Exit:
        """The exit with the error that the rank has left, and what its output adds to that."""
        exit = replace(exit, error=self._files.read_error(exit.rank))
        if exit.completed or not needs_output(exit):
            return exit
        said = reported_in(self._files.output_end(exit.rank, OUTPUT_BYTES), exit, time.time())
        return replace(exit, error=said) if said is not None else exit

    def errors_of_others(self, ranks: Iterable[int]) -> dict[int, RankError]:
        """Return the errors that ranks which have not been seen to exit have left, by rank.

        Args:
            ranks: of this node.
        """
        left = set(ranks) - {exit.rank for exit in self.seen}
        errors = {rank: self._files.read_error(rank) for rank in sorted(left)}
        return {rank: error for rank, error in errors.items() if error is not None}

    def wait(
        self,
        ranks: RankGroup,
        seconds: float,
        slots: Mapping[int, Slot | None],
        *,
        until: Collection[int] = (),
    ) -> None:
        """Wait up to `seconds` for further exits; returns early when no rank is alive.

        Args:
            until: ranks; returns as soon as their exits were seen. All that are alive by default.
        """
        deadline = time.monotonic() + seconds
        while ranks.alive and (remaining := deadline - time.monotonic()) > 0:
            self.add(ranks.wait(remaining), slots)
            if until and not set(until) - {exit.rank for exit in self.seen}:
                return


class Attempt:
    """State of one attempt.

    Args:
        run: the run directory.
        number: of the attempt, 0 for the first one of the run.
        warn: receives (rank, text) for warnings about exits.
        rank_of_local_rank: global rank by local rank, which is the index of its slot on the board.
        world_size: number of ranks on all nodes.
    """

    def __init__(
        self,
        run: RunDirectory,
        number: int,
        *,
        warn: Callable[[int, str], None],
        rank_of_local_rank: Mapping[int, int] = MappingProxyType({}),
        world_size: int = 0,
    ) -> None:
        self.number = number
        self.files = AttemptFiles(run, number)
        self.rank_of_local_rank = dict(rank_of_local_rank)
        self.local_rank_of = {rank: local for local, rank in self.rank_of_local_rank.items()}
        self.world_size = world_size
        self.exits = Exits(self.files, warn)
        self.timeline = PhaseTimeline()
        self.committed = (0, 0)
        """(train call, step) of the newest step committed in this attempt."""

    @property
    def on_several_nodes(self) -> bool:
        """Whether other nodes have ranks too."""
        return self.world_size > len(self.rank_of_local_rank)

    def outputs(self, output: Output) -> dict[tuple[int, int], Path]:
        """The files that the local ranks print to, by rank and descriptor: 1, and 2 where that has one of its
        own.
        """
        files = {(rank, 1): self.files.log(rank) for rank in self.local_rank_of}
        if output is Output.apart:
            files |= {(rank, 2): self.files.errors(rank) for rank in self.local_rank_of}
        return files

    @property
    def sockets(self) -> dict[int, str]:
        """The path of the worker server's socket of each local rank."""
        return {rank: str(self.files.socket(rank)) for rank in self.local_rank_of}

    def by_rank(self, pids: Mapping[int, int]) -> dict[int, int]:
        """Return process ids by global rank, from process ids by local rank."""
        return {self.rank_of_local_rank[local_rank]: pid for local_rank, pid in pids.items()}

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
        return {rank: slots[local] for local, rank in self.rank_of_local_rank.items()}

    def read_memory(self, board: Board) -> dict[int, RankMemory]:
        """Read what the local ranks have measured of their memory."""
        found = {rank: board.rank_memory(local) for local, rank in self.rank_of_local_rank.items()}
        return {rank: memory for rank, memory in found.items() if memory is not None}

    def new_commit(self, slots: Mapping[int, Slot | None]) -> Commit | None:
        """Return the newest committed step if it is new in this attempt, else None."""
        commit = newest_commit(slots, self.world_size)
        if commit is None:
            return None
        position = (commit.train_call, commit.step)
        known = self.committed if commit.train_call == self.committed[0] else (0, 0)
        if position <= max(known, (commit.train_call, commit.resumed_step)):
            return None  # the next call of the script may have a lower number in the run
        self.committed = position
        return commit

    def have_loaded(self, slots: Mapping[int, Slot | None]) -> bool:
        """Whether the ranks have loaded what they resume from: they have finished a step, or save already."""
        saving = any(slot is not None and slot.phase is Phase.checkpoint for slot in slots.values())
        return saving or self.committed != (0, 0)
