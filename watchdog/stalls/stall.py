"""Stalls: ranks that are in a phase for too long without progress, those of them to blame, and the sentence.

The last resort, after exits and after proofs. `runtime/supervisor/detection/_stall_detector.py` calls
`find_stall` with what it observed, and `watchdog/diagnosis/_hangs.py` turns the result into a verdict. What
could not be read is unknown: never a culprit, and never a reason to act. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, PhaseKey
from grpo_run.watchdog.stalls.deadlines import Occurrence
from grpo_run.watchdog.stalls.durations import Durations
from grpo_run.watchdog.stalls.observed import Observed, ProcessFacts
from grpo_run.watchdog.stalls.overdue import PhaseClock, Rule, frozen_clock, phase_clocks, quiet_clock
from grpo_run.watchdog.text import place_name, rank_names


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """Ranks that missed a deadline. `culprits` is empty if every rank waits and none can be singled out.

    `phase`, `deadline_seconds` and `waited_seconds` belong to the first culprit. `uninterruptible`: a culprit
    is in uninterruptible sleep and cannot be killed, so a restart would not help. `callback` names the user's
    callback in which the first culprit is, "" outside callbacks. `alone` is, for each of several culprits or
    of ranks that all wait, the stall if it is the only one, for a diagnosis that clears the others.
    `lasts_seconds` is how long the phase is known to last without progress; 0 if that is unknown, infinity
    for a hang that cannot end. `goes_on`: the first culprit makes progress, so its line changes. `stopped`: a
    signal has stopped the first culprit, so that nothing is learned of its phase.
    """

    cause: Cause
    culprits: tuple[int, ...]
    waiters: tuple[int, ...]
    phase: Phase
    deadline_seconds: float
    waited_seconds: float
    sentence: str
    uninterruptible: bool = False
    confidence: str = "deadline"
    callback: str = ""
    lasts_seconds: float = 0.0
    goes_on: bool = False
    stopped: bool = False
    alone: Mapping[int, Stall] = field(default_factory=dict)

    @property
    def key(self) -> PhaseKey:
        """What the durations of the first culprit's phase are learned by."""
        return self.callback if self.phase is Phase.callback else self.phase


_CAUSES = {
    Phase.generate: Cause.generation_stall,
    Phase.reward: Cause.reward_stall,
    Phase.data: Cause.data_stall,
    Phase.checkpoint: Cause.checkpoint_stall,
    Phase.weight_sync: Cause.weight_sync_stuck,
}


def cause_of(phase: Phase) -> Cause:
    """Return the cause of a rank that makes no progress in this phase."""
    return _CAUSES.get(phase, Cause.no_progress)


def find_stall(observed: Observed) -> Stall | None:
    """Return the ranks that hang, or None.

    Every open phase has its own clock, which starts when the phase begins or at the rank's last measured
    progress inside it. A rank is a culprit if a clock exceeds its deadline and the rank is not merely waiting
    for others. Progress extends a phase without limit until the run has shown how long the phase takes, and
    to many times that afterwards: an hour of generation that makes progress may be legitimate, a
    generation without an end is not.
    """
    late: dict[int, PhaseClock] = {}
    quiet: dict[int, PhaseClock] = {}
    frozen: dict[int, PhaseClock] = {}
    merely_waiting = observed.merely_waiting
    for rank, slot in observed.known.items():
        clocks = phase_clocks(slot, observed)
        overdue_clock = next((clock for clock in clocks if clock.overdue), None)
        if overdue_clock is not None:
            late[rank] = overdue_clock
        stuck = frozen_clock(clocks[0], observed)
        if stuck is not None and stuck.overdue:
            frozen[rank] = stuck
        idle = quiet_clock(clocks[0], observed) if rank not in merely_waiting else None
        if idle is not None and idle.overdue:
            quiet[rank] = idle
    overdue = {**quiet, **late, **frozen}
    if not overdue:
        return None
    culprits = _find_culprits(observed, overdue, frozen)
    if culprits is None:
        return None
    if not culprits:
        return _describe_waiting_ranks(overdue, observed)
    waiters = tuple(sorted(merely_waiting - {phase.rank for phase in culprits}))
    durations = observed.learned.get(culprits[0].key)
    return _describe_culprits(culprits, waiters, observed.processes, durations)


def _find_culprits(
    observed: Observed, overdue: Mapping[int, PhaseClock], frozen: Mapping[int, PhaseClock]
) -> list[PhaseClock] | None:
    """Return the overdue phases of the ranks to blame, worst first.

    None if none is to blame yet, because a rank within its deadlines or unobserved may be what the others
    wait for. Empty if all ranks wait for one another.

    Args:
        observed: of this check.
        overdue: of every rank that is beyond a deadline, one of its clocks.
        frozen: those of ranks whose interpreter is frozen.
    """
    known, waiting, merely_waiting = observed.known, observed.waiting, observed.merely_waiting
    whole_world, blind = observed.whole_world, observed.blind
    working = known.keys() - overdue.keys() - merely_waiting
    # a rank of which it is unknown whether it waits may wait for any rank that is within its deadlines or
    # unobserved
    may_wait_for_others = bool(working) or (blind and len(observed.slots) > 1) or not whole_world
    culprits = [
        phase
        for rank, phase in overdue.items()
        if observed.is_stopped(rank)
        or (rank not in merely_waiting and (rank in waiting or rank in frozen or not may_wait_for_others))
    ]
    # next to a rank that is known not to wait, one that may wait is not blamed
    culprits = [phase for phase in culprits if phase.rank in waiting or phase.rank in frozen] or culprits
    # likewise one that made progress until it was seen in a collective: it may only now begin to wait
    culprits = [
        phase for phase in culprits if not (phase.rule is Rule.endless and waiting.get(phase.rank))
    ] or culprits
    if not culprits:
        if merely_waiting != overdue.keys() or merely_waiting != known.keys() or blind or not whole_world:
            # a rank whose thread keeps its interpreter from running cannot return from a finished collective
            culprits = [phase for phase in frozen.values() if not working]
            if not culprits:
                return None
        culprits = culprits or [phase for rank, phase in overdue.items() if observed.is_heartbeat_late(rank)]
    return sorted(culprits, key=lambda phase: (phase.rank not in frozen, phase.since_seconds, phase.rank))


def _describe_culprits(
    culprits: Sequence[PhaseClock],
    waiters: tuple[int, ...],
    processes: Mapping[int, ProcessFacts | None],
    durations: Durations | None,
) -> Stall:
    """Return the stall of these overdue phases, the longest silent one first.

    Args:
        durations: what is known of the first culprit's phase.
    """
    first = culprits[0]
    facts = processes.get(first.rank)
    cause = cause_of(first.phase)
    place = f"in {place_name(first.callback)}" if first.callback else f"in {first.phase.name}"
    if first.phase is Phase.idle:
        place = "outside train()"
    how = "making progress without an end" if first.rule is Rule.endless else "without progress"
    silence = f"{place} for {_seconds(first.silent_seconds)} {how}"
    stopped = facts is not None and facts.stopped
    if stopped:
        cause = Cause.interpreter_stuck
        subject = f"Rank {first.rank} is stopped (SIGSTOP), {silence}"
    elif facts is not None and facts.heartbeat_late:
        cause = Cause.interpreter_stuck
        age = _seconds(max(facts.heartbeat_age_seconds, facts.frozen_seconds))
        subject = f"Rank {first.rank}'s interpreter has not run for {age}, {silence}"
    else:
        subject = f"Rank {first.rank} has been {silence}"
    blamed = [phase.rank for phase in culprits]
    sleeping = [rank for rank in blamed if (facts := processes.get(rank)) is not None and facts.state == "D"]
    others = ""
    if len(blamed) > 1:
        pronoun = "its" if len(blamed) == 2 else "their"
        others = f"; {rank_names(blamed[1:])} missed {pronoun} deadline too"
    kernel = ""
    if sleeping:
        verb = "is" if len(sleeping) == 1 else "are"
        kernel = f"; {rank_names(sleeping)} {verb} in uninterruptible sleep"
    basis = _basis(first, None if stopped and first.rule is Rule.frozen else durations)
    return Stall(
        cause=cause,
        culprits=tuple(blamed),
        waiters=waiters,
        phase=first.phase,
        callback=first.callback,
        deadline_seconds=first.deadline_seconds,
        waited_seconds=first.silent_seconds,
        sentence=f"{subject} (deadline {_seconds(first.deadline_seconds)}, {basis}){others}{kernel}.",
        uninterruptible=bool(sleeping),
        goes_on=first.rule is Rule.endless,
        stopped=stopped,
        alone=_each_alone(culprits, {*waiters, *blamed}, processes, lambda _: durations),
    )


def _each_alone(
    clocks: Sequence[PhaseClock],
    ranks: set[int],
    processes: Mapping[int, ProcessFacts | None],
    durations_of: Callable[[PhaseClock], Durations | None],
) -> dict[int, Stall]:
    """Return the stall of each of several overdue phases, if its rank is the only culprit."""
    return {
        one.rank: _describe_culprits((one,), tuple(sorted(ranks - {one.rank})), processes, durations_of(one))
        for one in clocks
        if len(clocks) > 1
    }


def _describe_waiting_ranks(overdue: Mapping[int, PhaseClock], observed: Observed) -> Stall:
    """Return the stall of ranks that all wait for too long; its time is that of the last one to begin."""
    last = min(overdue.values(), key=lambda phase: phase.silent_seconds)
    subject = "All ranks have waited" if len(overdue) > 1 else f"Rank {last.rank} has waited"
    return Stall(
        cause=Cause.no_progress,
        culprits=(),
        waiters=tuple(sorted(overdue)),
        phase=last.phase,
        deadline_seconds=last.deadline_seconds,
        waited_seconds=last.silent_seconds,
        sentence=f"{subject} for other ranks for at least {_seconds(last.silent_seconds)} (deadline"
        f" {_seconds(last.deadline_seconds)}); cannot tell which rank is missing.",
        alone=_each_alone(
            [*overdue.values()], {*overdue}, observed.processes, lambda one: observed.learned.get(one.key)
        ),
    )


def _basis(clock: PhaseClock, durations: Durations | None) -> str:
    """What the deadline follows from."""
    if clock.rule is Rule.quiet:
        basis = "without CPU time, I/O or traffic while no other rank works"
    elif clock.rule is Rule.frozen:
        basis = "for an interpreter that does not run"
    elif clock.rule is Rule.connected:
        basis = "with a connection to a process outside the job"
    elif clock.rule is Rule.computing:
        basis = "with CPU time as the only activity"
    elif clock.rule is Rule.endless and durations is not None:
        basis = f"the longest of {durations.occurrences} took {_seconds(durations.shown_seconds)}"
    elif durations is None or not durations.observed:
        basis = "nothing learned yet"
    elif clock.occurrence is Occurrence.first or not durations.count:
        basis = f"learned from a first occurrence of {_seconds(durations.first_seconds)}"
    else:
        basis = f"learned from {durations.count} occurrence{'s' if durations.count > 1 else ''}"
    if durations is not None and durations.ended_seconds:
        basis += f"; ended after {_seconds(durations.ended_seconds)} before"
    return basis


def _seconds(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"
