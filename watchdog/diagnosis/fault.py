"""The verdict on a fault: which diagnosis applies to what was gathered, in the order in which they count.

`gather` in `runtime/supervisor/incident.py` reads everything once, before any rank is terminated; `diagnose`
turns it into a verdict; `decide` in `runtime/supervisor/policy.py` chooses what follows from that. All three
are called by `runtime/supervisor/faults.py`, one after another. Pure: `Evidence` is plain data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.diagnosis._hangs import (
    add_locations,
    caused_by_collectives,
    diagnose_deadlock,
    diagnose_slow_stop,
    diagnose_stall,
)
from grpo_run.watchdog.diagnosis._host_oom import diagnose_host_oom
from grpo_run.watchdog.diagnosis._rewards import raised_reward
from grpo_run.watchdog.diagnosis.exits import (
    diagnose_alarm,
    diagnose_early_exit,
    diagnose_exits,
    is_lost_peer,
    is_victim,
)
from grpo_run.watchdog.evidence.stacks import Stack
from grpo_run.watchdog.memory.host_kills import KernelKills
from grpo_run.watchdog.memory.shortage import shortage_of
from grpo_run.watchdog.observation import Exit, RankError, Slot
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.verdict import Verdict


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What was gathered about one fault: a deadlock, a stall, exits, or a stop that took too long.

    Attributes:
        slots: of the local ranks; None for one that could not be read.
        world_size: number of ranks on all nodes.
        best_position: the furthest (train call, step) that the run has committed in any attempt.
        deadlock: that was proved while all ranks ran; None if none was.
        stall: that was found while all ranks ran; None if none was.
        stop_seconds: how long the ranks had been asked to stop, if that is the only fault.
        outside: a fault outside the ranks, which is judged already; None if there is none.
        exits: of the attempt, in the order in which they were observed.
        errors: what ranks that have not been seen to exit have left as the exception that ends them, by rank.
            Their peers may exit first: they lose their connection while such a rank runs its exit handlers.
        positions: of the ranks in their collectives, if ranks have exited; empty if they could not be read.
        stacks: the threads of each rank that answered, or that wrote them when it crashed.
        kills: which of the exited ranks the kernel has killed for lack of memory.
        shared_memory_free_bytes: space in /dev/shm after a rank has died as one dies that finds it full; None
            if none has, or it is not known.
        hosts: the name of each rank's host, if this is the evidence of several (`host_reports.py`).
        lost_hosts: a sentence for each of them whose supervisor is gone.
    """

    slots: Mapping[int, Slot | None]
    world_size: int
    best_position: tuple[int, int]
    deadlock: Deadlock | None = None
    stall: Stall | None = None
    stop_seconds: float = 0.0
    outside: Verdict | None = None
    exits: Sequence[Exit] = ()
    errors: Mapping[int, RankError] = field(default_factory=dict)
    positions: Mapping[int, Position] = field(default_factory=dict)
    stacks: Mapping[int, Sequence[Stack]] = field(default_factory=dict)
    kills: KernelKills = field(default_factory=KernelKills)
    shared_memory_free_bytes: int | None = None
    hosts: Mapping[int, str] = field(default_factory=dict)
    lost_hosts: Sequence[str] = ()

    @property
    def failed(self) -> list[Exit]:
        """Exits of ranks whose script did not complete."""
        return [exit for exit in self.exits if not exit.completed]

    @property
    def raising(self) -> list[Exit]:
        """The exits to come of ranks that have left an error; not of one that calls `sys.exit`, whose code
        may be 0.
        """
        return [
            Exit(rank=rank, pid=0, exit_code=1, signal=None, order=len(self.exits) + place, error=error)
            for place, (rank, error) in enumerate(sorted(self.errors.items()))
            if error.type != "SystemExit"
        ]

    def other_failures(self, verdict: Verdict) -> tuple[list[int], list[int]]:
        """Return the ranks that failed besides the culprit: because they lost their connection to it, and by
        themselves.
        """
        failed = {**{exit.rank: exit.error for exit in self.failed}, **self.errors}
        if verdict.culprit is not None:
            failed.pop(verdict.culprit, None)
        lost = sorted(rank for rank, error in failed.items() if error is not None and is_lost_peer(error))
        return lost, sorted(failed.keys() - set(lost))


def diagnose(evidence: Evidence) -> Verdict:
    """Return the verdict on a fault."""
    verdict = _diagnose(evidence)
    if verdict.cause is Cause.unknown and evidence.lost_hosts and evidence.outside is None:
        sentence, signature = " ".join(evidence.lost_hosts), str(Cause.node_lost)
        verdict = replace(
            verdict, cause=Cause.node_lost, confidence="proved", sentence=sentence, signature=signature
        )
    if verdict.culprit is not None and verdict.culprit in evidence.hosts:
        named = rf"\g<0> on host {evidence.hosts[verdict.culprit]}"
        sentence = re.sub(rf"\b[Rr]ank {verdict.culprit}\b", named, verdict.sentence, count=1)
        verdict = replace(verdict, sentence=sentence)
    return verdict


def _diagnose(evidence: Evidence) -> Verdict:
    slots, stacks = evidence.slots, evidence.stacks
    failed, raising = evidence.failed, evidence.raising
    if evidence.outside is not None:
        found = add_locations(evidence.outside, stacks)
        return replace(found, locations={**evidence.outside.locations, **found.locations})
    short = [exit for exit in raising if shortage_of(exit.error, None) is not None]
    hangs = evidence.deadlock is not None or evidence.stall is not None
    if hangs and short:  # the others wait for a rank that has ended
        return add_locations(diagnose_exits(short, slots, best_position=evidence.best_position), stacks)
    if evidence.deadlock is not None:
        return diagnose_deadlock(evidence.deadlock, slots, stacks)
    if evidence.stall is not None:
        return diagnose_stall(evidence.stall, slots, stacks)
    if not failed:
        return diagnose_slow_stop(evidence.stop_seconds, slots, stacks)
    if (alarm := diagnose_alarm(failed, slots)) is not None:
        return alarm
    host = diagnose_host_oom(failed, slots, evidence.kills, best_position=evidence.best_position)
    if host is not None:
        return add_locations(host, stacks)
    failed += raising if all(is_victim(exit) for exit in failed) else short
    exhausted = any(shortage_of(exit.error, None) is not None for exit in failed)
    if caused_by_collectives(evidence.exits) and not exhausted:
        deadlock = prove(evidence.positions, world_size=evidence.world_size)
        # an exited rank does not prove why it exited; two operations that cannot match do
        if deadlock is not None and deadlock.mismatch is not None:
            return diagnose_deadlock(deadlock, slots, stacks)
        completed = [exit for exit in evidence.exits if exit.completed]
        if completed and all(is_victim(exit) for exit in failed):
            return add_locations(diagnose_early_exit(completed, failed, slots), stacks)
    verdict = diagnose_exits(
        failed,
        slots,
        best_position=evidence.best_position,
        shared_memory_free_bytes=evidence.shared_memory_free_bytes,
    )
    error = next((exit.error for exit in failed if exit.rank == verdict.culprit), None)
    # memory that is exhausted is no failure of the function
    if verdict.cause in (Cause.exception, Cause.startup_failure):
        verdict = replace(verdict, failed_reward=raised_reward(error, verdict.phase))
    return add_locations(verdict, stacks)
