"""The status of a run as one object: its history, and what its ranks do at present.

For `grpo-run status`, the metrics and the pages. The supervisor makes it of what it has in memory
(`live_status`), everybody else of the run directory (`reader.py`). Decides nothing.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.history._wait_line import WaitLine, find_wait
from grpo_run.runtime.history.events import RankCounted
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.host_status import HostStatus
from grpo_run.runtime.history.summary import summarize
from grpo_run.runtime.history.totals import event_of
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Phase, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank
from grpo_run.watchdog.stalls.durations import Histogram

WAITING_STATES = ("starting", "running", "suspect", "stopping")
"""In the other states the supervisor handles a fault, or the ranks are gone."""


@dataclass(frozen=True, kw_only=True)
class RunStatus:
    """One reading of a run.

    Args:
        state: of the lifecycle, or `unknown`.
        sentence: summary for the user.
        history: replayed from the journal.
        slots: by local rank; None for a rank that could not be observed.
        supervisor_pid: None if no supervisor is running.
        awaited: the rank that the others wait for; None while nobody waits for long.
        blind: by rank, what the watchdog cannot observe at present. Known to the supervisor only.
        journal_lost: number of events that the disk did not accept. Known to the supervisor only.
        read_at_seconds: when the slots were read, on the monotonic clock.
        memory: of each rank by phase, by local rank; None for a rank that has measured nothing.
    """

    run_id: str
    state: str
    sentence: str
    history: History
    supervisor_pid: int | None
    slots: tuple[Slot | None, ...] = ()
    awaited: AwaitedRank | None = None
    blind: Mapping[int, str] = field(default_factory=dict)
    journal_lost: int = 0
    hosts_awaited: str = ""
    """Which hosts are waited for; empty if none is. Known to the supervisor only."""
    hosts: tuple[HostStatus, ...] = ()
    """All hosts of a run over several; empty in a run on one."""
    host_memory: HostSample | None = None
    """The last sample of the host's memory; None before the first, and without a supervisor on this machine.
    """
    read_at_seconds: float = field(default_factory=time.monotonic)
    memory: tuple[RankMemory | None, ...] = ()
    collectives: Mapping[int, Mapping[str, tuple[int, int]]] = field(default_factory=dict)
    """By rank and process group, the last enqueued and the last completed sequence number. Known to the
    supervisor only.
    """
    phases: tuple[Mapping[Phase, Histogram], ...] = ()
    """How long phases took in this attempt, by local rank; empty for ranks that were not observed."""

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
            "checkpoint": (
                None
                if checkpoint is None
                else {"step": checkpoint.step, "path": checkpoint.path, "verified": checkpoint.verified}
            ),
            "snapshot_step": history.snapshot_step,
            "checkpoint_trouble": history.checkpoint_trouble,
            "trains_without_trainer": history.no_trainer.current,
            "waiting": self._waiting_as_json(),
            "ranks": [self._rank_as_json(local_rank, slot) for local_rank, slot in enumerate(self.slots)],
            "hosts": [to_json(host) for host in self.hosts],
            "recoveries": [recovery.as_json() for recovery in history.recoveries],
            "sentence": self.summary,
            "exit_code": history.exit_code,
            "warnings": history.warnings,
            "host_memory": _json_or_none(self.host_memory),
            **{name: value for part in history.parts for name, value in part.as_json().items()},
        }

    def _waiting_as_json(self) -> dict[str, Any] | None:
        """Who is waited for, also if the wait is as long as usual."""
        awaited = self.awaited if self.state in WAITING_STATES else None
        if awaited is None:
            return None
        return {
            "rank": awaited.rank,
            "phase": awaited.phase.name,
            "callback": awaited.callback or None,
            "seconds": self._age(awaited.since_seconds),
            "deadline_seconds": round(limit, 3) if math.isfinite(limit := awaited.deadline_seconds) else None,
            "place": awaited.place or None,
            "busy": awaited.busy,
            "waiters": list(awaited.waiters),
            "outside": awaited.outside or None,
        }

    def _waits_for(self, rank: int) -> int | None:
        """The rank that this one waits for; None if it does not wait, or that is not known."""
        awaited = self.awaited if self.state in WAITING_STATES else None
        return awaited.rank if awaited is not None and rank in awaited.waiters else None

    def _rank_as_json(self, local_rank: int, slot: Slot | None) -> dict[str, Any]:
        """What a local rank does; one that cannot be observed, as while it starts, has its pid at most."""
        if slot is None:
            started = sorted(self.history.calls.pids.items())
            pid = started[local_rank][1] if local_rank < len(started) else None
            return {"local_rank": local_rank, "observable": False, "pid": pid}
        phase = slot.phases[-1] if slot.phases else None
        memory = self.memory[local_rank] if local_rank < len(self.memory) else None
        return {
            "local_rank": local_rank,
            "observable": True,
            "rank": slot.rank,
            "pid": slot.pid,
            "state": slot.state.name,
            "step": slot.step,
            "trains_without_trainer": slot.trains_without_trainer,
            "phase": phase.phase.name if phase is not None else None,
            "callback": slot.callback or None,
            "phase_seconds": self._age(phase.since_seconds) if phase is not None else None,
            "waits_for": self._waits_for(slot.rank),
            "seconds_since_progress": self._age(slot.last_progress_seconds),
            "memory": memory.as_json() if memory is not None else None,
        }

    def _age(self, at_seconds: float) -> float:
        return round(max(0.0, self.read_at_seconds - at_seconds), 3)


def _json_or_none(value: object) -> dict[str, Any] | None:
    return None if value is None else to_json(value)


def live_status(
    run: tuple[str, str, str], history: History, board: Board, *, complete: bool = True, **observed: Any
) -> RunStatus:
    """Return the status of a run from the memory of its supervisor, which calls this.

    Args:
        run: its id; the state of its lifecycle; how it has ended, empty before.
        complete: as of `observe`.
        observed: further fields of the status.
    """
    run_id, state, sentence = run
    # once the run has ended, its exit code says how, also if the supervisor failed on the way
    state = history.state if history.exit_code is not None else state
    return RunStatus(
        run_id=run_id,
        state=state,
        sentence=sentence or summarize(state, history),
        history=history,
        supervisor_pid=os.getpid(),
        **observe(board, complete=complete),
        **observed,
    )


def read_memory(board: Board) -> tuple[RankMemory | None, ...]:
    """Return the memory of each rank on a board, by local rank."""
    return tuple(board.rank_memory(local_rank) for local_rank in range(board.slots))


def observe(board: Board, *, complete: bool = True) -> dict[str, Any]:
    """Return the fields of a status that a board has; of a truncated one, nothing of the phases.

    Args:
        complete: with the memory of the ranks, their phases, and those that are late, which costs most.
    """
    slots = tuple(board.read_all())
    if not complete:
        return {"slots": slots}
    histograms = (board.histograms(local_rank) for local_rank in range(board.slots))
    return {
        "slots": slots,
        "memory": read_memory(board),
        "phases": tuple(histograms) if board.has_full_size else (),
    }


def read_counts(board: Board) -> Iterator[RankCounted]:
    """Yield the event for each rank that has used the board in its attempt."""
    for local_rank, slot in enumerate(board.read_all()):
        if slot is not None:
            yield event_of(slot, board.rank_memory(local_rank), board.histograms(local_rank))
