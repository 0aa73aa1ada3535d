"""Hangs that collectives cannot prove: a rank in a phase for longer than it ever needed, and without progress.

The last resort of detection, after exits and after what the ranks' collective records prove. Called by the
supervisor's watch at every look, with what it read; pure, reads no clock and ends nothing. What could not be read
is unknown: never a culprit and never a reason. Slow ranks (`stragglers`) are reported, never ended.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from statistics import median

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence, deadline_seconds
from grpo_run.watchdog.stalls.durations import Durations

BEAT_LATE_SECONDS = 3.0
"""A thread of every rank's interpreter beats far more often; later than this, the interpreter does not run."""
EXIT_BYTES = 64 * 1024
"""In all that time: a logger's last words are less."""
EXIT_BUSY_FRACTION = 0.01
"""Of one core: what an idle interpreter's own threads may use."""
STRAGGLER_RATIO = 1.5
STRAGGLER_SECONDS = 0.05
STRAGGLER_OCCURRENCES = 20
OWN_WORK = (Phase.generate, Phase.reward, Phase.data, Phase.optimizer, Phase.checkpoint)
"""Phases in which a rank mostly works for itself; in the others every rank is as slow as the slowest."""
_WATCHED = (RankState.starting, RankState.training, RankState.between)
_CAUSES = {
    Phase.generate: Cause.generation_stall,
    Phase.reward: Cause.reward_stall,
    Phase.data: Cause.data_stall,
    Phase.checkpoint: Cause.checkpoint_stall,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessFacts:
    """One look at a rank's process and its descendants.

    `state` is the letter of /proc/PID/stat of the rank itself: R, S, D, T, Z. `cpu_seconds` (user and system) and
    `io_bytes` (read and written, `send` and `recv` not counted) are sums over the session. `beat_age_seconds` is how long ago a Python
    thread of the rank last ran, NaN where unknown.
    """

    state: str
    cpu_seconds: float
    io_bytes: int
    beat_age_seconds: float = float("nan")


@dataclass(frozen=True, kw_only=True, slots=True)
class Stall:
    """A suspicion with a name. `culprits` is empty when every rank waits and none can be told from the others.

    `phase`, `deadline_seconds` and `waited_seconds` are the first culprit's. `uninterruptible`: a culprit is in the
    kernel and cannot be killed, so a restart would be spent for nothing.
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Straggler:
    """A rank that needs much longer than the others for its own work."""

    rank: int
    phase: Phase
    median_seconds: float
    others_seconds: float

    @property
    def ratio(self) -> float:
        """How many times as long as the others."""
        return self.median_seconds / self.others_seconds


@dataclass(frozen=True, slots=True)
class InnerTime:
    """Time of phases that have ended inside phases that are still open, as successive looks saw it.

    A phase pauses while another is open inside it, and is given the time of those that ended: a checkpoint of a
    minute inside a `data` phase of milliseconds is no reason. For each kind of inner phase at most that kind's own
    deadline counts, so that phases without end inside a phase do not hide it.
    """

    spent: Mapping[tuple[int, int, OpenPhase], Mapping[Phase, float]] = field(default_factory=dict)
    """Seconds by kind of inner phase; the key is rank, depth and the phase that is open."""
    ended_at: Mapping[tuple[int, int, OpenPhase], float] = field(default_factory=dict)
    nests: Mapping[int, tuple[OpenPhase, ...]] = field(default_factory=dict)

    def after(self, slots: Mapping[int, Slot | None], now: float) -> InnerTime:
        """The next look, at `now` (monotonic seconds). A slot that could not be read stays as it was."""
        spent: dict[tuple[int, int, OpenPhase], Mapping[Phase, float]] = {}
        ended_at: dict[tuple[int, int, OpenPhase], float] = {}
        nests = dict(self.nests)
        for rank, slot in slots.items():
            before = self.nests.get(rank, ())
            nest = before if slot is None else slot.phases
            nests[rank] = nest
            same = 0
            while same < min(len(nest), len(before)) and nest[same] == before[same]:
                same += 1
            for depth in range(same):
                key = (rank, depth, nest[depth])
                if key in self.spent:
                    spent[key], ended_at[key] = self.spent[key], self.ended_at[key]
            if 0 < same < len(before):  # the phase directly inside the innermost one that stayed has ended
                inner = before[same]
                ended = nest[same].since_seconds if same < len(nest) else now
                key = (rank, same - 1, nest[same - 1])
                kinds = dict(spent.get(key, {}))
                kinds[inner.phase] = kinds.get(inner.phase, 0.0) + max(0.0, ended - inner.since_seconds)
                spent[key], ended_at[key] = kinds, ended
        return InnerTime(spent, ended_at, nests)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Overdue:
    """A rank's innermost phase that has taken too long."""

    rank: int
    phase: Phase
    since_seconds: float
    silent_seconds: float
    deadline_seconds: float
    occurrence: Occurrence


def find(
    slots: Mapping[int, Slot | None],
    *,
    now: float,
    learned: Mapping[Phase, Durations],
    completed: Mapping[int, Collection[Phase]],
    settings: DeadlineSettings,
    processes: Mapping[int, ProcessFacts | None],
    progress: Mapping[int, float],
    waiting: Mapping[int, bool],
    inner: InnerTime | None = None,
    whole_world: bool = True,
) -> Stall | None:
    """The ranks that hang, or None.

    Every open phase has its own clock, from its begin or from the rank's last counted progress inside it. A rank is a
    culprit when a clock is past its deadline and it does not merely wait for others. Progress extends silence without
    limit: an hour of generation that goes on is legitimate, so the ceiling bounds silence, never the total.

    Args:
        slots: the local ranks' last readings; None where nothing could be read.
        now: monotonic seconds.
        learned: what is known of each phase, over ranks and attempts (`merge_ranks`, `then`).
        completed: the phases each rank has ended in this attempt (the keys of its tallies). A rank that is not there
            is taken to be in its first occurrence of everything, which waits longer.
        processes: a look at each rank's process; None or absent where there was none.
        progress: when each rank last did work that counts (tokens, scores, bytes); absent or 0 for never.
        waiting: the rank is blocked in a collective, also one that C++ issued. Absent where it is not known: the rank
            is then not blamed while another rank that does not wait is still in time.
        inner: what `InnerTime.after` made of the looks so far, this one included.
        whole_world: there are no ranks on other nodes, so that ranks that all wait wait for one another.
    """
    inner = inner or InnerTime()
    known: dict[int, Slot] = {}
    blind = False
    for rank, slot in sorted(slots.items()):
        facts = processes.get(rank)
        if slot is None or slot.state is RankState.absent or (facts is not None and facts.state == "Z"):
            blind = True
        elif slot.state in _WATCHED:
            known[rank] = slot
    overdue: dict[int, _Overdue] = {}
    for rank, slot in known.items():
        late = _overdue(slot, now, learned, completed.get(rank, ()), settings, progress.get(rank, 0.0), inner)
        if late is not None:
            overdue[rank] = late
    if not overdue:
        return None
    merely_waiting = {
        rank
        for rank, slot in known.items()
        if not _stopped(processes.get(rank)) and (waiting.get(rank, False) or slot.phase is Phase.vote)
    }
    working = known.keys() - overdue.keys() - merely_waiting
    culprits = [
        late
        for rank, late in overdue.items()
        if rank not in merely_waiting
        # not known whether it waits: then it may wait for any rank that is in time or cannot be seen
        and (
            rank in waiting
            or _stopped(processes.get(rank))
            or not (working or (blind and len(slots) > 1) or not whole_world)
        )
    ]
    if not culprits:
        if merely_waiting != overdue.keys() or merely_waiting != known.keys() or blind or not whole_world:
            return None
        culprits = [late for rank, late in overdue.items() if _beat_late(processes.get(rank))]
        if not culprits:
            return _nobody(overdue)
    culprits.sort(key=lambda late: (late.since_seconds, late.rank))
    blamed = tuple(late.rank for late in culprits)
    return _stall(
        culprits, tuple(sorted(merely_waiting - set(blamed))), processes, learned.get(culprits[0].phase)
    )


def _clocks(slot: Slot) -> tuple[OpenPhase, ...]:
    """The rank's open phases; with none, the script itself runs: before `train()`, or beside it."""
    if slot.phases:
        return slot.phases
    phase = Phase.startup if slot.state is RankState.starting else Phase.idle
    return (OpenPhase(phase=phase, since_seconds=slot.last_progress_seconds),)


def _overdue(
    slot: Slot,
    now: float,
    learned: Mapping[Phase, Durations],
    completed: Collection[Phase],
    settings: DeadlineSettings,
    progress: float,
    inner: InnerTime,
) -> _Overdue | None:
    """The innermost of the rank's clocks that is past its deadline."""

    nest = _clocks(slot)
    for depth in range(len(nest) - 1, -1, -1):
        here = nest[depth]
        until = now if depth == len(nest) - 1 else nest[depth + 1].since_seconds
        since = max(here.since_seconds, progress)
        silent = until - since
        key = (slot.rank, depth, here)
        if since < inner.ended_at.get(key, -1.0):  # progress after it ended has reset the clock anyway
            silent -= sum(
                min(seconds, deadline_seconds(kind, learned.get(kind), Occurrence.first, settings))
                for kind, seconds in inner.spent[key].items()
            )
        occurrence = Occurrence.later if here.phase in completed else Occurrence.first
        limit = deadline_seconds(here.phase, learned.get(here.phase), occurrence, settings)
        if silent > limit:
            return _Overdue(
                rank=slot.rank,
                phase=here.phase,
                since_seconds=since,
                silent_seconds=silent,
                deadline_seconds=limit,
                occurrence=occurrence,
            )
    return None


def _stopped(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.state == "T"


def _beat_late(facts: ProcessFacts | None) -> bool:
    return facts is not None and facts.beat_age_seconds > BEAT_LATE_SECONDS


def _stall(
    culprits: list[_Overdue],
    waiters: tuple[int, ...],
    processes: Mapping[int, ProcessFacts | None],
    durations: Durations | None,
) -> Stall:
    first = culprits[0]
    facts = processes.get(first.rank)
    cause = _CAUSES.get(first.phase, Cause.no_progress)
    silence = f"in {first.phase.name} for {_text(first.silent_seconds)} without progress"
    if facts is not None and _stopped(facts):
        cause = Cause.interpreter_stuck
        subject = f"Rank {first.rank} is stopped (SIGSTOP), {silence}"
    elif facts is not None and _beat_late(facts):
        cause = Cause.interpreter_stuck
        subject = (
            f"Rank {first.rank}'s interpreter has not run for {_text(facts.beat_age_seconds)}, {silence}"
        )
    else:
        subject = f"Rank {first.rank} has been {silence}"
    blamed = [late.rank for late in culprits]
    sleeping = [rank for rank in blamed if (look := processes.get(rank)) is not None and look.state == "D"]
    others = f", and {_ranks(blamed[1:])} as well" if len(blamed) > 1 else ""
    kernel = f"; {_ranks(sleeping)} slept uninterruptibly when looked at" if sleeping else ""
    basis = _basis(durations, first.occurrence)
    return Stall(
        cause=cause,
        culprits=tuple(blamed),
        waiters=waiters,
        phase=first.phase,
        deadline_seconds=first.deadline_seconds,
        waited_seconds=first.silent_seconds,
        sentence=f"{subject} (deadline {_text(first.deadline_seconds)}, {basis}){others}{kernel}.",
        uninterruptible=bool(sleeping),
    )


def _nobody(overdue: Mapping[int, _Overdue]) -> Stall:
    """All ranks wait, all for too long: the last to begin is what the time is counted from."""
    last = min(overdue.values(), key=lambda late: late.silent_seconds)
    who = "Every rank waits" if len(overdue) > 1 else f"Rank {last.rank} waits"
    return Stall(
        cause=Cause.no_progress,
        culprits=(),
        waiters=tuple(sorted(overdue)),
        phase=last.phase,
        deadline_seconds=last.deadline_seconds,
        waited_seconds=last.silent_seconds,
        sentence=f"{who} for others, for {_text(last.silent_seconds)} or longer (deadline"
        f" {_text(last.deadline_seconds)}); cannot tell which rank is missing.",
    )


def _basis(durations: Durations | None, occurrence: Occurrence) -> str:
    if durations is None or not (durations.count or durations.first_seconds > 0):
        return "nothing learned yet"
    if occurrence is Occurrence.first or not durations.count:
        return f"learned from a first occurrence of {_text(durations.first_seconds)}"
    return f"learned from {durations.count} occurrence{'s' if durations.count > 1 else ''}"


def _text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds:.0f} s"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def hung_at_exit(
    slots: Mapping[int, Slot | None],
    processes_before: Mapping[int, ProcessFacts | None],
    processes_now: Mapping[int, ProcessFacts | None],
    quiet_seconds: float,
    settings: DeadlineSettings,
) -> tuple[int, ...]:
    """Ranks whose script has ended, whose process has not, and which do nothing any more.

    An upload or a last write is progress: bytes move, in the rank or in a child of it. A session whose sums have
    fallen has lost a process, which is progress too. A process that is stopped or asleep does nothing.

    Args:
        processes_before: a look `quiet_seconds` ago.
        processes_now: a look now; a rank absent or unreadable in either is not judged.
    """
    hung: list[int] = []
    for rank, slot in sorted(slots.items()):
        before, now = processes_before.get(rank), processes_now.get(rank)
        if slot is None or slot.state is not RankState.done or before is None or now is None:
            continue
        quiet = (
            abs(now.cpu_seconds - before.cpu_seconds) <= EXIT_BUSY_FRACTION * quiet_seconds
            and abs(now.io_bytes - before.io_bytes) < EXIT_BYTES
        )
        if quiet and now.state != "Z" and quiet_seconds >= settings.exit_seconds:
            hung.append(rank)
    return tuple(hung)


def stragglers(durations_by_rank: Mapping[int, Mapping[Phase, Durations]]) -> list[Straggler]:
    """Ranks whose median in their own work is half as long again as the others', most time lost first.

    Medians are read from half-octave buckets, so a ratio near the threshold of 1.5 may fall on either side.
    """
    found = []
    for phase in OWN_WORK:
        medians = {
            rank: phases[phase].median_seconds
            for rank, phases in durations_by_rank.items()
            if phase in phases and phases[phase].count >= STRAGGLER_OCCURRENCES
        }
        for rank, own in medians.items():
            others = [seconds for other, seconds in medians.items() if other != rank]
            if not others:
                continue
            usual = median(others)
            if own >= STRAGGLER_RATIO * usual and own - usual >= STRAGGLER_SECONDS:
                found.append(Straggler(rank=rank, phase=phase, median_seconds=own, others_seconds=usual))
    return sorted(found, key=lambda one: (one.others_seconds - one.median_seconds, one.rank))
