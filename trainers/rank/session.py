"""What one rank holds for the length of one attempt: its slot, journal, vote group and count of `train()` calls.

Opened by the bootstrap before the script, found by the guard through `current()`. The vote group is connected
in the background while the script imports and builds. Does not touch Trainers.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import wrapt

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.trainers.rank.injector import Injector
from grpo_run.trainers.rank.recorder import Recorder, beat, serve

CONNECT_DEADLINE_SECONDS = 300.0
BEAT_SECONDS = 1.0
"""How often a thread says that the interpreter runs; a stuck one is looked for only after seconds."""

_current: Session | None = None


class Session:
    """See the module. `rank`, `world_size`, `local_rank` and `local_world_size` are torch elastic's."""

    def __init__(self, settings: RankSettings) -> None:
        run = RunDirectory(path=settings.config.run_directory)
        self.settings = settings
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        # virtual local ranks are all 0: the slot follows the rank's place on this node
        place = self.rank % self.local_world_size
        self.board = Board.open(run.board, writable=True)
        self.slot = self.board.writer(place, rank=self.rank, pid=os.getpid(), attempt=settings.attempt)
        self.journal = Journal(run.journal, settings.config.run_id)
        self.journal.attempt = settings.attempt
        self.recorder = Recorder(self.slot, self.warn_in_journal)
        self.injector: Injector | None = None
        self.train_calls = 0
        self.output_dirs: set[str] = set()
        self.saves_seen = self.board.requests[1]
        self._snapshots: Any = None
        self._said_no_room = False
        self._votes: Any = None
        self._failure: BaseException | None = None
        self._connector = threading.Thread(target=self._connect, daemon=True, name="grpo-run-vote")

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.settings.config

    def _arm(self) -> Injector | None:
        """A drill's faults, if this run is one."""
        if not self.config.injections:
            return None
        injector = Injector(
            self.config.injections,
            rank=self.rank,
            world_size=self.world_size,
            journal=self.journal,
            fired=self.settings.injections_fired,
        )
        self.slot.on_enter = lambda phase: injector.on_phase(phase, self.slot.step + 1)
        return injector

    def install(self) -> None:
        """Hook the guard into whatever the script will import, and start connecting the vote group."""
        from grpo_run.trainers.hooks.attach import install

        self.injector = self._arm()
        os.register_at_fork(after_in_child=self.slot.disown)
        self._beat = beat(self.slot, BEAT_SECONDS)
        wrapt.register_post_import_hook(self._record, "torch.distributed.distributed_c10d")
        self._connector.start()
        install(self)

    def _record(self, module: Any) -> None:
        from torch._C import _distributed_c10d

        self.recorder.install(_distributed_c10d)
        try:
            self._server = serve(self.settings.socket)
        except Exception as error:  # noqa: BLE001 - this runs inside the script's import of torch
            # the watch then says that it cannot see this rank's records, and judges by what is left
            self.warn_in_journal(f"no worker server: {error}")

    def _connect(self) -> None:
        try:
            self._votes = connect_votes(
                rank=self.rank,
                world_size=self.world_size,
                prefix="grpo_run/vote",  # the store is the attempt's own
                timeout_seconds=self.config.timeouts.vote_seconds,
                issued=self.issued,
            )
        except BaseException as error:  # noqa: BLE001 - a thread's failure belongs to the thread that waits for it
            self._failure = error  # raised by `votes`, in the thread that needs the group

    def issued(self, group: str, sequence: int, operation: str, tensor: Any, work: Any) -> None:
        """Note a collective of a group that is ours alone."""
        members = (1 << self.world_size) - 1 if self.world_size <= 64 else 0
        self.recorder.vote(group, sequence, operation, tensor, work, members=members)

    @property
    def votes(self) -> Any:
        """The vote group; waits for it to be connected.

        Raises:
            TimeoutError: the peers did not come within five minutes.
        """
        if self._votes is None:
            self._connector.join(CONNECT_DEADLINE_SECONDS)
            if self._failure is not None:
                raise self._failure
            if self._votes is None:
                raise TimeoutError(
                    f"the vote group was not connected within {CONNECT_DEADLINE_SECONDS:.0f} s"
                )
        return self._votes

    @property
    def is_main(self) -> bool:
        """Rank 0, which writes what all ranks agreed on."""
        return self.rank == 0

    def say(self, text: str) -> None:
        """A line for the person, in rank 0's output."""
        if self.is_main:
            print(f"grpo-run: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Say and journal what a person should know of: rank 0 does, once for all ranks."""
        if self.is_main:
            self.say(text)
            self.warn_in_journal(text)

    def warn_in_journal(self, text: str) -> None:
        """Journal what went wrong on this rank, whichever it is; nothing is printed."""
        self.journal.write("warning", rank=self.rank, text=text)

    @property
    def snapshots(self) -> Any:
        """This rank's `snapshot.Snapshots`; None where checkpoints are written directly."""
        if self._snapshots is None and self.config.snapshot_directory is not None:
            from grpo_run.runtime.staging.slots import Staging
            from grpo_run.trainers.saving.snapshots import Snapshots

            self._snapshots = Snapshots(self, Staging(self.config.snapshot_directory))
        return self._snapshots

    def cadence(self, first_step: int) -> Any:
        """When snapshots are due in the `train()` call that begins after `first_step`; None for never."""
        if self.config.snapshot_directory is None or self.config.snapshot_every == 0:
            return None
        from grpo_run.trainers.saving.cadence import Cadence

        def say(text: str, steps: int, cost_seconds: float, step_seconds: float) -> None:
            if self.is_main:
                self.say(text)
                self.journal.write(
                    "snapshot_interval",
                    rank=0,
                    steps=steps,
                    cost_seconds=cost_seconds,
                    step_seconds=step_seconds,
                    failure_seconds=self.settings.failure_seconds,
                )

        return Cadence(
            self.config.snapshot_every,
            failure_seconds=self.settings.failure_seconds,
            first_step=first_step,
            say=say,
            clock=time.monotonic,
        )

    def no_room(self, step: int) -> None:
        """Warn once an attempt that checkpoints cannot be kept in memory."""
        if not self._said_no_room:
            self._said_no_room = True
            self.warn(
                f"no memory for a snapshot at step {step}: the script's own checkpoints are written directly, and"
                " a fault costs the steps since the last one; the journal names the limit (in a container often"
                " /dev/shm itself: docker's --shm-size, or another file system in memory with --snapshot-dir)"
            )

    def close(self) -> None:
        """Let go of the vote group."""
        if self._votes is not None:
            self._votes.close()


def connect_votes(
    *,
    rank: int,
    world_size: int,
    prefix: str,
    timeout_seconds: float,
    issued: Any,
) -> Any:
    """Build the vote group on the attempt's store."""
    from torch._C._distributed_c10d import TCPStore

    from grpo_run.trainers.rank.vote import VoteGroup

    store = None
    if world_size > 1:
        store = TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=CONNECT_DEADLINE_SECONDS),
        )
    return VoteGroup(
        store,
        rank=rank,
        world_size=world_size,
        prefix=prefix,
        timeout_seconds=timeout_seconds,
        issued=issued,
    )


def open_session(settings: RankSettings) -> Session:
    """Open this process's session; once."""
    global _current
    assert _current is None, "a rank has one session"
    _current = Session(settings)
    return _current


def current() -> Session | None:
    """This process's session, None outside `grpo-run launch`."""
    return _current
