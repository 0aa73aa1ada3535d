"""Preparation of an attempt while no rank is running: checkpoints, files and an empty board.

Called by the supervisor each time the agent is about to start ranks. Decides neither that an attempt starts
(`policy.py`) nor what is drained or loaded (`runtime/snapshots/drain_scheduler.py`); starts no process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.checkpoint_backups import HeldCheckpoints
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.slot import SnapshotName
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.setting_aside import set_aside


class AttemptPreparation:
    """Prepares the attempts of one run.

    Args:
        config: of the run.
        run: its directory.
        live: journal and history of the run.
        reporter: for events and messages.
        held: the checkpoints that no rank may remove.
        drains: writes the run's snapshots in memory to disk; None if there are none.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        *,
        live: LiveHistory,
        reporter: Reporter,
        held: HeldCheckpoints,
        drains: DrainScheduler | None,
    ) -> None:
        self._config = config
        self._run = run
        self._live = live
        self._reporter = reporter
        self._held = held
        self._drains = drains
        self._not_before = 0.0

    def delay(self, seconds: float) -> None:
        """Let the next attempt start no sooner than in so many seconds."""
        self._not_before = time.monotonic() + seconds

    def choose_snapshot(self, world_size: int, *, spares_memory: Callable[[], bool]) -> SnapshotName | None:
        """Wait until ranks may start, and settle what they resume from.

        A stop request ends the wait by an exception.

        Args:
            world_size: number of ranks on all nodes.
            spares_memory: whether the attempt is to find as much free memory as possible.

        Returns:
            the snapshot that the ranks load from memory; None if they load from disk.
        """
        time.sleep(max(0.0, self._not_before - time.monotonic()))
        forkserver.await_server(lambda text: self._reporter.warn(None, text))
        if set_aside(self._live.history, self._config, self._drains, self._reporter):
            self._held.forget()
        snapshot = None
        if self._drains is not None:
            snapshot = self._drains.prepare_attempt(world_size, spare_memory=spares_memory())
            self._live.read_ranks()
        self._held.hold()
        return snapshot

    def make_attempt(self, last: Attempt, workers: Sequence[Any]) -> Attempt:
        """Return the attempt after the last one; its files are not created yet.

        Args:
            last: whose files are closed.
            workers: torch elastic's workers of this node.
        """
        last.files.close()
        attempt = Attempt(
            self._run,
            last.number + 1,
            warn=self._reporter.warn,
            rank_of_local_rank={worker.local_rank: worker.global_rank for worker in workers},
            world_size=workers[0].world_size,
        )
        self._live.journal.attempt = attempt.number
        return attempt

    def clear_board(self, board: Board, attempt: Attempt) -> Board:
        """Return an empty board for the attempt: a new one if the file was removed, replaced or truncated."""
        if not board.has_full_size or not board.is_at(self._run.board):
            board = Board.create(self._run.board, board.slots)
        board.begin_attempt(attempt.number)
        return board
