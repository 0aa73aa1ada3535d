"""The identity and connections of one rank in one attempt: board slot, journal, vote group, collective log.

The bootstrap opens the session before the script runs; `current()` returns it anywhere in the process. The
vote group is connected in a background thread, after the script has imported transformers and while it builds
its model. A process that is forked from the rank inherits the object, but is not the rank: there `is_rank` is
False, `current()` returns None, and nothing is written to the board or the journal. Does not know about
Trainers: `runtime/rank/step/guard.py` keeps what their calls share.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import wrapt

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history.events import WarningGiven
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.launch.imported_files import ImportedFiles
from grpo_run.runtime.launch.rank_settings import RankSettings
from grpo_run.runtime.rank.collective_recorder import Recorder, log_backward_passes
from grpo_run.runtime.rank.heartbeat import start_heartbeat
from grpo_run.runtime.rank.memory.device import DeviceMemory
from grpo_run.runtime.rank.memory.garbage_collection import AutomaticCollection
from grpo_run.runtime.rank.memory.phases import PhaseAccounting, ResidentMemory
from grpo_run.runtime.rank.transport import SharedMemoryTransport, Transport
from grpo_run.runtime.rank.vote import VoteGroup
from grpo_run.runtime.rank.worker_server import serve_thread_reports, start_worker_server
from grpo_run.runtime.upstream import torch_names
from grpo_run.watchdog.evidence.stack_capture import STACK_SIGNAL
from grpo_run.watchdog.observation import Phase, RankState

CONNECT_SECONDS = 300.0
"""Time limit for all ranks to connect to the vote group."""
HEARTBEAT_SECONDS = 1.0
"""Interval of the interpreter's heartbeat. The watchdog reacts only after several missed heartbeats."""

_current: Session | None = None


@dataclass(frozen=True, eq=False, slots=True)
class LeftLoop:
    """A loop that the script has left before its end.

    Attributes:
        phase: in which phase of a step.
        record: journals that the script has left the loop on purpose.
    """

    phase: Phase
    record: Callable[[], None]


class Session:
    """One rank in one attempt.

    `rank`, `world_size` and `local_world_size` come from torch elastic's environment variables.
    """

    def __init__(self, settings: RankSettings) -> None:
        run = RunDirectory(path=settings.config.run_directory)
        self._pid = os.getpid()
        self.settings = settings
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.local_world_size = int(os.environ["LOCAL_WORLD_SIZE"])
        # virtual local ranks are all 0, so the slot index is the rank's position on this node
        position = self.rank % self.local_world_size
        self.board = Board.map(run.board)
        self.slot = self.board.writer(position, rank=self.rank, pid=self._pid, attempt=settings.attempt)
        self.journal = Journal(run.journal, settings.config.run_id)
        self.journal.attempt = settings.attempt
        self.recorder = Recorder(self.slot, self.warn_in_journal)
        self.device_memory = DeviceMemory()
        self.host_memory = ResidentMemory()
        self.accounting = PhaseAccounting(
            self.slot.memory_area, self.device_memory.read, self.host_memory.read, warn=self.warn_in_journal
        )
        self.on_phase_change: list[Callable[[], None]] = []
        """Called while the phase before still runs."""
        self.on_beat: list[Callable[[], None]] = []
        """Called by the heartbeat's thread, about once a second. May not wait."""
        self._automatic_collection = AutomaticCollection()
        self.own_steps = 0
        """Optimizer steps that the script has taken by itself, with no Trainer and no loop."""
        self.left: LeftLoop | None = None
        """The loop that the script has left before its end, until another call begins."""
        self.script_ended = False
        """Whether the script has run its last line or has raised; its objects may be destroyed later."""
        self._imported = ImportedFiles(run.imports) if position == 0 else None
        self._process_groups: list[Any] = []
        self.fences: dict[str, Path] = {}
        """In a run over several hosts, how this attempt changes checkpoints (`fencing.py`), by the real path
        of the output directory."""
        self.rejected_checkpoints = 0
        """How many checkpoints this rank has rejected, and said so."""
        self._worker_server: Any = None
        self._votes: VoteGroup | None = None
        self._vote_groups: list[VoteGroup] = []
        self._connect_error: BaseException | None = None
        self._connector = threading.Thread(target=self._connect, daemon=True, name="grpo-run-vote")

    @property
    def config(self) -> RunConfig:
        """Configuration of the run."""
        return self.settings.config

    def fence(self, output_dir: str | os.PathLike[str]) -> Path | None:
        """The fence of an output directory; None on one host."""
        return self.fences.get(os.path.realpath(output_dir))

    @property
    def is_rank(self) -> bool:
        """Whether this process is the rank, and not one that was forked from it."""
        return os.getpid() == self._pid

    def start(self) -> None:
        """Start the heartbeat; log collectives and connect the vote group once the script has imported the
        libraries.
        """
        os.register_at_fork(after_in_child=self._leave_rank)
        start_heartbeat(self.slot, HEARTBEAT_SECONDS, also=self._beats)
        self.slot.on_change = self._phase_changes
        wrapt.register_post_import_hook(self.device_memory.connect, "torch.cuda.memory")
        wrapt.register_post_import_hook(self.device_memory.connect_accelerator, "torch.accelerator.memory")
        wrapt.register_post_import_hook(self._log_collectives, "torch.distributed.distributed_c10d")
        wrapt.register_post_import_hook(
            lambda module: log_backward_passes(self.recorder, module), "torch.nn.parallel.distributed"
        )
        # not earlier: connecting imports torch, and the script decides from where and with which environment
        wrapt.register_post_import_hook(lambda module: self.connect(), "transformers.trainer")

    def connect(self) -> None:
        """Begin to connect the vote group, in the background."""
        if not self._connector.ident:
            self._connector.start()

    @property
    def votes(self) -> VoteGroup:
        """The vote group. Blocks until it is connected.

        Raises:
            TimeoutError: it was not connected within `CONNECT_SECONDS`.
        """
        if self._votes is None:
            self.connect()
            self._connector.join(CONNECT_SECONDS)
            if self._connect_error is not None:
                raise self._connect_error
            if self._votes is None:
                raise TimeoutError(f"the vote group was not connected within {CONNECT_SECONDS:.0f} s")
        return self._votes

    def connect_vote_group(self, name: str) -> VoteGroup:
        """Connect another vote group of all ranks. Collective; call it once for each name.

        The ranks of one node use the board, those of several Gloo; a single rank needs no transport.

        Args:
            name: one of `runtime.board.exchange.CHANNELS`.
        """
        # a peer may be a whole rollout behind
        timeout_seconds = self.config.timeouts.vote_seconds
        transport: Transport | None = None
        if 1 < self.world_size == self.local_world_size:
            transport = SharedMemoryTransport(
                self.board.exchange(self.rank, attempt=self.settings.attempt, channel=name),
                name=name,
                rank=self.rank,
                timeout_seconds=timeout_seconds,
                recorder=self.recorder,
            )
        elif self.world_size > 1:
            # imports torch, which takes seconds in a fresh interpreter
            from grpo_run.runtime.rank.gloo_transport import GlooTransport, attempt_store

            transport = GlooTransport(
                attempt_store(CONNECT_SECONDS),
                rank=self.rank,
                world_size=self.world_size,
                name=name,
                timeout_seconds=timeout_seconds,
                recorder=self.recorder,
            )
        group = VoteGroup(transport)
        self._vote_groups.append(group)
        return group

    @property
    def host(self) -> int:
        """The number of this host among those of the attempt."""
        return self.rank // self.local_world_size

    @property
    def hosts(self) -> int:
        """How many hosts have ranks."""
        return self.world_size // self.local_world_size

    @property
    def leads_host(self) -> bool:
        """Whether this is the first rank of its host."""
        return self.rank % self.local_world_size == 0

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes what all ranks have agreed on."""
        return self.rank == 0

    def script_returned(self) -> None:
        """Note that the script has run its last line."""
        self.record_left_loop()
        self.script_ended = True
        self.record_imports()

    def script_raised(self) -> None:
        """Note that an exception ends the script. A loop that it has left counts as in progress."""
        self.script_ended = True
        if self.slot.train_call:
            self.record_imports()
        if self.is_rank and self.left is not None:
            self.slot.state = RankState.training
            self.slot.replace(self.left.phase)
            self.slot.publish()

    def record_left_loop(self) -> None:
        """Journal that the script has left a loop on purpose, if it has: something comes after the loop."""
        left, self.left = self.left, None
        if left is not None and self.is_rank:
            left.record()

    def record_imports(self) -> None:
        """Record the user's files that the script has imported by now, on the first rank of the node."""
        if self._imported is None or not self.is_rank:
            return
        try:
            self._imported.update(sys.modules)
        except OSError as error:
            self.warn_in_journal(f"the imported files could not be recorded: {error}")

    def notify(self, text: str) -> None:
        """Print a one-line message for the user, on rank 0 only."""
        if self.is_main and self.is_rank:
            print(f"grpo-run: {text}", file=sys.stderr, flush=True)

    def warn(self, text: str) -> None:
        """Print and journal a warning that concerns all ranks, on rank 0 only."""
        if self.is_main:
            self.notify(text)
            self.warn_in_journal(text)

    def show_warning(self, text: str) -> None:
        """Journal a warning that concerns this rank; the supervisor shows it to the user."""
        self.journal.write(WarningGiven(rank=self.rank, text=text, shown=True))

    def warn_in_journal(self, text: str) -> None:
        """Journal a warning that concerns this rank; print nothing."""
        self.journal.write(WarningGiven(rank=self.rank, text=text))

    def _phase_changes(self, ended: Phase | None, begun: Phase | None) -> None:
        for changes in self.on_phase_change:
            changes()
        self.accounting.changed(ended)
        if self.config.cleanup_every:
            self._automatic_collection.changed(begun)

    def _beats(self) -> None:
        self._automatic_collection.beat()
        for beat in self.on_beat:
            beat()

    def _leave_rank(self) -> None:
        """In a process that was just forked from the rank: let nothing of it act for the rank."""
        self.slot.detach()
        self._automatic_collection.restore()
        for group in self._vote_groups:
            group.detach()
        # the rank's file of stacks is evidence; a crash of this process is printed like its other output
        faulthandler.unregister(STACK_SIGNAL)
        faulthandler.enable(2)

    def keep_process_group(self) -> None:
        """Keep the default process group until the process exits, also if the script destroys it.

        torch's destructor of a Gloo group joins threads while it holds the GIL, which those threads may need.
        DDP's reducer calls it when the script frees its model as the last holder of the group.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available() or not distributed.is_initialized():
            return
        group = distributed.group.WORLD
        if not any(kept is group for kept in self._process_groups):
            self._process_groups.append(group)

    def close(self) -> None:
        """Release the vote groups."""
        for group in self._vote_groups:
            group.close()

    def _log_collectives(self, module: Any) -> None:
        self.recorder.install(torch_names.distributed_c10d())
        try:
            serve_thread_reports(self.recorder)
            self._worker_server = start_worker_server(self.settings.socket)
        except Exception as error:  # noqa: BLE001 - this runs inside the script's import of torch
            # the watchdog then reports that it has no Flight Recorder data of this rank
            self.warn_in_journal(f"the worker server did not start: {error}")

    def _connect(self) -> None:
        try:
            self._votes = self.connect_vote_group("grpo_run/vote")
        except BaseException as error:  # noqa: BLE001 - `votes` raises it in the thread that needs the group
            self._connect_error = error


def open_session(settings: RankSettings) -> Session:
    """Open this process's session. Call it once."""
    global _current
    assert _current is None, "a rank has one session"
    _current = Session(settings)
    return _current


def current() -> Session | None:
    """Return this process's session; None outside `grpo-run launch`, and in a process forked from a rank."""
    return _current if _current is not None and _current.is_rank else None


def is_forked_from_rank() -> bool:
    """Whether this process was forked from a rank, and is thus no rank itself."""
    return _current is not None and not _current.is_rank
