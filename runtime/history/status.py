"""The status of a run as one object, its summary in one sentence, and what the run waits for.

Combines the replayed journal with the live board, for `grpo-run status`, the metrics and the pages; the
supervisor calls it with what it has in memory. A run whose supervisor exited without writing how the run
ended is `unknown`, never running. A wait reads `waiting for rank 1: reward, 6 min (deadline 27 min)`; one
that every step has is not shown, so that a healthy run does not alternate between two texts. Reads files;
decides nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.call_names import LOOP
from grpo_run.runtime.errors import EXIT_FINISHED, EXIT_GAVE_UP, EXIT_STOPPED, RunDirectoryError
from grpo_run.runtime.history import own_training
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.history_parts import newest_commit
from grpo_run.runtime.history.journal import read_journal
from grpo_run.runtime.history.repeats import most_repeated
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.memory.host_last_sample import read_last_sample
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.late_ranks import LateRank, find_late_ranks
from grpo_run.watchdog.text import duration_text, place_name, rank_names


def summarize(state: str, history: History, exit_code: int | None = None) -> str:
    """Return one sentence on the state of the run.

    Args:
        state: of the lifecycle, or `unknown`.
        history: of the run.
        exit_code: of a run that is about to end; that of the history if None.
    """
    if exit_code is None:
        exit_code = history.exit_code
    left_after = history.calls.left_after(history.train_call) if exit_code == EXIT_FINISHED else None
    step = history.step if left_after is None else left_after  # no vote follows the last step then
    place = f"step {step} of {history.target_steps}" if history.target_steps else f"step {step}"
    if left_after is not None:
        place += ", where the script left the loop"
    recovered = sum(
        1
        for recovery in history.recoveries
        # the script of a finished run may have had no further step to commit
        if recovery.recovery_seconds is not None
        or (exit_code == EXIT_FINISHED and recovery.action.startswith("restart"))
    )
    faults = {0: "no faults", 1: "1 fault recovered"}.get(recovered, f"{recovered} faults recovered")
    if history.recoveries and not recovered:
        faults = "no fault recovered"
    if repeated := most_repeated(history.recoveries):
        faults = f"{faults}, {repeated}"
    trained = history.train_call > 0 or history.step > 0
    if history.own.seen and not trained and (exit_code is None or state in ("finished", "stopped")):
        restarts = sum(recovery.action.startswith("restart") for recovery in history.recoveries)
        return own_training.summarize(history.own, state, exit_code, restarts=restarts, now=time.time())
    if state == "stopped" and exit_code == EXIT_GAVE_UP and not trained:
        return "Stopped. The same command runs the script from the beginning; nothing is saved."
    if state == "stopped" and exit_code not in (None, EXIT_STOPPED):
        return f"Stopped: the script returned {exit_code}. Run the same command to start again."
    if exit_code == EXIT_FINISHED and not trained:
        return f"Finished, {faults}. The script did not use a Trainer, so no steps were counted."
    if exit_code == EXIT_FINISHED:
        ended = history.sentence if history.finished else ""
        return ended or f"Finished at {place}, {faults}."
    if exit_code == EXIT_STOPPED and not trained:
        return "Stopped before the first step of a Trainer. Run the same command to start again."
    if exit_code == EXIT_STOPPED:
        saved = f"checkpoint at step {history.checkpoint.step}" if history.checkpoint else "no checkpoint yet"
        return f"Stopped at {place} ({saved}). Run the same command to resume."
    if exit_code is not None:
        return history.sentence or f"Gave up at {place}."
    if state == "unknown":
        return (
            f"Unknown: the supervisor exited without ending the run, last seen at {place}."
            " Run the same command to resume."
        )
    if state == "starting" and history.restarting:
        return f"Restarting after {place}, attempt {history.attempts}, {faults}."
    summary = f"{state.capitalize()} at {place}, attempt {history.attempts}, {faults}."
    return f"{summary} {own_training.SINCE_CALL}" if history.own.current else summary


def model_place(history: History) -> str:
    """Return where the model of a finished run is, as a sentence; empty if that is not known.

    What the script has saved itself comes before its checkpoints, and these before our snapshots.
    """
    if path := _saved_model(history):
        return f"The model is in {path}."
    checkpoint = history.checkpoint
    if (
        checkpoint is None
        or checkpoint.train_call != history.train_call
        or not os.path.isdir(checkpoint.path)
    ):
        return ""
    return f"Last {Path(checkpoint.path).name.partition('-')[0]}: {checkpoint.path}."


def _saved_model(history: History) -> str:
    """Return where the script has saved the model of its last call with `save_model`; empty if it is not there."""
    call, path = history.saved_model or (0, "")
    return path if call == history.train_call and os.path.isdir(path) else ""


def lacks_model_of_script(history: History) -> bool:
    """Return whether a script that uses a Trainer has no model of its own on disk, as far as that can be seen.

    A hand-written loop and a script without a Trainer save by themselves, which is not seen.
    """
    call = next((call for call in history.calls if call.ordinal == history.train_call), None)
    if call is None or call.trainer_class == LOOP or _saved_model(history):
        return False
    lineage = history.calls.lineage
    return not history.scheduled_call or lineage(history.scheduled_call) != lineage(call.ordinal)


SHORTEST_SECONDS = 5.0
"""Ranks wait for one another in every step."""
DEADLINE_SHARE = 0.2
"""A fifth of a learned deadline is the longest duration that the phase has had, or more."""
SHORTEST_SILENCE_SECONDS = 10.0
"""Without a rank that is known to be waited for, there may be work that is not observed."""


@dataclass(frozen=True, kw_only=True)
class WaitLine:
    """A wait that is worth showing. `key` stays equal while the same is waited for."""

    text: str
    key: Hashable

    @property
    def sentence(self) -> str:
        """The text as a sentence."""
        return f"{self.text[0].upper()}{self.text[1:]}."


def find_wait(
    awaited: AwaitedRank | None,
    slots: Sequence[Slot | None],
    *,
    now: float,
    step_seconds: float | None,
) -> WaitLine | None:
    """Return the present wait; None while there is none, or none that is longer than usual.

    Args:
        awaited: the rank that the others wait for.
        slots: of all local ranks, for a run in which nothing moves and no rank is known to be waited for.
        now: monotonic seconds.
        step_seconds: how long a step usually takes; None if unknown.
    """
    if awaited is None:
        return _find_silence(slots, now=now, step_seconds=step_seconds)
    seconds = now - awaited.since_seconds
    usual = min(step_seconds or 0.0, DEADLINE_SHARE * _deadline_seconds(awaited))
    if seconds < max(SHORTEST_SECONDS, usual):
        return None
    return WaitLine(text=waiting_text(awaited, now), key=(awaited.rank, awaited.phase, awaited.callback))


def waiting_text(awaited: AwaitedRank, now: float) -> str:
    """Return who is waited for, where, for how long and until when."""
    where = place_name(awaited.callback) if awaited.callback else _name(awaited.phase)
    if awaited.exiting:
        where = "exit after its last line"
    deadline = _deadline_seconds(awaited)
    limit = f" (deadline {duration_text(deadline)})" if math.isfinite(deadline) else ""
    return f"waiting for rank {awaited.rank}: {where}, {duration_text(now - awaited.since_seconds)}{limit}"


def _name(phase: Phase) -> str:
    return "outside train()" if phase is Phase.idle else phase.name


def _deadline_seconds(awaited: AwaitedRank) -> float:
    return awaited.deadline_at_seconds - awaited.since_seconds


def _find_silence(slots: Sequence[Slot | None], *, now: float, step_seconds: float | None) -> WaitLine | None:
    """Nothing moves: all ranks work, or it is not known which of them waits."""
    seen = [slot for slot in slots if slot is not None]
    if not seen or len(seen) < len(slots) or any(slot.state is not RankState.training for slot in seen):
        return None
    since = max(max(slot.last_progress_seconds, slot.last_work_seconds) for slot in seen)
    if now - since < max(SHORTEST_SILENCE_SECONDS, 2 * (step_seconds or 0.0)):
        return None
    return WaitLine(
        text=f"no progress for {duration_text(now - since)}{_places(seen)}", key=("silence", since)
    )


def _places(slots: Sequence[Slot]) -> str:
    """Where ranks are that do not move, as far as it fits into a line."""
    ranks: dict[str, list[int]] = {}
    for slot in slots:
        if slot.phase is not None:
            ranks.setdefault(_name(slot.phase), []).append(slot.rank)
    if len(ranks) == 1:
        return f" in {next(iter(ranks))}"
    if len(ranks) != 2:
        return ""
    return ": " + ", ".join(f"{rank_names(listed)} in {phase}" for phase, listed in ranks.items())


WAITING_STATES = ("starting", "running", "suspect", "stopping")
"""In the other states the supervisor handles a fault, or the ranks are gone."""
JOURNAL_BEHIND_SECONDS = 5.0
"""Age of the journal's last line. A live supervisor writes a committed step within a tenth of a second."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One reading of a run.

    Args:
        run_id: of the run.
        state: of the lifecycle, or `unknown`.
        sentence: summary for the user.
        history: replayed from the journal.
        slots: by place; None for a rank that could not be observed.
        supervisor_pid: None if no supervisor is running.
        awaited: the rank that the others wait for; None while nobody waits for long.
        blind: by rank, what the watchdog cannot observe at present. Known to the supervisor only.
        journal_lost: number of events that the disk did not accept. Known to the supervisor only.
        read_at_seconds: when the slots were read, on the monotonic clock.
        memory: of each rank by phase, by place; None for a rank that has measured nothing.
    """

    run_id: str
    state: str
    sentence: str
    history: History
    slots: tuple[Slot | None, ...]
    supervisor_pid: int | None
    awaited: AwaitedRank | None = None
    blind: Mapping[int, str] = field(default_factory=dict)
    journal_lost: int = 0
    host_memory: HostSample | None = None
    """The last sample of the host's memory; None before the first, and without a supervisor on this machine."""
    late_ranks: tuple[LateRank, ...] = ()
    """Ranks of this node that are regularly late."""
    read_at_seconds: float = field(default_factory=time.monotonic)
    memory: tuple[RankMemory | None, ...] = ()

    @property
    def wait(self) -> WaitLine | None:
        """The wait that is worth showing; None if there is none, or while the supervisor handles a fault."""
        if self.state not in WAITING_STATES:
            return None
        return find_wait(
            self.awaited, self.slots, now=self.read_at_seconds, step_seconds=self.history.step_seconds()
        )

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds until the train() call ends; None unless steps are being committed and none is late."""
        return self.history.remaining_seconds() if self.state == "running" and self.wait is None else None

    @property
    def summary(self) -> str:
        """What is waited for, if anything is, and the state of the run."""
        wait = self.wait
        return self.sentence if wait is None else f"{wait.sentence} {self.sentence}"

    def as_json(self) -> dict[str, Any]:
        """Return the object that `grpo-run status --json` prints."""
        history = self.history
        checkpoint = history.checkpoint
        return {
            "run_id": self.run_id,
            "state": self.state,
            "step": history.step,
            "target_steps": history.target_steps,
            "step_seconds": history.step_seconds(),
            "remaining_seconds": self.remaining_seconds,
            "attempts": history.attempts,
            "goodput": history.goodput(time.time() if self.supervisor_pid else None),
            "checkpoint": None
            if checkpoint is None
            else {"step": checkpoint.step, "path": checkpoint.path, "verified": checkpoint.verified},
            "snapshot_step": history.snapshot_step,
            "checkpoint_trouble": history.checkpoint_trouble,
            "own_training": history.own.current,
            "own_checkpoint": history.own.checkpoint_as_json(),
            "waiting": self._waiting_as_json(),
            "late_ranks": [one.as_json() for one in self.late_ranks],
            "ranks": [self._rank_as_json(place, slot) for place, slot in enumerate(self.slots)],
            "recoveries": [recovery.as_json() for recovery in history.recoveries],
            "sentence": self.summary,
            "exit_code": history.exit_code,
            "warnings": history.warnings,
            "excluded": history.exclusions.as_json(),
            "host_memory": self.host_memory.as_json() if self.host_memory is not None else None,
            "memory_trace": history.memory_trace.as_json(),
            "memory_restarts": history.memory_restarts.count,
            "memory_plan": history.memory.plan.model_dump(exclude_defaults=True),
        }

    def _waiting_as_json(self) -> dict[str, Any] | None:
        """Who is waited for, also if the wait is as long as usual."""
        awaited = self.awaited if self.state in WAITING_STATES else None
        if awaited is None:
            return None
        deadline = awaited.deadline_at_seconds - awaited.since_seconds
        return {
            "rank": awaited.rank,
            "phase": awaited.phase.name,
            "callback": awaited.callback or None,
            "seconds": self._age(awaited.since_seconds),
            "deadline_seconds": round(deadline, 3) if math.isfinite(deadline) else None,
            "busy": awaited.busy,
            "waiters": list(awaited.waiters),
        }

    def _rank_as_json(self, place: int, slot: Slot | None) -> dict[str, Any]:
        """What a local rank does; a rank that cannot be observed has its local rank only."""
        if slot is None:
            return {"local_rank": place, "observable": False}
        phase = slot.phases[-1] if slot.phases else None
        memory = self.memory[place] if place < len(self.memory) else None
        return {
            "local_rank": place,
            "observable": True,
            "rank": slot.rank,
            "pid": slot.pid,
            "state": slot.state.name,
            "step": slot.step,
            "trains_alone": slot.trains_alone,
            "phase": phase.phase.name if phase is not None else None,
            "callback": slot.callback or None,
            "phase_seconds": self._age(phase.since_seconds) if phase is not None else None,
            "seconds_since_progress": self._age(slot.last_progress_seconds),
            "memory": memory.as_json() if memory is not None else None,
        }

    def _age(self, at_seconds: float) -> float:
        return round(max(0.0, self.read_at_seconds - at_seconds), 3)


def live_status(
    run: tuple[str, str, str], history: History, board: Board, *, complete: bool = True, **observed: Any
) -> RunStatus:
    """Return the status of a run from the memory of its supervisor, which calls this.

    Args:
        run: its id; the state of its lifecycle; how it has ended, empty before.
        history: of the run.
        board: of the run.
        complete: with the memory of the ranks and those that are late, which costs most.
        observed: further fields of the status.
    """
    run_id, state, sentence = run
    # once the run has ended, its exit code says how, also if the supervisor failed on the way
    state = history.state if history.exit_code is not None else state
    slots = tuple(board.read_all())
    return RunStatus(
        run_id=run_id,
        state=state,
        sentence=sentence or summarize(state, history),
        history=history,
        slots=slots,
        memory=read_memory(board) if complete else (),
        late_ranks=read_late_ranks(board, slots) if complete else (),
        supervisor_pid=os.getpid(),
        **observed,
    )


def read_status(run: RunDirectory) -> RunStatus:
    """Read the status of a run from its directory.

    Raises:
        RunDirectoryError: it is not a run directory.
    """
    fields = run.read_run()
    run_id = str(fields.get("run_id", run.path.name))
    history = History.of(read_journal(run.journal))
    supervisor = run.supervisor()
    owner = supervisor.pid if supervisor is not None else None
    if owner is None and not _is_directory(fields.get("snapshot_directory")):
        history.snapshot_step = None  # its memory was freed, or the machine has been started again
    slots: tuple[Slot | None, ...] = ()
    awaited: AwaitedRank | None = None
    host_memory: HostSample | None = None
    late_ranks: tuple[LateRank, ...] = ()
    memory: tuple[RankMemory | None, ...] = ()
    # pages of a board on another machine are as old as this machine's cache, and its clock is another
    if supervisor is not None and supervisor.is_on_this_machine:
        try:
            host_memory = read_last_sample(run.host_memory)
            board = Board.open(run.board)
            slots, awaited = tuple(board.read_all()), board.read_awaited()
            late_ranks = read_late_ranks(board, slots)
            memory = read_memory(board)
        except RunDirectoryError:
            slots = ()
    state = history.state
    if owner is None and history.exit_code is None:
        state = "unknown"
    sentences = (summarize(state, history), _journal_behind(history, slots))
    return RunStatus(
        run_id=run_id,
        state=state,
        sentence=" ".join(filter(None, sentences)),
        history=history,
        slots=slots,
        supervisor_pid=owner,
        awaited=awaited,
        host_memory=host_memory,
        late_ranks=late_ranks,
        memory=memory,
    )


def read_memory(board: Board) -> tuple[RankMemory | None, ...]:
    """Return the memory of each rank on a board, by place."""
    return tuple(board.rank_memory(place) for place in range(board.slots))


def read_late_ranks(board: Board, slots: Sequence[Slot | None]) -> tuple[LateRank, ...]:
    """Return the ranks on a board that are regularly late in this attempt.

    Args:
        board: of the run.
        slots: its readings, by local rank.
    """
    if len(slots) < 2 or not board.has_full_size:
        return ()
    durations = {
        slot.rank: board.phase_histograms(place) for place, slot in enumerate(slots) if slot is not None
    }
    return tuple(find_late_ranks(durations))


def _is_directory(path: object) -> bool:
    return isinstance(path, str) and Path(path).is_dir()


def _journal_behind(history: History, slots: tuple[Slot | None, ...]) -> str | None:
    """Return a warning if the board shows steps that the journal lacks, as on a full disk."""
    commit = newest_commit(dict(enumerate(slots)), world_size=0)
    if commit is None or time.time() - (history.time.last or 0.0) < JOURNAL_BEHIND_SECONDS:
        return None
    # the supervisor may not have polled the newest step yet
    if (commit.train_call, commit.step) <= (history.train_call, history.step + 1):
        return None
    return (
        f"The journal is behind: the ranks have reached step {commit.step}. The disk of the run directory may be full,"
        " and later faults are not recorded here."
    )
