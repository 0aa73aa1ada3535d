"""From what was found to the verdict that is written, shown and acted on.

`failure.py` judges exits; here a proved deadlock and a passed deadline become verdicts of the same shape, each with
the line of user code of every rank concerned. Pure; called by the supervisor's inquiry once evidence is on disk.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.proof import Deadlock
from grpo_run.watchdog.evidence.stacks import Stack, user_location
from grpo_run.watchdog.observation import Exit, Slot
from grpo_run.watchdog.stalls.detection import Stall
from grpo_run.watchdog.verdict import Location, Verdict
from grpo_run.watchdog.verdicts.failure import is_victim

ADVICE = {
    Cause.collective_mismatch: "Every rank must issue the same collectives in the same order; look at what decides the branch at these lines.",
    Cause.collective_missing_rank: "A collective behind a condition that is not the same on all ranks, or one too many; compare the two lines.",
    Cause.rank_exited_early: "All ranks must take the same number of steps; grpo_run.trainers.consensus decides together when to leave.",
    Cause.generation_stall: "If generation may take this long: raise --deadline-ceiling, or bound it with --generation max_time=SECONDS.",
    Cause.reward_stall: "Give what the reward waits for a timeout of its own.",
    Cause.data_stall: "Look at the storage or the worker processes behind the data loader.",
    Cause.checkpoint_stall: "Look at the file system under output_dir.",
    Cause.interpreter_stuck: "The interpreter did not run: a call that holds the GIL (a regular expression, native code), or a stopped process.",
}


def of_deadlock(
    deadlock: Deadlock, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """The verdict on a proved deadlock."""
    locations = _whole(stack_locations(stacks), deadlock.locations)
    culprit = deadlock.culprits[0] if len(deadlock.culprits) == 1 else None
    place = locations.get(culprit) if culprit is not None else None
    step = last_step(slots)
    return Verdict(
        cause=deadlock.cause,
        culprits=deadlock.culprits,
        step=step,
        phase=_phase(slots, deadlock.culprits or deadlock.waiters),
        confidence="proved",
        sentence=deadlock.sentence,
        signature=_signature(str(deadlock.cause), place, step),
        deterministic=True,
        location=place,
        locations=_only(locations, {*deadlock.culprits, *deadlock.waiters, *deadlock.at}),
        waiters=deadlock.waiters,
        mismatch=deadlock.mismatch,
        advice=_advice(deadlock.cause),
    )


def of_stall(
    stall: Stall, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """The verdict on a deadline that passed."""
    locations = stack_locations(stacks)
    culprit = stall.culprits[0] if len(stall.culprits) == 1 else None
    place = locations.get(culprit) if culprit is not None else None
    step = last_step(slots)
    sentence = stall.sentence
    if place is not None:
        sentence = f"{sentence.rstrip('.')}, at {place.short}."
    return Verdict(
        cause=stall.cause,
        culprits=stall.culprits,
        step=step,
        phase=stall.phase.name if stall.phase is not None else None,
        confidence="deadline",
        sentence=sentence,
        signature=_signature(str(stall.cause), place, step),
        deterministic=False,
        location=place,
        locations=_only(locations, {*stall.culprits, *stall.waiters}),
        waiters=stall.waiters,
        advice=_advice(stall.cause),
        uninterruptible=stall.uninterruptible,
    )


def with_locations(verdict: Verdict, stacks: Mapping[int, Sequence[Stack]]) -> Verdict:
    """A verdict on exits, with where the survivors stood."""
    locations = stack_locations({rank: stacks[rank] for rank in verdict.waiters if rank in stacks})
    if verdict.culprit is not None and verdict.location is not None:
        locations[verdict.culprit] = verdict.location
    return replace(verdict, locations=locations)


def caused_by_collectives(exits: Sequence[Exit]) -> bool:
    """Whether ranks that ended may have done so because their collectives could not meet.

    Gloo aborts one side of a mismatch (SIGABRT) and closes the other's connections; a rank that left early (code 0)
    does the same to those it leaves behind. An exception of the script's own, or any other signal, speaks for itself.
    """
    return all(exit.signal == signal.SIGABRT or exit.completed or is_victim(exit) for exit in exits)


def stack_locations(stacks: Mapping[int, Sequence[Stack]]) -> dict[int, Location]:
    """The user's line of each rank whose main thread's stack is known."""
    found = {}
    for rank, threads in stacks.items():
        main = next((stack for stack in threads if stack.main), None)
        place = user_location(main) if main is not None else None
        if place is not None:
            found[rank] = place
    return found


def last_step(slots: Mapping[int, Slot | None]) -> int:
    """The last optimizer step that any rank finished."""
    readings = [slot for slot in slots.values() if slot is not None]
    return max((slot.step for slot in readings), default=0)


def _whole(by_stack: Mapping[int, Location], by_record: Mapping[int, Location]) -> dict[int, Location]:
    """The records' lines; where the stack shows the same line, its file's whole path."""
    found = {**by_stack, **by_record}
    for rank, place in by_record.items():
        seen = by_stack.get(rank)
        if seen is not None and seen.line == place.line and seen.file.endswith(place.file):
            found[rank] = seen
    return found


def _phase(slots: Mapping[int, Slot | None], ranks: Sequence[int]) -> str | None:
    for rank in ranks:
        slot = slots.get(rank)
        if slot is not None and slot.phase is not None:
            return slot.phase.name
    return None


def _signature(cause: str, place: Location | None, step: int) -> str:
    # a record keeps the end of a long path only: the name has to do
    return (
        f"{cause}@{place.file.rpartition('/')[2]}:{place.line}:step{step}" if place else f"{cause}:step{step}"
    )


def _only(locations: Mapping[int, Location], ranks: set[int]) -> dict[int, Location]:
    return {rank: place for rank, place in sorted(locations.items()) if rank in ranks}


def _advice(cause: Cause) -> tuple[str, ...]:
    return (ADVICE[cause],) if cause in ADVICE else ()


def of_slow_stop(
    seconds: float, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """The verdict when ranks did not stop within `seconds` of having been asked to."""
    step = last_step(slots)
    return Verdict(
        cause=Cause.unknown,
        culprits=(),
        step=step,
        phase=_phase(slots, sorted(slots)),
        confidence="deadline",
        sentence=f"Ranks did not stop within {seconds:g} s of being asked to, at step {step}.",
        signature=f"slow_stop:step{step}",
        deterministic=False,
        locations=stack_locations(stacks),
        waiters=tuple(sorted(slots)),
    )
