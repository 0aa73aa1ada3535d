"""Gather what there is to know about a fault, in memory and in an incident folder, before a rank is killed.

    open the incident folder → stacks, collective records, processes, memory → further exits → `Evidence`

Called by `faults.py`, which has the evidence judged (`watchdog/diagnosis/fault.py`) and closes the folder
with the verdict. Reads ranks and writes one folder. Judges nothing, chooses no action. A folder that cannot
be written is named in the verdict's missing evidence and never prevents a recovery.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
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
from grpo_run.watchdog.diagnosis.fault import Evidence
from grpo_run.watchdog.evidence import collection, incident_files
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.host_sample import HostSample
from grpo_run.watchdog.memory.phase_memory import RankMemory
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.verdict import Verdict

GATHER_SECONDS = 0.03
"""How long to wait for further exits after the first one. The victims of a broken collective fail within
milliseconds."""
KILLED_SECONDS = 5.0
"""How long to wait for the exit of a rank that the kernel is killing, until its memory is freed. Meanwhile
its peers may fail for want of that memory."""
RAISE_SECONDS = 0.3
"""How long ranks in consensus calls have to raise what was proved. A traceback takes milliseconds."""
RAISE_POLL_SECONDS = 0.01
JOURNAL_TAIL_LINES = 200
JOURNAL_TAIL_BYTES = 256 * 1024


@dataclass(kw_only=True)
class IncidentContext:
    """One fault, as the supervisor passes it on.

    Args:
        attempt: in which it happened; its exits grow while evidence is gathered.
        ranks: processes on this node.
        detector: of hangs.
        best_position: the furthest (train call, step) that the run has committed in any attempt.
        finding: a hang; None when ranks exited or did not stop in time.
        outside: a fault outside the ranks that a feature has found.
        stop_seconds: how long the ranks had been asked to stop, if that is the only fault.
        kills_of: returns which of the ranks that have exited the kernel has killed for lack of memory.
        join: adds the evidence of other hosts to that of this one.
    """

    attempt: Attempt
    ranks: RankGroup
    board: Board
    detector: HangDetector
    best_position: tuple[int, int]
    finding: HangFinding | None = None
    outside: Verdict | None = None
    stop_seconds: float = 0.0
    kills_of: Callable[[Collection[Exit]], KernelKills] = lambda exits: KernelKills()
    join: Callable[[OpenIncident], OpenIncident] = lambda incident: incident

    def read_slots(self) -> dict[int, Slot | None]:
        """Read the slots of the attempt's ranks."""
        return self.attempt.read_slots(self.board)

    def read_memory(self) -> dict[int, RankMemory]:
        """Read what each rank has measured of its memory, by rank."""
        return self.attempt.read_memory(self.board)


@dataclass(frozen=True, kw_only=True)
class OpenIncident:
    """A fault of which everything has been gathered.

    Attributes:
        evidence: to judge it by.
        missing: one sentence for each piece of evidence that could not be collected or written.
        opened: the folder, without a verdict; None if none could be written.
        incidents: the folder of all incidents.
    """

    evidence: Evidence
    missing: list[str]
    opened: Path | None
    incidents: Path

    def close(self, verdict: Verdict) -> Path:
        """Write the verdict, and return the folder of the incident; that of all incidents if it has none."""
        if self.opened is None:
            return self.incidents
        try:
            return incident_files.close_incident(self.opened, verdict, self.missing)
        except OSError as error:
            self.missing.append(f"the verdict could not be written: {error}")
            return self.opened


def gather(run: RunDirectory, context: IncidentContext) -> OpenIncident:
    """Read the ranks, the kernel and the files of a fault once, and write them into a new incident folder."""
    attempt, detector, finding = context.attempt, context.detector, context.finding
    slots = context.read_slots()
    alive = attempt.by_rank(context.ranks.alive)
    positions: Mapping[int, Position] = {}
    missing: list[str] = []
    if finding is None:
        # before stacks: the survivors of a broken collective exit within milliseconds
        try:
            exited = {rank: rank not in alive for rank in attempt.local_rank_of}
            positions = detector.positions(slots, exited=exited)
        except OSError as error:
            missing.append(f"collective records could not be read: {error}")
    collected = collection.Collected(missing=[], stacks={})
    folder: Path | None = None
    try:
        folder = incident_files.open_incident(run.incidents)
        collected = collection.collect(
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
        collected.missing.append(f"evidence could not be written: {type(error).__name__}: {error}")
    blind = [f"rank {rank}: {reason}" for rank, reason in sorted(detector.blind.items())]
    kills, shared_memory_free_bytes = KernelKills(), None
    if finding is None:
        attempt.exits.wait(context.ranks, GATHER_SECONDS, slots)
        positions = _with_final_positions(context, slots, positions)
        if attempt.exits.failed:
            kills = context.kills_of(attempt.exits.seen)
            if kills.dying:
                attempt.exits.wait(context.ranks, KILLED_SECONDS, slots, until=kills.dying)
                kills = context.kills_of(attempt.exits.seen)
            shared_memory_free_bytes = _free_shared_memory(attempt.exits.failed, kills.sample)
    evidence = Evidence(
        slots=slots,
        world_size=attempt.world_size,
        best_position=context.best_position,
        deadlock=finding.deadlock if finding is not None else None,
        stall=finding.stall if finding is not None else None,
        stop_seconds=context.stop_seconds,
        outside=context.outside,
        exits=tuple(attempt.exits.seen),
        errors=attempt.exits.errors_of_others(attempt.local_rank_of),
        positions=positions,
        stacks=collected.stacks,
        kills=kills,
        shared_memory_free_bytes=shared_memory_free_bytes,
    )
    return OpenIncident(
        evidence=evidence,
        missing=[*collected.missing, *missing, *blind],
        opened=folder,
        incidents=run.incidents,
    )


def _stuck_interpreters(finding: HangFinding | None) -> list[int]:
    """Ranks whose native frames are needed, because their interpreter does not run."""
    stall = finding.stall if finding is not None else None
    return list(stall.culprits) if stall is not None and stall.cause is Cause.interpreter_stuck else []


def _with_final_positions(
    context: IncidentContext, slots: dict[int, Slot | None], positions: Mapping[int, Position]
) -> Mapping[int, Position]:
    """Replace the positions of ranks that exited before their Flight Recorder answered.

    Their collective log on the board is complete once the process has exited.
    """
    local_ranks = context.attempt.local_rank_of
    silent = {rank for rank, position in positions.items() if position.records is None}
    alive = set(context.ranks.alive)
    dead = {rank for rank in silent if local_ranks[rank] not in alive}
    if not dead:
        return positions
    exited = {rank: local_rank not in alive for rank, local_rank in local_ranks.items()}
    final = context.detector.positions(slots, exited=exited)
    return {rank: final[rank] if rank in dead else position for rank, position in positions.items()}


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
    for rank in (at.keys() - waiting) & context.attempt.local_rank_of.keys():
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
        lines = incident_files.read_end(journal, JOURNAL_TAIL_BYTES).splitlines(keepends=True)
    except OSError:
        return []
    return [line.decode(errors="replace") for line in lines[-JOURNAL_TAIL_LINES:]]
