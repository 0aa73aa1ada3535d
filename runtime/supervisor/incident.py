"""Incident investigation: from a fault to evidence on disk and a verdict.

    open the incident folder → stacks, collective records, processes, memory → further exits → verdict → close
    the folder

Called by `faults.py` and by the supervisor; nothing is killed before `investigate` has returned. Reads ranks
and writes one folder. Chooses no action. A folder that cannot be written is named in the verdict's missing
evidence and never prevents a recovery.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.files import SHARED_MEMORY_ROOT, write_json
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.supervisor.attempt import Attempt
from grpo_run.runtime.supervisor.detection.detector import HangDetector
from grpo_run.runtime.supervisor.detection.finding import HangFinding
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.collectives import CONSENSUS_GROUP, CollectiveProgress
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.diagnosis import hangs
from grpo_run.watchdog.diagnosis.exits import diagnose_alarm, diagnose_early_exit, diagnose_exits, is_victim
from grpo_run.watchdog.diagnosis.host_oom import diagnose_host_oom
from grpo_run.watchdog.diagnosis.rewards import raised_reward
from grpo_run.watchdog.evidence import collection, incident_files
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.memory.shortage import shortage_of
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.verdict import Verdict

GATHER_SECONDS = 0.03
"""How long to wait for further exits after the first one. The victims of a broken collective fail within
milliseconds."""
RAISE_SECONDS = 0.3
"""How long ranks in consensus calls have to raise what was proved. A traceback takes milliseconds."""
RAISE_POLL_SECONDS = 0.01
JOURNAL_TAIL_LINES = 200
JOURNAL_TAIL_BYTES = 256 * 1024


@dataclass(kw_only=True)
class IncidentContext:
    """One fault, as the supervisor passes it to the investigation.

    Args:
        attempt: in which it happened; its exits grow during the investigation.
        ranks: processes on this node.
        board: of the run.
        detector: of hangs.
        best_position: the furthest (train call, step) that the run has committed in any attempt.
        finding: a hang; None when ranks exited or did not stop in time.
        stop_seconds: how long the ranks had been asked to stop, if that is the only fault.
        kills_of: returns which of the ranks that have exited the kernel has killed for lack of memory.
    """

    attempt: Attempt
    ranks: RankGroup
    board: Board
    detector: HangDetector
    best_position: tuple[int, int]
    finding: HangFinding | None = None
    stop_seconds: float = 0.0
    kills_of: Callable[[Collection[Exit]], KernelKills] = lambda exits: KernelKills()

    def read_slots(self) -> dict[int, Slot | None]:
        """Read the slots of the attempt's ranks."""
        return self.attempt.read_slots(self.board)

    def read_memory(self) -> dict[int, RankMemory]:
        """Read what each rank has measured of its memory, by rank."""
        return self.attempt.read_memory(self.board)


@dataclass(frozen=True, kw_only=True)
class IncidentOutcome:
    """A verdict, the folder that contains it, and the evidence that could not be collected or written."""

    verdict: Verdict
    folder: Path
    missing: list[str]


def investigate(run: RunDirectory, context: IncidentContext) -> IncidentOutcome:
    """Collect evidence, determine the verdict and write both into a new incident folder."""
    attempt, detector, finding = context.attempt, context.detector, context.finding
    slots = context.read_slots()
    alive = attempt.by_rank(context.ranks.alive)
    positions: Mapping[int, Position] | None = None
    missing: list[str] = []
    if finding is None:
        # before stacks: the survivors of a broken collective exit within milliseconds
        try:
            exited = {rank: rank not in alive for rank in attempt.local_rank_of}
            positions = detector.positions(slots, exited=exited)
        except OSError as error:
            missing.append(f"collective records could not be read: {error}")
    gathered = collection.Evidence(missing=missing, stacks={}, complete_at=time.monotonic())
    folder: Path | None = None
    try:
        folder = incident_files.open_incident(run.incidents)
        gathered = collection.collect(
            folder,
            alive,
            {rank: attempt.files.stacks(rank) for rank in slots},
            interpreter_stuck=_stuck_interpreters(finding),
            recordings=detector.recordings,
            collective_logs=detector.collective_logs(),
            rank_memory={rank: memory.as_json() for rank, memory in context.read_memory().items()},
            events=journal_tail(run.journal),
        )
        timeline = attempt.timeline.as_json(time.monotonic())
        write_json(folder / "timeline.json", timeline, indent=None, durable=False)
    except Exception as error:  # noqa: BLE001 - a failure to collect evidence must not prevent the recovery
        gathered.missing.append(f"evidence could not be written: {type(error).__name__}: {error}")
    if gathered.missing is not missing:
        gathered.missing.extend(missing)
    gathered.missing.extend(f"rank {rank}: {reason}" for rank, reason in sorted(detector.blind.items()))
    if finding is None:
        attempt.exits.wait(context.ranks, GATHER_SECONDS, slots)
        positions = _with_final_positions(context, slots, positions)
    verdict = _judge(context, slots, positions, gathered)
    if folder is not None:
        try:
            folder = incident_files.close_incident(folder, verdict, gathered.missing)
        except OSError as error:
            gathered.missing.append(f"the verdict could not be written: {error}")
    return IncidentOutcome(verdict=verdict, folder=folder or run.incidents, missing=gathered.missing)


def _stuck_interpreters(finding: HangFinding | None) -> list[int]:
    """Ranks whose native frames are needed, because their interpreter does not run."""
    stall = finding.stall if finding is not None else None
    return list(stall.culprits) if stall is not None and stall.cause is Cause.interpreter_stuck else []


def _with_final_positions(
    context: IncidentContext, slots: dict[int, Slot | None], positions: Mapping[int, Position] | None
) -> Mapping[int, Position] | None:
    """Replace the positions of ranks that exited before their Flight Recorder answered.

    Their collective log on the board is complete once the process has exited.
    """
    local_ranks = context.attempt.local_rank_of
    silent = {rank for rank, position in (positions or {}).items() if position.records is None}
    alive = set(context.ranks.alive)
    dead = {rank for rank in silent if local_ranks[rank] not in alive}
    if not positions or not dead:
        return positions
    exited = {rank: local_rank not in alive for rank, local_rank in local_ranks.items()}
    final = context.detector.positions(slots, exited=exited)
    return {rank: final[rank] if rank in dead else position for rank, position in positions.items()}


def _judge(
    context: IncidentContext,
    slots: dict[int, Slot | None],
    positions: Mapping[int, Position] | None,
    gathered: collection.Evidence,
) -> Verdict:
    finding, exits = context.finding, context.attempt.exits
    raising = exits.raising(context.attempt.local_rank_of)
    short = [exit for exit in raising if shortage_of(exit.error, None) is not None]
    if finding is not None and short:  # the others wait for a rank that has ended
        verdict = diagnose_exits(short, slots, best_position=context.best_position)
        return hangs.add_locations(verdict, gathered.stacks)
    if finding is not None and finding.deadlock is not None:
        return hangs.diagnose_deadlock(finding.deadlock, slots, gathered.stacks)
    if finding is not None:
        assert finding.stall is not None
        return hangs.diagnose_stall(finding.stall, slots, gathered.stacks)
    if not exits.failed:
        return hangs.diagnose_slow_stop(context.stop_seconds, slots, gathered.stacks)
    alarm = diagnose_alarm(exits.failed, slots)
    if alarm is not None:
        return alarm
    kills = context.kills_of(exits.failed)
    host = diagnose_host_oom(exits.failed, slots, kills, best_position=context.best_position)
    if host is not None:
        return hangs.add_locations(host, gathered.stacks)
    failed = [*exits.failed, *(raising if all(is_victim(exit) for exit in exits.failed) else short)]
    exhausted = any(shortage_of(exit.error, None) is not None for exit in failed)
    if hangs.caused_by_collectives(exits.seen) and not exhausted:
        deadlock = prove(positions or {}, world_size=context.attempt.world_size)
        # an exited rank does not prove why it exited; two operations that cannot match do
        if deadlock is not None and deadlock.mismatch is not None:
            return hangs.diagnose_deadlock(deadlock, slots, gathered.stacks)
        completed = [exit for exit in exits.seen if exit.completed]
        if completed and all(is_victim(exit) for exit in failed):
            return hangs.add_locations(diagnose_early_exit(completed, failed, slots), gathered.stacks)
    verdict = diagnose_exits(
        failed,
        slots,
        best_position=context.best_position,
        shared_memory_free_bytes=_free_shared_memory(failed, kills.sample),
    )
    error = next((exit.error for exit in failed if exit.rank == verdict.culprit), None)
    if verdict.cause is Cause.exception:  # memory that is exhausted is no failure of the function
        verdict = dataclasses.replace(verdict, failed_reward=raised_reward(error, verdict.phase))
    return hangs.add_locations(verdict, gathered.stacks)


def _free_shared_memory(exits: Sequence[Exit], before: HostSample | None) -> int | None:
    """Return how much space /dev/shm has, if a rank has died as one dies that finds it full; else None.

    Args:
        before: the last sample in which the rank lived. What it had unlinked is free again after its death.
    """
    if not any(exit.signal == signal.SIGBUS for exit in exits):
        return None
    try:
        status = os.statvfs(SHARED_MEMORY_ROOT)
    except OSError:
        return None
    free_bytes = status.f_bavail * status.f_frsize
    if before is not None and before.shm_total_bytes:
        free_bytes = min(free_bytes, before.shm_total_bytes - before.shm_used_bytes)
    return free_bytes


def tell_ranks(context: IncidentContext, verdict: Verdict) -> None:
    """Name a proved deadlock on every rank if one of them waits in a consensus call. Call it once evidence is
    on disk.

    Such a rank raises the verdict's sentence, so that the script sees it; the other ranks sit in torch, and
    it is appended to their logs. Waits for the first until they have raised, `RAISE_SECONDS` at most.
    """
    deadlock = context.finding.deadlock if context.finding is not None else None
    at = deadlock.at if deadlock is not None else {}
    waiting = {
        rank
        for rank, here in at.items()
        if here is not None and here.group == CONSENSUS_GROUP and here.progress is CollectiveProgress.waiting
    }
    if not waiting:
        return
    context.board.publish_disagreement(verdict.sentence)
    for rank in at.keys() - waiting:
        with (
            contextlib.suppress(OSError),
            open(context.attempt.files.stderr(rank), "a", encoding="utf-8") as log,
        ):
            log.write(f"Ended by grpo-run: {verdict.sentence}\n")
    deadline = time.monotonic() + RAISE_SECONDS
    while time.monotonic() < deadline:
        slots = context.read_slots()
        if all(
            slot is None or slot.state is RankState.failed for rank, slot in slots.items() if rank in waiting
        ):
            return
        time.sleep(RAISE_POLL_SECONDS)


def journal_tail(journal: Path) -> list[str]:
    """Return the last lines of the journal; an empty list if it cannot be read."""
    try:
        with open(journal, encoding="utf-8", errors="replace") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - JOURNAL_TAIL_BYTES))
            return list(deque(file, maxlen=JOURNAL_TAIL_LINES))
    except OSError:
        return []
