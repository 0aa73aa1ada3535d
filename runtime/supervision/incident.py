"""What lies between a fault and a decision: evidence on disk, then a verdict, written beside it.

    open the incident's folder → stacks, collective records, processes, memory → further exits → judge → close it

Called by the supervisor, which kills nobody before this has returned. Reads ranks and writes one folder; chooses no
action. A folder that cannot be written is said in the verdict's `missing` and never keeps a run from recovering.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.detection.detector import Finding, Watch
from grpo_run.runtime.files import write_json
from grpo_run.runtime.processes.ranks import RankGroup
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.supervision.exits import Exits
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.proof import Position, prove
from grpo_run.watchdog.evidence import collection, incident_files
from grpo_run.watchdog.evidence.timeline import Timeline
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.verdict import Verdict
from grpo_run.watchdog.verdicts import failure, hang

GATHER_SECONDS = 0.03
"""How long to go on looking for further exits after the first: a collective's victims fall within milliseconds."""
KEPT_EVENTS = 200


@dataclass(kw_only=True)
class Case:
    """One fault, as the supervisor hands it over.

    `exits` grows while evidence is gathered. `slots` reads the board anew. `places` is each rank's place on this node.
    """

    ranks: RankGroup
    places: Mapping[int, int]
    exits: Exits
    slots: Callable[[], dict[int, Slot | None]]
    stack_files: Mapping[int, Path]
    watch: Watch
    timeline: Timeline
    best_position: tuple[int, int]
    world_size: int
    finding: Finding | None = None
    stop_seconds: float = 0.0
    """Set when nobody ended and nothing was found, but a stop took too long."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A verdict, the folder that holds it, and what could not be seen or written."""

    verdict: Verdict
    folder: Path
    missing: list[str]


def inquire(run: RunDirectory, case: Case) -> Outcome:
    """Gather, judge, write. See the module."""
    slots = case.slots()
    rank_of = {place: rank for rank, place in case.places.items()}
    alive = {rank_of[place]: pid for place, pid in case.ranks.alive.items()}
    positions: Mapping[int, Position] | None = None
    missing: list[str] = []
    if case.finding is None:
        # before stacks are asked for: survivors of a broken collective have milliseconds to live
        try:
            positions = case.watch.positions(slots, gone={rank: rank not in alive for rank in case.places})
        except OSError as error:
            missing.append(f"collective records could not be read: {error}")
    gathered = collection.Evidence(missing=missing, stacks={}, complete_at=time.monotonic())
    folder: Path | None = None
    try:
        folder = incident_files.open_incident(run.incidents)
        stall = case.finding.stall if case.finding is not None else None
        gathered = collection.collect(
            folder,
            alive,
            case.stack_files,
            interpreter_stuck=list(stall.culprits)
            if stall is not None and stall.cause is Cause.interpreter_stuck
            else [],
            recorder=case.watch.recorder,
            notes=case.watch.notes(),
            events=last_lines(run.journal),
        )
        write_json(
            folder / "timeline.json", case.timeline.as_json(time.monotonic()), indent=None, durable=False
        )
    except Exception as error:  # noqa: BLE001 - whatever keeps evidence back must not keep the run from recovering
        gathered.missing.append(f"evidence could not be written: {type(error).__name__}: {error}")
    if gathered.missing is not missing:
        gathered.missing.extend(missing)
    gathered.missing.extend(f"rank {rank}: {why}" for rank, why in sorted(case.watch.blind.items()))
    if case.finding is None:
        case.exits.wait(case.ranks, GATHER_SECONDS, slots)
        positions = _completed(case, slots, positions)
    verdict = _judge(case, slots, positions, gathered)
    if folder is not None:
        try:
            folder = incident_files.close_incident(folder, verdict, gathered.missing)
        except OSError as error:
            gathered.missing.append(f"the verdict could not be written: {error}")
    return Outcome(verdict=verdict, folder=folder or run.incidents, missing=gathered.missing)


def _completed(
    case: Case, slots: dict[int, Slot | None], positions: Mapping[int, Position] | None
) -> Mapping[int, Position] | None:
    """Where a rank's recorder fell silent because it was just dying, its notes are all there is, and they are final."""
    silent = {rank for rank, position in (positions or {}).items() if position.records is None}
    alive = set(case.ranks.alive)
    dead = {rank for rank in silent if case.places[rank] not in alive}
    if not positions or not dead:
        return positions
    later = case.watch.positions(slots, gone={rank: case.places[rank] not in alive for rank in case.places})
    return {rank: later[rank] if rank in dead else position for rank, position in positions.items()}


def _judge(
    case: Case,
    slots: dict[int, Slot | None],
    positions: Mapping[int, Position] | None,
    gathered: collection.Evidence,
) -> Verdict:
    finding = case.finding
    if finding is not None and finding.deadlock is not None:
        return hang.of_deadlock(finding.deadlock, slots, gathered.stacks)
    if finding is not None:
        assert finding.stall is not None
        return hang.of_stall(finding.stall, slots, gathered.stacks)
    failed = case.exits.failed
    if not failed:
        return hang.of_slow_stop(case.stop_seconds, slots, gathered.stacks)
    if hang.caused_by_collectives(case.exits.seen):
        deadlock = prove(positions or {}, world_size=case.world_size)
        # that a rank is gone proves nothing about why it went; that two operations cannot meet does
        if deadlock is not None and deadlock.mismatch is not None:
            return hang.of_deadlock(deadlock, slots, gathered.stacks)
        left = [exit for exit in case.exits.seen if exit.completed]
        if left and all(failure.is_victim(exit) for exit in failed):
            return hang.with_locations(failure.left_early(left, failed, slots), gathered.stacks)
    verdict = failure.diagnose(failed, slots, best_position=case.best_position)
    return hang.with_locations(verdict, gathered.stacks)


def last_lines(journal: Path) -> list[str]:
    """The journal's last lines; empty when it cannot be read, which the evidence then shows."""
    try:
        with open(journal, encoding="utf-8", errors="replace") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 256 * 1024))
            return list(deque(file, maxlen=KEPT_EVENTS))
    except OSError:
        return []
