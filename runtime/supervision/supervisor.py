"""The supervisor: watches the board and the ranks' exits, and decides with the policy what follows.

It is the agent's conductor: `observe` is called about ten times a second and at once when a rank ends. It keeps
the order that the project stands on: fault, evidence on disk, verdict, decision, and only then the kill.
Does not start processes (`agent.py`), judge (`watchdog.verdicts.failure`), choose (`policy.py`) or draw pages.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.detection.detector import Finding, Watch
from grpo_run.runtime.errors import (
    EXIT_FINISHED,
    EXIT_GAVE_UP,
    EXIT_STOPPED,
    EXIT_USAGE,
    RunDirectoryError,
    UsageError,
)
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.processes.agent import Next
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.attempt_files import AttemptFiles
from grpo_run.runtime.record.commits import newest_commit
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.journal import Journal, JournalReader
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.record.status import RunStatus, verdict_sentence
from grpo_run.runtime.staging.drain_scheduler import Drains
from grpo_run.runtime.staging.slots import Staging
from grpo_run.runtime.supervision.exits import Exits
from grpo_run.runtime.supervision.incident import Case, inquire
from grpo_run.runtime.supervision.lifecycle import Event, Lifecycle, State
from grpo_run.runtime.supervision.notices import Notices
from grpo_run.runtime.supervision.policy import RESTARTS, Action, Decision, decide
from grpo_run.watchdog.evidence.timeline import Timeline
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.stalls.detection import stragglers
from grpo_run.watchdog.verdict import Verdict
from grpo_run.watchdog.verdicts import failure

_USAGE: list[type[UsageError]] = [UsageError, *UsageError.__subclasses__()]
USAGE_ERRORS = frozenset(error.__name__ for error in _USAGE)
"""What a rank's guard or recipe raises about the user's settings; a script's own `sys.exit(2)` is none of them."""

LEARNED_EVERY_SECONDS = 60.0


class Supervisor:
    """See the module. One a run and process; every method runs in the main thread, but `status` in any.

    Args:
        config: the run.
        run: its directory, created and locked.
        local_world_size: ranks on this node.
        rank_environment: our own variables for a rank, from (rank, attempt, world size, first attempt).
        say: prints a line for the person.
        staging: where ranks put snapshots; None where they save directly.
    """

    def __init__(
        self,
        config: RunConfig,
        run: RunDirectory,
        *,
        local_world_size: int,
        rank_environment: Callable[[Supervisor, int, int], dict[str, str]],
        say: Callable[[str], None],
        attempt_output: Callable[[dict[int, Path]], None] = lambda files: None,
        staging: Staging | None = None,
    ) -> None:
        self.config = config
        self.run = run
        self._rank_environment = rank_environment
        self._say = say
        self._attempt_output = attempt_output
        self._reader = JournalReader(run.journal)
        self.history = History.of(self._reader.new())
        self.started_before = self.history.attempts > 0
        self.board = Board.create(run.board, local_world_size)
        self.watch = Watch(self.board, config.deadlines)
        self._timeline = Timeline()
        self._suspected: str | None = None
        self._learned_at = time.monotonic()
        self.journal = Journal(run.journal, config.run_id)
        self._losing = False
        """Somebody was told in this attempt that the disk does not take the journal."""
        self._notices = Notices(self._warn)
        self._drains = (
            Drains(
                staging,
                write=self._write,
                warn=lambda text: self._warn(None, text),
                preloaded=config.preload,
            )
            if staging is not None
            else None
        )
        self.lifecycle = Lifecycle(self._state_changed)
        self.attempt = self.history.attempts - 1
        self.files = AttemptFiles(run, self.attempt)
        self.run_started_at = self.history.first_time or time.time()
        self.exit_code: int | None = None
        self.sentence = ""
        self._ranks_by_place: dict[int, int] = {}
        self._world_size = 0
        self._committed: tuple[int, int] = (0, 0)
        self._exits = Exits(self.files, self._warn)
        self._stop_deadline: float | None = None
        self._last_look = self._observed_at = time.monotonic()
        self._stop_asked = False
        self._stops_noted: list[str] = []
        self.has_ranks = False
        """False while the agent waits in a rendezvous, where no look is taken."""

    def begin(self, **fields: Any) -> None:
        """Write that this supervisor has taken the run up.

        Raises:
            RunDirectoryError: that could not be written, and the next one would not know of this one.
        """
        self.journal.write("run_started", supervisor_pid=os.getpid(), **fields)
        self.journal.sync()
        if self.journal.lost:
            raise RunDirectoryError(
                f"{self.run.path} takes no line, its disk may be full; make room, then run the same command again"
            )
        self._catch_up()

    # what the agent asks of its conductor

    def attempt_environment(self, worker: Any, world_size: int, restart_count: int) -> dict[str, str]:
        """Our variables for one rank."""
        return self._rank_environment(self, worker.global_rank, world_size)

    def log_path(self, rank: int) -> Path:
        """The rank's output in the present attempt."""
        return self.files.log(rank)

    def attempt_starting(self, workers: Sequence[Any], group_rank: int) -> None:
        """A new attempt: its number, its directory, an empty board."""
        if self._drains is not None:
            self._drains.settle(restore=True)
            self._catch_up()
        self.attempt += 1
        self.journal.attempt = self.attempt
        self.files = AttemptFiles(self.run, self.attempt)
        elsewhere = self.files.make()
        if elsewhere is not None:
            self._say(
                f"the disk of {self.run.path} is full: what ranks print in attempt {self.attempt} is in {elsewhere}"
            )
        if not self.board.intact or not self.run.board.exists():
            self.board = Board.create(self.run.board, self.board.slots)  # somebody took it away
        self.board.begin_attempt(self.attempt)
        self._timeline.clear()
        self._suspected = None
        self._notices.begin_attempt()
        self._losing = False
        if self._stop_asked:
            self.board.request_stop()
        self._ranks_by_place = {worker.local_rank: worker.global_rank for worker in workers}
        self._world_size = workers[0].world_size
        self._exits = Exits(self.files, self._warn)
        self._committed = (0, 0)
        if self.lifecycle.state is State.recovering:
            self.lifecycle.fire(Event.restarted)
            if self._stop_asked:
                self.lifecycle.fire(Event.stop_requested)  # it came between two attempts
        self._write("attempt_started", world_size=workers[0].world_size, node=group_rank)
        self._attempt_output({worker.global_rank: self.log_path(worker.global_rank) for worker in workers})

    def attempt_started(self, ranks: RankGroup) -> None:
        """The ranks are there."""
        self.has_ranks = True
        rank_of = self._ranks_by_place
        self.watch.learned.before = self.history.learned_durations()
        self.watch.begin_attempt(
            self.board,
            {rank: place for place, rank in rank_of.items()},
            {rank_of[place]: pid for place, pid in ranks.pids.items()},
            {rank: str(self.files.socket(rank)) for rank in rank_of.values()},
            self._world_size,
        )
        for place, pid in ranks.pids.items():
            self._write("rank_started", rank=self._ranks_by_place[place], pid=pid)

    def membership_changed(self, ranks: RankGroup) -> None:
        """Nodes came or went; the rendezvous wants everybody anew."""
        self._say("nodes joined or left; restarting all ranks")
        self.has_ranks = False
        self.lifecycle.fire(Event.fault)
        self.lifecycle.fire(Event.evidence_written)

    def note_stop(self, why: str) -> None:
        """Note that a stop is wanted; safe in a signal handler. Acted on at the next look."""
        self._stops_noted.append(why)

    def request_stop(self, why: str) -> None:
        """Ask all ranks to agree on a step, save and leave. A second request ends them without waiting."""
        now = time.monotonic()
        if self._stop_asked:
            self._stop_deadline = now
            return
        self._stop_asked = True
        self._stop_deadline = now + self.config.timeouts.stop_seconds
        self.board.request_stop()
        self._write("stop_requested", why=why)
        self._say(
            f"{why}: stopping at the next step all ranks agree on, with a checkpoint (again to end at once)"
        )
        if self.lifecycle.state in (State.starting, State.running, State.suspect):
            self.lifecycle.fire(Event.stop_requested)

    def stop_without_ranks(self, why: str) -> None:
        """End the run while no rank exists; what was saved before counts."""
        self.request_stop(why)
        if self.lifecycle.state is State.recovering:
            self.lifecycle.fire(Event.restarted)
            self.lifecycle.fire(Event.stop_requested)
        self._end(Event.stopped, EXIT_STOPPED)

    def give_up(self, sentence: str) -> None:
        """End the run for a reason outside any rank; called when the agent could not go on."""
        self.sentence = sentence
        if self.lifecycle.state not in (State.collecting, State.recovering):
            self.lifecycle.fire(Event.fault)
        if self.lifecycle.state is State.collecting:
            self.lifecycle.fire(Event.evidence_written)  # there is none: no rank failed
        self._end(Event.gave_up, EXIT_GAVE_UP)

    def observe(self, ranks: RankGroup, exits: Sequence[Exit]) -> Next:
        """One look. See the class."""
        self._last_look, self._observed_at = self._observed_at, time.monotonic()
        while self._stops_noted:
            self.request_stop(self._stops_noted.pop(0))
        slots = self._slots()
        self._timeline.note(slots, self._observed_at)
        self._note_commits(slots)
        self._catch_up()
        if self._drains is not None:
            self._drains.look()
        for exit in exits:
            self.watch.rank_left(exit.rank)
        self._exits.add(exits, slots)
        if self._exits.failed:
            return self._fault(ranks, slots)
        if self._exits.seen and not ranks.alive:
            return self._all_left()
        return self._watch(ranks, slots)

    def status(self) -> RunStatus:
        """How the run stands, from memory; called by the metrics server in its own thread."""
        state = str(self.lifecycle.state)
        return RunStatus(
            run_id=self.config.run_id,
            state=state,
            sentence=self.sentence or verdict_sentence(state, self.history),
            history=self.history,
            slots=tuple(self.board.read_all()),
            supervisor_pid=os.getpid(),
            blind=dict(self.watch.blind),
            journal_lost=self.journal.lost,
        )

    # inside

    def _slots(self) -> dict[int, Slot | None]:
        return {rank: self.board.read(place) for place, rank in self._ranks_by_place.items()}

    def _note_commits(self, slots: dict[int, Slot | None]) -> None:
        commit = newest_commit(slots, self._world_size)
        if commit is None:
            return
        position = (commit.train_call, commit.step)
        if position <= max(self._committed, (commit.train_call, commit.resumed_step)):
            return
        self._committed = position
        if self.lifecycle.state in (State.starting, State.running, State.suspect, State.stopping):
            self.lifecycle.fire(Event.step_committed)
        self._write(
            "step_committed",
            step=commit.step,
            train_call=commit.train_call,
            target_steps=commit.target_steps,
            committed_at=time.time() - (time.monotonic() - commit.voted_at_seconds),
        )

    def _all_left(self) -> Next:
        if any(exit.exit_code == EXIT_STOPPED for exit in self._exits.seen):
            if self.lifecycle.state is not State.stopping:
                self.lifecycle.fire(Event.stop_requested)  # asked for on another node
            self._end(Event.stopped, EXIT_STOPPED)
            return Next.left
        return self._end(Event.completed, EXIT_FINISHED)

    def _watch(self, ranks: RankGroup, slots: dict[int, Slot | None]) -> Next:
        """Nobody has ended: has anybody stopped?"""
        now = time.monotonic()
        if self._stop_deadline is not None and now >= self._stop_deadline:
            self.watch.recorder = {}
            outcome = inquire(self.run, self._case(ranks, slots))
            self._say(f"{outcome.verdict.sentence} They are ended; evidence is in {outcome.folder}")
            return self._end(Event.stopped, EXIT_STOPPED)
        finding = self.watch.look(slots)
        self._notices.blindness(self.watch.blind)
        suspected = self.watch.suspicion
        if suspected and suspected != self._suspected:
            self._write("suspicion", sentence=suspected)
        if suspected and self.lifecycle.state is State.running:
            self.lifecycle.fire(Event.suspicion)
        elif not suspected and self.lifecycle.state is State.suspect:
            self.lifecycle.fire(Event.cleared)
        self._suspected = suspected
        if finding is not None:
            return self._fault(ranks, slots, finding)
        if now - self._learned_at > LEARNED_EVERY_SECONDS:
            self._write_learned()
            self._notices.stragglers(stragglers(self.watch.learned.tallies()))
        return Next.go_on

    def _fault(
        self,
        ranks: RankGroup,
        slots: dict[int, Slot | None],
        finding: Finding | None = None,
    ) -> Next:
        """Ranks failed or hang: evidence, verdict, decision. The agent kills what is left only after this returns."""
        seen_at = time.time()
        at_exit = finding is not None and failure.all_done(list(slots.values()))
        if not at_exit:
            self.lifecycle.fire(Event.fault)
        outcome = inquire(self.run, self._case(ranks, slots, finding))
        verdict = outcome.verdict
        failed = self._exits.failed
        culprit = next((exit for exit in failed if exit.rank == verdict.culprit), None)
        if finding is not None:
            failed_at = seen_at - (time.monotonic() - finding.began_at_seconds)
        elif culprit and culprit.error:
            failed_at = culprit.error.wall_time
        else:
            failed_at = seen_at - (self._observed_at - self._last_look)
        self._write(
            "incident",
            rank=verdict.culprit,
            step=verdict.step,
            train_call=max((slot.train_call for slot in slots.values() if slot is not None), default=0),
            cause=str(verdict.cause),
            culprit=verdict.culprit,
            phase=verdict.phase,
            sentence=verdict.sentence,
            signature=verdict.signature,
            incident=str(outcome.folder),
            failed_at=failed_at,
            detection_seconds=max(0.0, time.time() - failed_at),
        )
        self._write_learned()
        if at_exit:
            # every script had run its last line: the run is whole, only a process is left over
            return self._left_over(verdict)
        self.lifecycle.fire(Event.evidence_written)
        self._catch_up()
        usage = next((exit.error for exit in failed if exit.error and exit.error.type in USAGE_ERRORS), None)
        if usage is not None:
            decision = Decision(action=Action.stop, reason="the settings are wrong, and would be again")
        else:
            decision = decide(self.history, verdict, self.config.budget, stopping=self._stop_asked)
        self._write("action", action=str(decision.action), reason=decision.reason)
        self._write("attempt_ended", cause=str(verdict.cause), action=str(decision.action))
        self.journal.sync()
        if decision.action in RESTARTS:
            self._say(verdict.sentence)
            self.has_ranks = False
            self._say(f"recovery: {decision.action}, {decision.reason}")
            return Next.restart
        if self._stop_asked:
            self._say(verdict.sentence)
            return self._end(Event.stopped, EXIT_STOPPED)
        self.sentence = f"{verdict.sentence} Gave up: {decision.reason}."
        if usage is not None:
            # the user's to mend, found only inside the rank: say it as the launcher would have
            self.sentence = usage.message
            return self._end(Event.gave_up, EXIT_USAGE)
        if verdict.traceback:
            self._say(verdict.traceback.rstrip())
        return self._end(Event.gave_up, EXIT_GAVE_UP)

    def _case(self, ranks: RankGroup, slots: dict[int, Slot | None], finding: Finding | None = None) -> Case:
        return Case(
            ranks=ranks,
            places={rank: place for place, rank in self._ranks_by_place.items()},
            exits=self._exits,
            slots=self._slots,
            stack_files={rank: self.files.stacks(rank) for rank in slots},
            watch=self.watch,
            timeline=self._timeline,
            best_position=self.history.best_position,
            world_size=self._world_size,
            finding=finding,
            stop_seconds=self.config.timeouts.stop_seconds,
        )

    def _left_over(self, verdict: Verdict) -> Next:
        """A rank that will not leave is ended, with a warning: its work and everybody's was done."""
        self._write("action", action=str(Action.stop), reason="every script had run its last line")
        self._write("warning", text=verdict.sentence)
        self._say(verdict.sentence)
        if self.history.left_early or any(exit.exit_code == EXIT_STOPPED for exit in self._exits.seen):
            if self.lifecycle.state is not State.stopping:
                self.lifecycle.fire(Event.stop_requested)  # asked for on another node
            return self._end(Event.stopped, EXIT_STOPPED)
        return self._end(Event.completed, EXIT_FINISHED)

    def _write_learned(self) -> None:
        """Write down how long phases take, for attempts to come."""
        self._learned_at = time.monotonic()
        for phase, durations in self.watch.learned.durations().items():
            self._write("phase_learned", phase=phase.name, durations=durations.as_json())

    def _end(self, event: Event, code: int) -> Next:
        self.exit_code = code
        self.lifecycle.fire(event)
        if self._drains is not None:
            self._drains.settle(restore=False)
            self._drains.close()
        self._catch_up()
        self.history.exit_code = code
        if not self.sentence:
            self.sentence = verdict_sentence(str(self.lifecycle.state), self.history)
        self._write("run_ended", exit_code=code, sentence=self.sentence, step=self._committed[1])
        self.journal.sync()
        self._catch_up()
        return Next.finished if code == EXIT_FINISHED else Next.stop

    def _state_changed(self, old: State, event: Event, new: State) -> None:
        fields: dict[str, Any] = {"from": str(old), "to": str(new), "because": event.value}
        self._write("state_changed", **fields)

    def _write(self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        lost = self.journal.write(event, rank=rank, step=step, **fields)
        if lost is not None:
            # it has happened all the same: budgets and alerts go by it, after what is in the file
            self._catch_up()
            self.history.apply(lost)
            if not self._losing:
                self._losing = True
                self._say(
                    f"{self.run.path} takes no more lines, its disk may be full: journal and evidence are incomplete"
                )

    def _warn(self, rank: int | None, text: str) -> None:
        self._write("warning", rank=rank, text=text)
        self._say(text)

    def _catch_up(self) -> None:
        """Fold what this supervisor and the ranks have written since the last look."""
        for record in self._reader.new():
            self.history.apply(record)
            written_by_a_rank = record["event"] == "checkpoint_published" and record.get("rank") is not None
            if written_by_a_rank and self._drains is not None:
                self._drains.note_published(
                    int(record.get("train_call") or 0), int(record["step"]), taken_at=record["time"]
                )
