"""The supervisor: polls the board and the ranks' exits, and directs the agent.

It implements the agent's `AttemptController`: `poll` is called about five times a second, more often while
ranks may be deadlocked, and immediately when a rank exits. The order after a fault is fixed: evidence on
disk, verdict, decision, and only then does the agent kill ranks (`faults.py`). An exception of the supervisor
itself ends in a joint stop of the ranks and a report (`outcome.py`). Does not start processes
(`runtime/processes/agent.py`), judge (`watchdog.diagnosis`), choose (`policy.py`) or render pages.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED, RunDirectoryError
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.checkpoint_backups import CheckpointBackups
from grpo_run.runtime.history.events import (
    AttemptStarted,
    CheckpointPublished,
    RankStarted,
    RunStarted,
    StateChanged,
    StopRequested,
)
from grpo_run.runtime.history.history import HistoryPart
from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent, RunState
from grpo_run.runtime.history.recovery import pending_rollback
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus, live_status, read_counts
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.files import read_facts
from grpo_run.runtime.processes import forkserver
from grpo_run.runtime.processes.agent import Directive
from grpo_run.runtime.processes.host_exchange import HostExchange
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.processes.termination import TerminatedProcess
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.slot import SnapshotName
from grpo_run.runtime.supervisor.advice import Advice
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.exit_hangs import Observe
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.runtime.supervisor.faults import FaultHandler
from grpo_run.runtime.supervisor.guardian import report
from grpo_run.runtime.supervisor.hang_monitor import HangMonitor
from grpo_run.runtime.supervisor.host_watch import HostWatch
from grpo_run.runtime.supervisor.incident import IncidentContext
from grpo_run.runtime.supervisor.no_trainer import NoTrainerWatch
from grpo_run.runtime.supervisor.other_hosts import OtherHosts
from grpo_run.runtime.supervisor.outcome import RunOutcome
from grpo_run.runtime.supervisor.points import FeatureFactory
from grpo_run.runtime.supervisor.setting_aside import set_aside
from grpo_run.runtime.supervisor.stop import StopRequest
from grpo_run.runtime.supervisor.stop_means import StopMeans, stop_code
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.diagnosis.exits import is_victim
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.stalls.step_clock import UNSEEN_SECONDS
from grpo_run.watchdog.text import counted
from grpo_run.watchdog.verdict import Verdict

LEAST_POLL_SECONDS = 0.01
"""Least time between two polls that are asked for."""
JOINT_STOP_POLL_SECONDS = 0.1
SAME_COMMANDS = (
    "run the same commands again, on these hosts or on others: they continue from the newest checkpoint, or"
    " begin if there is none."
)


class Supervisor:
    """Supervises one run from its start, or its resumption, to its end.

    Every method is called in the main thread, except `status` (any thread) and `stop.note` (signal handlers).

    Args:
        run: its directory, created and locked.
        local_world_size: number of ranks on this node.
        notify: shows a one-line message to the user.
        observe_exit: reads the processes that remain after the last line of every script.
        follow_output: receives the files that the ranks print to, by rank and descriptor, when an attempt
            starts.
        staging: where ranks place snapshots; None if they save directly.
        log: called with each event of the journal from now on.
        parts: of the history, which features replay.
        features: make the parts of features for this run.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        *,
        local_world_size: int,
        notify: Callable[[str], None],
        observe_exit: Observe,
        follow_output: Callable[[dict[tuple[int, int], Path]], None] = lambda files: None,
        staging: StagingArea | None = None,
        log: Callable[[Event], None] = lambda record: None,
        parts: Sequence[HistoryPart] = (),
        features: Sequence[FeatureFactory] = (),
    ) -> None:
        self.config = config
        self.run = run
        self._follow_output = follow_output
        self._live = LiveHistory(run.journal, config.run_id, log=log, parts=parts)
        self.history = self._live.history
        self.run_started_at = self.history.wall.first or time.time()
        self._reporter = Reporter(self._live, str(run.path), notify)
        with contextlib.suppress(RunDirectoryError):  # there is none, or of another version
            self._count_ranks(Board.open(run.board))
        self.board = Board.create(run.board, local_world_size)
        self.detector = HangDetector(self.board, config.deadlines, observe_exit=observe_exit)
        self.warn = self._reporter.warn
        self.backups = CheckpointBackups(
            run.checkpoint_backups, config.run_id, self.history.calls, warn=functools.partial(self.warn, None)
        )
        self._drains = self._schedule_drains(staging) if staging is not None else None
        self.lifecycle = Lifecycle(self._state_changed)
        self.features = [make(config, run, self.history, self._reporter) for make in features]
        self._faults = FaultHandler(
            config, run, lifecycle=self.lifecycle, reporter=self._reporter, history=self.history,
            features=self.features,
        )  # fmt: skip
        self._hangs = HangMonitor(
            self.detector, lifecycle=self.lifecycle, reporter=self._reporter, history=self.history
        )
        self.stop = StopRequest(config.timeouts, self.history)
        self._others = OtherHosts(run)
        self._host = HostWatch(run, self._drains, self._reporter, self.history)
        self._advice = Advice(
            functools.partial(read_facts, run.path), self.history.advice, self._reporter.advise
        )
        self._no_trainer = NoTrainerWatch(self.lifecycle, self._reporter, self.history)
        self._outcome = RunOutcome(
            config, run.incidents, live=self._live, reporter=self._reporter, lifecycle=self.lifecycle,
            drains=self._drains, features=self.features,
            interrupted=lambda: self.stop.noted or self.stop.requested,
        )  # fmt: skip
        self.attempt = Attempt(run, self.history.attempts - 1, warn=self.warn)
        self.expected_snapshot: SnapshotName | None = None
        """The snapshot that the ranks of this attempt load from memory."""
        self.discarded: tuple[int, int] | None = None
        """The call and the step from which on this attempt goes back; None if it does not."""
        self._host_lost = self._hosts_awaited = ""
        self._hosts_can_meet = True
        self._admits_from: tuple[int, int] | None = None
        self._start_not_before = 0.0
        self.leaves = False
        """The run ends on this node alone."""
        self.has_ranks = False
        """False while the agent waits in a rendezvous, during which `poll` is not called."""
        self._previous_poll_at = self._polled_at = self._ranks_started_at = time.monotonic()

    @property
    def loads_from_disk(self) -> bool:
        """Whether the ranks of this attempt load from disk what they could not load from memory."""
        return self._drains is not None and self._drains.loads_from_disk

    @property
    def exit_code(self) -> int | None:
        """The exit code of the run; None until it has ended."""
        return self._outcome.exit_code

    @property
    def sentence(self) -> str:
        """How the run ended; empty until it has."""
        return self._outcome.sentence

    def begin(self, *, world_size_local: int, accept_change: bool) -> None:
        """Write to the journal that this supervisor has taken over the run.

        Args:
            world_size_local: number of this node's ranks.
            accept_change: the user lets a changed script continue the run.

        Raises:
            RunDirectoryError: it could not be written, and the next supervisor would not know about this one.
        """
        self._host.begin()
        self._reporter.write(
            RunStarted(
                supervisor_pid=os.getpid(), world_size_local=world_size_local, accept_change=accept_change
            )
        )
        self._live.journal.sync()
        if self._live.journal.lost:
            raise RunDirectoryError(
                f"cannot write to {self.run.path}, the disk may be full; free some space and run the same"
                " command again"
            )

    def attempt_starting(self, workers: Sequence[Any], group_rank: int) -> Mapping[tuple[int, int], Path]:
        """Number the attempt, prepare its files and an empty board; return the files that ranks print to.

        A stop request ends the wait before a start by an exception.
        """
        here, all_ranks = len(workers), workers[0].world_size
        if all_ranks > here:
            place = f"host {group_rank + 1} of {all_ranks // here}"
            self._hosts_awaited = f"starting {here} of {counted(all_ranks, 'rank')}, {place}"
        time.sleep(max(0.0, self._start_not_before - time.monotonic()))
        self._settle_resumption(group_rank, workers[0].world_size // len(workers))
        self._faults.begin_attempt(group_rank)
        forkserver.await_server(functools.partial(self.warn, None))
        self._reporter.begin_attempt()
        self.attempt.files.close()
        attempt = self.attempt = Attempt(
            self.run,
            self.attempt.number + 1,
            warn=self.warn,
            rank_of_local_rank={worker.local_rank: worker.global_rank for worker in workers},
            world_size=workers[0].world_size,
        )
        self._count_ranks(self.board)
        self._live.journal.attempt = attempt.number
        attempt.make_files(self._reporter.notify)
        if not self.board.has_full_size or not self.board.is_at(self.run.board):
            self.board = Board.create(self.run.board, self.board.slots)
        self.board.begin_attempt(attempt.number)
        if self.stop.requested:
            self.board.request_stop()
        if self.lifecycle.state is not RunState.starting:
            self.lifecycle.fire(RunEvent.restarted)
        self._reporter.write(AttemptStarted(world_size=attempt.world_size, node=group_rank))
        files = attempt.outputs(self.config.output)
        self._follow_output(files)
        return files

    def _count_ranks(self, board: Board) -> None:
        """Keep what the ranks of an ended attempt have counted, before their board is cleared."""
        for counts in read_counts(board):
            self._reporter.write(counts)

    def _settle_resumption(self, host: int, hosts: int) -> None:
        """Set aside what a rollback discards, write what is not loaded from memory to disk, and keep the
        checkpoints from removal by ranks.

        Args:
            host: the number of this host in the attempt.
            hosts: of the attempt.
        """
        rollback = pending_rollback(self.history.recoveries)
        self.discarded = (rollback.train_call, rollback.before_step or 0) if rollback is not None else None
        if set_aside(self.history, self.config, self._drains, self._reporter):
            self.backups.forget()
        self.expected_snapshot = None
        if self._drains is not None:
            self.expected_snapshot = self._drains.prepare_attempt(
                spare_memory=self._host.spares_memory, host=host, hosts=hosts
            )
            self._live.read_ranks()
        self.backups.make()

    def rank_settings(self, rank: int) -> dict[str, dict[str, Any]]:
        """Return what features have for a rank of this attempt, by their names."""
        found = {one.name: one.rank_settings(rank, self.attempt.files) for one in self.features}
        return {name: settings for name, settings in found.items() if settings is not None}

    def attempt_started(self, ranks: RankGroup) -> None:
        """Begin to watch the ranks, which are running now."""
        self.has_ranks, self._host_lost, self._hosts_awaited = True, "", ""
        self._admits_from = None
        self._ranks_started_at = time.monotonic()
        pids = self.attempt.by_rank(ranks.pids)
        self._hangs.begin_attempt(self.attempt, self.board, pids, self._others.exchange)
        self._host.begin_attempt(pids)
        self._advice.begin_attempt()
        self._no_trainer.begin_attempt()
        self.stop.begin_attempt()
        for rank, pid in pids.items():
            self._reporter.write(RankStarted(rank=rank, pid=pid))

    def membership_changed(self, how: str = "") -> None:
        """Prepare for a restart of all ranks, because nodes joined or left."""
        self._reporter.notify(f"{how or 'nodes joined or left'}; restarting all ranks")
        self.has_ranks = False
        self.lifecycle.fire(RunEvent.membership_changed)

    def admits_hosts(self) -> bool:
        """Whether rank 0's host has a newer checkpoint than when it was asked first in this attempt."""
        if self._admits_from is None:
            self._admits_from = self.history.highest_checkpoint
        return not self.history.node and self.history.highest_checkpoint > self._admits_from

    def host_lost(self, sentence: str, *, can_meet: bool = True) -> None:
        """Take into account, at the next poll, that another host with ranks is lost.

        Args:
            sentence: which one, and how that is known.
            can_meet: the others can still meet and go on.
        """
        self._host_lost, self._hosts_can_meet = sentence, can_meet

    def hosts_met(self, exchange: HostExchange) -> None:
        """Talk to the other hosts of the attempt that starts."""
        self._others.begin_attempt(exchange)

    def hosts_awaited(self, text: str) -> None:
        """Show which hosts are waited for."""
        self._hosts_awaited = text

    def hosts_outside(self, clauses: Mapping[str, str]) -> None:
        """Say of a host that it does not take part, and show it."""
        for sentence in self._others.show_outside(clauses):
            self._reporter.warn(None, sentence)

    def end_without_hosts(self, sentence: str, exit_code: int) -> None:
        """End the run because its hosts cannot meet, or another host has ended it.

        Args:
            exit_code: 75 if another allocation, or the same hosts later, may meet.
        """
        if exit_code != EXIT_STOPPED:
            finished = exit_code == EXIT_FINISHED  # and this host has waited as a spare
            self._end(RunEvent.stopped if finished else RunEvent.gave_up, exit_code, sentence)
            return
        self._end(RunEvent.stopped, EXIT_STOPPED, f"{sentence} {SAME_COMMANDS.capitalize()}")

    def poll(self, ranks: RankGroup, exits: Sequence[Exit]) -> Directive:
        """Read the board and the journal once, take new exits into account, and direct the agent.

        Does not raise: an exception of the supervisor ends the run in order.
        """
        try:
            return self._poll(ranks, exits)
        except Exception as error:  # noqa: BLE001 - the ranks must be stopped and the failure reported, whatever it is
            return self._outcome.end_after_failure(error, self.attempt, lambda: self._stop_jointly(ranks))

    def seconds_to_poll(self) -> float:
        """How soon `poll` should be called again, so that a hang is proved in time; infinite for no certain
        time.
        """
        return max(LEAST_POLL_SECONDS, self.detector.due_at - time.monotonic())

    def _poll(self, ranks: RankGroup, exits: Sequence[Exit]) -> Directive:
        self._previous_poll_at, self._polled_at = self._polled_at, time.monotonic()
        unseen_seconds = self._polled_at - self._previous_poll_at
        if unseen_seconds > UNSEEN_SECONDS:
            self.stop.postpone(unseen_seconds)
        for reason in self.stop.take_noted():
            self.request_stop(reason)
        slots = self.attempt.read_slots(self.board)
        self.attempt.timeline.record(slots, self._polled_at)
        self._write_commit(slots)
        self._host.poll(self.attempt, self.board, self._polled_at)
        self._others.poll(str(self.lifecycle.state), slots, self._polled_at)
        self._live.read_ranks()
        for feature in self.features:
            feature.poll()
        outside = next(filter(None, [feature.fault(slots) for feature in self.features]), None)
        if self._drains is not None:
            try:
                self._drains.poll(ranks_have_loaded=self.attempt.have_loaded(slots))
            except (OSError, MemoryError) as error:
                text = f"snapshots cannot be written to disk at present: {error}"
                self._reporter.warn_once(0, "drains", text)
        if (short := self.stop.short_sentence()) is not None:
            self._reporter.warn(None, short)
        self._no_trainer.poll()
        for exit in exits:
            self.detector.rank_exited(exit.rank)
        self.attempt.exits.add(exits, slots)
        if outside is None and self._host_lost and all(map(is_victim, self.attempt.exits.failed)):
            outside = self._judge_lost_host(slots)
        if self.stop.signalled:
            return self._poll_signalled(ranks)
        # ranks that stop save what they have, and need nothing from outside
        if self.attempt.exits.failed or (outside is not None and ranks.alive and not self.stop.requested):
            return self._handle_fault(ranks, slots, outside=outside)
        if ranks.alive and self._others.has_fault:
            return self._handle_fault(ranks, slots)
        if self.attempt.exits.seen and not ranks.alive:
            self._others.completed(self.attempt, slots)
            if not self.attempt.exits.stopped:
                return self._end(RunEvent.completed, EXIT_FINISHED)
            self._end(RunEvent.stopped, EXIT_STOPPED)
            return Directive.stopped
        if self.stop.poll(ranks, self.attempt, slots, now=self._polled_at):
            return self._end(RunEvent.stopped, stop_code(self.history))
        if self.stop.signalled:
            return Directive.monitor
        return self._check_for_hangs(ranks, slots)

    def _judge_lost_host(self, slots: Mapping[int, Slot | None]) -> Verdict | None:
        """The verdict on a lost host; None if no rank of this one trains, and may need its ranks."""
        sentence, self._host_lost = self._host_lost, ""
        in_call = (RankState.training, RankState.failed)
        training = [slot for slot in slots.values() if slot is not None and slot.state in in_call]
        if not training:
            return None
        return Verdict(
            cause=Cause.node_lost,
            step=max(slot.step for slot in training) + 1,
            phase=phase.name if (phase := training[0].phase) is not None else None,
            confidence="deadline",
            sentence=sentence,
            signature=str(Cause.node_lost),
            final="" if self._hosts_can_meet else SAME_COMMANDS,
        )

    def _poll_signalled(self, ranks: RankGroup) -> Directive:
        """The ranks were sent SIGTERM: the script's own handlers run, and its exit code is the run's."""
        if not self.stop.handlers_are_over(ranks, self._polled_at):
            return Directive.monitor
        if ranks.alive:
            self._report_slow_stop(ranks)
        self._end(RunEvent.stopped, self.stop.exit_code(ranks, self.attempt.exits.seen))
        return Directive.terminate

    def report_terminated(self, terminated: list[TerminatedProcess]) -> None:
        """Report helpers of the ranks that were terminated."""
        report(self._reporter, terminated)

    def request_stop(self, reason: str) -> None:
        """Ask all ranks to agree on a step, save and exit. A second request terminates them immediately."""
        if not self.stop.request(time.monotonic(), reason):
            return
        self.board.request_stop()
        self._reporter.write(StopRequested(why=reason))
        slots = self.attempt.read_slots(self.board) if self.has_ranks else None
        self._reporter.notify(f"{reason}: {self.stop.describe(self.attempt, slots)}")
        self.lifecycle.fire(RunEvent.stop_requested)

    def stop_without_ranks(self, reason: str) -> None:
        """End the run while no rank is running; earlier checkpoints remain."""
        self.request_stop(reason)
        self._end(RunEvent.stopped, stop_code(self.history))

    def give_up(self, sentence: str) -> None:
        """End the run for a reason outside the ranks: the agent cannot continue.

        A run that has ended already keeps its exit code; the user is notified of the reason.
        """
        if self.exit_code is not None:
            self._reporter.notify(sentence)
            return
        self._end(RunEvent.gave_up, EXIT_GAVE_UP, sentence)

    def fail(self, error: BaseException) -> None:
        """End the run after an exception outside `poll`: in the agent, or while an attempt was prepared.

        The agent has terminated the ranks.
        """
        self._outcome.end_after_failure(error, self.attempt, lambda: False)

    def note_thread_failure(self, name: str, error: BaseException) -> None:
        """Report that a thread of the supervisor has ended with an exception. The run goes on without it."""
        self._outcome.report_thread(name, error, self.attempt)

    def status(self, *, complete: bool = True) -> RunStatus:
        """Return the status of the run from memory. Called by the metrics server and the terminal in their
        own threads.

        Args:
            complete: with the memory of the ranks, those that are late, and their collectives. The terminal
                shows none of them.
        """
        return live_status(
            (self.config.run_id, str(self.lifecycle.state), self.sentence), self.history, self.board,
            awaited=self.detector.awaited, blind=dict(self.detector.blind),
            journal_lost=self._live.journal.lost,
            host_memory=self._host.latest, complete=complete, hosts_awaited=self._hosts_awaited,
            hosts=self._others.status() if complete else (),
            collectives=self.detector.collective_progress() if complete else {},
        )  # fmt: skip

    def _write_commit(self, slots: dict[int, Slot | None]) -> None:
        commit = self.attempt.new_commit(slots)
        if commit is None:
            return
        self.backups.release()
        self.lifecycle.fire(RunEvent.step_committed)
        self._reporter.write(commit.as_event(wall_time=time.time(), now_seconds=time.monotonic()))
        self._advice.committed(self._polled_at)

    def _check_for_hangs(self, ranks: RankGroup, slots: dict[int, Slot | None]) -> Directive:
        """No rank has failed: check whether one hangs, or takes too long to stop."""
        now = time.monotonic()
        endless = self.stop.takes_long(now, self.history.step_seconds()) and self._hangs.outlasted(slots)
        if endless or self.stop.expired(now):
            self._report_slow_stop(ranks)
            return self._end(RunEvent.stopped, stop_code(self.history))
        finding = self._hangs.poll(slots)
        if (waits := self._advice.waits) is not None:
            phases = {rank: slot.phase if slot is not None else None for rank, slot in slots.items()}
            waits.polled(phases, self.detector.waiting(slots), self.detector.awaited, self._polled_at)
        return Directive.monitor if finding is None else self._handle_fault(ranks, slots, finding)

    def _report_slow_stop(self, ranks: RankGroup) -> None:
        """Report ranks that did not stop in time, or whose user asked again, before they are terminated."""
        self.detector.discard_recordings()
        waited_seconds = round(self.stop.waited_seconds(time.monotonic()), 1)
        self._faults.report_slow_stop(self._incident(ranks, stop_seconds=waited_seconds))

    def _handle_fault(
        self,
        ranks: RankGroup,
        slots: dict[int, Slot | None],
        finding: HangFinding | None = None,
        outside: Verdict | None = None,
    ) -> Directive:
        resolution = self._faults.handle(
            self._incident(ranks, finding=finding, outside=outside),
            slots,
            stopping=self.stop.requested,
            exits_unseen_since=max(self._previous_poll_at, self._ranks_started_at),
        )
        self._hangs.write_phase_durations()
        self._live.journal.sync()
        if resolution.restart:
            self.has_ranks = False
            self._start_not_before = time.monotonic() + resolution.delay_seconds
            return Directive.await_all if resolution.needs_all_hosts else Directive.restart
        self.leaves = resolution.leaves
        return self._end(resolution.event, resolution.exit_code, resolution.sentence)

    def _incident(self, ranks: RankGroup, **observed: Any) -> IncidentContext:
        return IncidentContext(
            attempt=self.attempt,
            ranks=ranks,
            board=self.board,
            detector=self.detector,
            best_position=self.history.best_position,
            kills_of=self._host.kills_of,
            join=lambda incident: self._others.join(incident, self.attempt, observed.get("finding")),
            **observed,
        )

    def _end(self, event: RunEvent, exit_code: int, sentence: str = "") -> Directive:
        if self._drains is not None:
            self._drains.keeps_parts = not self.has_ranks or not self._hosts_can_meet
        return self._outcome.end(event, exit_code, self.attempt, sentence)

    def end_features(self) -> None:
        """Let features end what they have started, and leave the other hosts: the run is over."""
        self._others.end()
        for feature in self.features:
            try:
                feature.end()
            except Exception as error:  # noqa: BLE001 - the others must end what they have started
                self.note_thread_failure(feature.name, error)

    def _stop_jointly(self, ranks: RankGroup) -> bool:
        """Let the ranks agree on a step, save and exit, and return whether all of them have.

        A rank that has failed already leaves nothing to agree on.
        """
        agreed = (StopMeans.vote, StopMeans.exit)
        slots = self.attempt.read_slots(self.board)
        if self.attempt.exits.failed or self.stop.means(self.attempt, slots) not in agreed:
            return False
        if not self.stop.requested:
            self.request_stop("failure of the supervisor")
        self.board.request_stop()
        deadline = time.monotonic() + self.config.timeouts.stop_seconds
        while ranks.alive and time.monotonic() < deadline and not self.stop.take_noted():
            exits = ranks.wait(JOINT_STOP_POLL_SECONDS)
            if any(exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED) for exit in exits):
                return False  # the others would wait for it
        return not ranks.alive

    def _schedule_drains(self, staging: StagingArea) -> DrainScheduler:
        drains = DrainScheduler(
            staging,
            write=self._reporter.write,
            warn=functools.partial(self.warn, None),
            preloaded=self.config.preload,
        )
        self._live.follow(CheckpointPublished, drains.note_published)
        return drains

    def _state_changed(self, old: RunState, event: RunEvent, new: RunState) -> None:
        self._reporter.write(StateChanged(before=str(old), state=str(new), because=event.value))
