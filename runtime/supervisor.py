"""The supervisor: watches the board and the ranks' exits, and decides with the policy what follows.

It is the agent's conductor: `observe` is called about ten times a second and at once when a rank ends. It keeps
the order that the project stands on: fault, evidence on disk, verdict, decision, and only then the kill.
Does not start processes (`agent.py`), judge (`watchdog.diagnosis`), choose (`policy.py`) or draw pages.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grpo_run.runtime.agent import Next
from grpo_run.runtime.board import Board
from grpo_run.runtime.config import RunConfig
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED, EXIT_USAGE, UsageError
from grpo_run.runtime.history import History
from grpo_run.runtime.journal import Journal, JournalReader
from grpo_run.runtime.lifecycle import Event, Lifecycle, State
from grpo_run.runtime.policy import RESTARTS, decide
from grpo_run.runtime.ranks import RankGroup
from grpo_run.runtime.rundir import RunDirectory
from grpo_run.runtime.status import RunStatus, verdict_sentence
from grpo_run.watchdog import diagnosis, evidence, incident
from grpo_run.watchdog.observation import Exit, RankError, RankState, Slot

_USAGE: list[type[UsageError]] = [UsageError, *UsageError.__subclasses__()]
USAGE_ERRORS = frozenset(error.__name__ for error in _USAGE)
"""What a rank's guard or recipe raises about the user's settings; a script's own `sys.exit(2)` is none of them."""

GATHER_SECONDS = 0.03
"""How long to go on looking for further exits after the first: a collective's victims fall within milliseconds."""


class Supervisor:
    """See the module. One a run and process; every method runs in the main thread, but `status` in any.

    Args:
        config: the run.
        run: its directory, created and locked.
        local_world_size: ranks on this node.
        rank_environment: our own variables for a rank, from (rank, attempt, world size, first attempt).
        say: prints a line for the person.
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
        self.journal = Journal(run.journal, config.run_id)
        self.lifecycle = Lifecycle(self._state_changed)
        self.attempt = self.history.attempts - 1
        self.run_started_at = self.history.first_time or time.time()
        self.exit_code: int | None = None
        self.sentence = ""
        self._ranks_by_place: dict[int, int] = {}
        self._world_size = 0
        self._committed: tuple[int, int] = (0, 0)
        self._pending: list[Exit] = []
        self._stop_deadline: float | None = None
        self._exit_deadline: float | None = None
        self._observed_at = time.monotonic()
        self._stop_asked = False
        self._stops_noted: list[str] = []
        self.has_ranks = False
        """False while the agent waits in a rendezvous, where no look is taken."""

    def begin(self, **fields: Any) -> None:
        """Write that this supervisor has taken the run up."""
        self._write("run_started", supervisor_pid=os.getpid(), **fields)
        self.journal.sync()
        self._catch_up()

    # what the agent asks of its conductor

    def attempt_environment(self, worker: Any, world_size: int, restart_count: int) -> dict[str, str]:
        """Our variables for one rank."""
        return self._rank_environment(self, worker.global_rank, world_size)

    def log_path(self, rank: int) -> Path:
        """The rank's output in the present attempt."""
        return self.run.attempt(self.attempt) / f"rank{rank}.log"

    def stack_path(self, rank: int) -> Path:
        """Where the rank's faulthandler writes."""
        return self.run.attempt(self.attempt) / f"rank{rank}.stacks"

    def error_path(self, rank: int) -> Path:
        """Where the rank's bootstrap writes what was raised."""
        return self.run.attempt(self.attempt) / f"rank{rank}.error.json"

    def attempt_starting(self, workers: Sequence[Any], group_rank: int) -> None:
        """A new attempt: its number, its directory, an empty board."""
        self.attempt += 1
        self.journal.attempt = self.attempt
        self.run.attempt(self.attempt).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.board.begin_attempt(self.attempt)
        if self._stop_asked:
            self.board.request_stop()
        self._ranks_by_place = {worker.local_rank: worker.global_rank for worker in workers}
        self._world_size = workers[0].world_size
        self._pending = []
        self._committed = (0, 0)
        self._exit_deadline = None
        if self.lifecycle.state is State.recovering:
            self.lifecycle.fire(Event.restarted)
            if self._stop_asked:
                self.lifecycle.fire(Event.stop_requested)  # it came between two attempts
        self._write("attempt_started", world_size=workers[0].world_size, node=group_rank)
        self._attempt_output({worker.global_rank: self.log_path(worker.global_rank) for worker in workers})

    def attempt_started(self, ranks: RankGroup) -> None:
        """The ranks are there."""
        self.has_ranks = True
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
        since, self._observed_at = self._observed_at, time.monotonic()
        while self._stops_noted:
            self.request_stop(self._stops_noted.pop(0))
        slots = self._slots()
        self._note_commits(slots)
        self._catch_up()
        self._pending += [self._complete(exit, slots) for exit in exits]
        failed = [exit for exit in self._pending if not exit.completed]
        if failed:
            return self._fault(ranks, slots, since)
        if self._pending and not ranks.alive:
            return self._all_left()
        return self._deadlines(ranks, slots)

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
        )

    # inside

    def _slots(self) -> dict[int, Slot | None]:
        return {rank: self.board.read(place) for place, rank in self._ranks_by_place.items()}

    def _complete(self, exit: Exit, slots: dict[int, Slot | None]) -> Exit:
        """Say whether this exit is the end of a script that ran to its last line."""
        slot = slots.get(exit.rank)
        done = slot is not None and slot.state is RankState.done
        if done and exit.exit_code not in (EXIT_FINISHED, EXIT_STOPPED):
            how = diagnosis.signal_name(exit.signal) if exit.signal else f"code {exit.exit_code}"
            text = f"rank {exit.rank} ended with {how} after its script's last line; its work was done"
            self._write("warning", rank=exit.rank, text=text)
            self._say(text)
        error = _read_error(self.error_path(exit.rank))
        return replace(exit, completed=done or exit.exit_code == EXIT_FINISHED, error=error)

    def _note_commits(self, slots: dict[int, Slot | None]) -> None:
        readings = [slot for slot in slots.values() if slot is not None]
        if len(readings) < len(slots) or not readings:
            return
        call = min(slot.train_call for slot in readings)
        if any(slot.train_call != call for slot in readings) or call == 0:
            return
        # with every rank on this board a vote begun by all is a step committed; else wait to be told by the vote
        everywhere = len(readings) == self._world_size
        step = (
            min(slot.voted_step for slot in readings)
            if everywhere
            else max(s.committed_step for s in readings)
        )
        position = (call, step)
        resumed = readings[0].resumed_step
        if position <= max(self._committed, (call, resumed)):
            return
        self._committed = position
        if self.lifecycle.state in (State.starting, State.running, State.suspect, State.stopping):
            self.lifecycle.fire(Event.step_committed)
        age = time.monotonic() - max(slot.voted_at_seconds for slot in readings)
        self._write(
            "step_committed",
            step=step,
            train_call=call,
            target_steps=readings[0].target_steps,
            committed_at=time.time() - age,
        )

    def _all_left(self) -> Next:
        if any(exit.exit_code == EXIT_STOPPED for exit in self._pending):
            if self.lifecycle.state is not State.stopping:
                self.lifecycle.fire(Event.stop_requested)  # asked for on another node
            self._end(Event.stopped, EXIT_STOPPED)
            return Next.left
        return self._end(Event.completed, EXIT_FINISHED)

    def _deadlines(self, ranks: RankGroup, slots: dict[int, Slot | None]) -> Next:
        now = time.monotonic()
        if self._stop_deadline is not None and now >= self._stop_deadline:
            missing = self._gather_evidence(ranks, slots)[1]
            self._say(
                "ranks did not stop in time and are ended" + (f" ({'; '.join(missing)})" if missing else "")
            )
            return self._end(Event.stopped, EXIT_STOPPED)
        if diagnosis.all_done(list(slots.values())):
            if self._exit_deadline is None:
                self._exit_deadline = now + self.config.timeouts.exit_seconds
            if now >= self._exit_deadline:
                text = (
                    f"ranks {sorted(ranks.alive)} did not leave after their script's last line and are ended"
                )
                self._write("warning", text=text)
                self._say(text)
                if self.history.left_early:
                    if self.lifecycle.state is not State.stopping:
                        self.lifecycle.fire(Event.stop_requested)  # asked for on another node
                    return self._end(Event.stopped, EXIT_STOPPED)
                return self._end(Event.completed, EXIT_FINISHED)
        return Next.go_on

    def _gather_evidence(self, ranks: RankGroup, slots: dict[int, Slot | None]) -> tuple[Path, list[str]]:
        folder = self.run.incidents
        pids = {self._ranks_by_place[place]: pid for place, pid in ranks.alive.items()}
        stacks = {rank: self.stack_path(rank) for rank in slots}
        try:
            folder = incident.open_incident(self.run.incidents)
            return folder, evidence.collect(folder, pids, stacks)
        except OSError as error:
            # a full disk must not keep the run from recovering; the gap is named in the verdict
            return folder, [f"evidence could not be written: {error}"]

    def _fault(self, ranks: RankGroup, slots: dict[int, Slot | None], last_look: float) -> Next:
        """A rank failed: evidence, verdict, decision. The agent kills what is left only after this returns."""
        seen_at = time.time()
        self.lifecycle.fire(Event.fault)
        folder, missing = self._gather_evidence(ranks, slots)
        deadline = time.monotonic() + GATHER_SECONDS
        while ranks.alive and (left := deadline - time.monotonic()) > 0:
            self._pending += [self._complete(exit, slots) for exit in ranks.wait(left)]
        failed = [exit for exit in self._pending if not exit.completed]
        verdict = diagnosis.diagnose(failed, self._slots(), best_position=self.history.best_position)
        usage = next((exit for exit in failed if exit.error and exit.error.type in USAGE_ERRORS), None)
        try:
            if folder != self.run.incidents:
                folder = incident.close_incident(folder, verdict, missing)
        except OSError as error:
            self._say(f"the incident could not be written: {error}")
        culprit = next((exit for exit in failed if exit.rank == verdict.culprit), None)
        failed_at = (
            culprit.error.wall_time
            if culprit and culprit.error
            else seen_at - (self._observed_at - last_look)
        )
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
            incident=str(folder),
            failed_at=failed_at,
            detection_seconds=max(0.0, seen_at - failed_at),
        )
        self.lifecycle.fire(Event.evidence_written)
        self._catch_up()
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
        if usage is not None and usage.error is not None:
            # the user's to mend, found only inside the rank: say it as the launcher would have
            self.sentence = usage.error.message
            return self._end(Event.gave_up, EXIT_USAGE)
        if verdict.traceback:
            self._say(verdict.traceback.rstrip())
        return self._end(Event.gave_up, EXIT_GAVE_UP)

    def _end(self, event: Event, code: int) -> Next:
        self.exit_code = code
        self.lifecycle.fire(event)
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

    def _write(self, name: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> None:
        self.journal.write(name, rank=rank, step=step, **fields)

    def _catch_up(self) -> None:
        """Fold what this supervisor and the ranks have written since the last look."""
        for record in self._reader.new():
            self.history.apply(record)


def _read_error(path: Path) -> RankError | None:
    """What a rank's bootstrap wrote about an exception; None when it had no time to."""
    try:
        value = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    location = value["location"]
    return RankError(
        type=value["type"],
        message=value["message"],
        traceback=value["traceback"],
        location=(location[0], location[1], location[2]) if location else None,
        wall_time=value["wall_time"],
    )
