"""Diagnosis of hangs: verdicts on proved deadlocks, stalls and slow stops.

Adds the line of user code of every rank concerned, from stacks and collective records. Pure; called by
`fault.py`. Exits are diagnosed by `exits.py`.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.diagnosis._place import last_step
from grpo_run.watchdog.diagnosis._rewards import hung_reward
from grpo_run.watchdog.diagnosis.exits import is_victim
from grpo_run.watchdog.evidence.source import OUR_ROOT, is_user_file
from grpo_run.watchdog.evidence.stacks import Stack, main_stack, user_location
from grpo_run.watchdog.observation import Exit, Phase, Slot
from grpo_run.watchdog.stalls.stall import Stall
from grpo_run.watchdog.verdict import Location, Verdict
from grpo_run.watchdog.waits.sentences import ANOTHER_THREAD, name_lock

ENDLESS_ADVICE = (
    "Check what ends the loop at this line. If it may take this long, raise --deadline-floor; what generates"
    " can be limited with --generation max_time=SECONDS."
)
RECORDER = f"{OUR_ROOT}/runtime/rank/collective_recorder.py"
"""Its code is around every collective of a rank."""
EXCHANGE = f"{OUR_ROOT}/runtime/board/exchange.py"

ADVICE = {
    Cause.collective_mismatch: (
        "Every rank must issue the same collectives in the same order. Check what decides the branch at these"
        " lines."
    ),
    Cause.collective_missing_rank: (
        "A collective is inside a condition that differs between ranks, or there is one too many. Compare the"
        " two lines."
    ),
    Cause.rank_exited_early: (
        "All ranks must take the same number of steps. Use grpo_run.trainers.consensus to agree on when to"
        " stop."
    ),
    Cause.generation_stall: (
        "If generation may take this long, raise --deadline-ceiling, or limit it with --generation"
        " max_time=SECONDS."
    ),
    Cause.reward_stall: (
        "Set a timeout on the calls that the reward function waits for, or run rewards in worker processes"
        " with --reward-workers 1."
    ),
    Cause.data_stall: "Check the storage and the worker processes of the data loader.",
    Cause.checkpoint_stall: "Check the file system of output_dir.",
    Cause.weight_sync_stuck: "Check the log of the server that receives the weights, and the network to it.",
    Cause.interpreter_stuck: (
        "The interpreter did not run: a call holds the GIL (a regular expression, native code), or the"
        " process is stopped."
    ),
}


def diagnose_deadlock(
    deadlock: Deadlock, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """Return the verdict on a proved deadlock."""
    locations = _with_full_paths(stack_locations(stacks), deadlock.locations)
    culprit = deadlock.culprits[0] if len(deadlock.culprits) == 1 else None
    place = locations.get(culprit) if culprit is not None else None
    step = last_step(slots)
    return Verdict(
        cause=deadlock.cause,
        culprits=deadlock.culprits,
        step=step,
        phase=_phase(slots, deadlock.culprits or deadlock.waiters),
        sentence=deadlock.sentence,
        signature=_signature(str(deadlock.cause), place, step),
        # without counted steps it is not known whether the same place is the same time
        deterministic=not _trains_without_trainer(slots),
        location=place,
        locations=_only(locations, {*deadlock.culprits, *deadlock.waiters, *deadlock.at}),
        waiters=deadlock.waiters,
        mismatch=deadlock.mismatch,
        advice=_advice(deadlock.cause),
        counted=not _trains_without_trainer(slots),
    )


def diagnose_stall(
    stall: Stall, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """Return the verdict on a missed deadline, or on a rank that nothing can wake.

    A missed deadline is not certain to repeat, because the next attempt waits longer; the restart budget ends
    a run that hangs again and again. A wait that nothing can end may depend on timing, but not twice at the
    same line and step.
    """
    # whoever is in the vote counts as waiting, and is not if its stack shows other code
    voting = [rank for rank in stall.waiters if stacks.get(rank) and _phase(slots, [rank]) == Phase.vote.name]
    at_work = [rank for rank in stall.culprits or voting if not _waits_for_ranks(stacks.get(rank, ()))]
    if len(at_work) == 1:
        stall = stall.alone.get(at_work[0], stall)
    locations = stack_locations(stacks)
    place, beside = _common_places(stall.culprits, locations, stacks)
    step = last_step(slots)
    sentence = stall.sentence
    names = {_name_lock(stacks.get(rank, ())) for rank in stall.culprits}
    if len(names) == 1:
        sentence = sentence.replace(ANOTHER_THREAD, names.pop())
    if place is None and beside is not None:  # the main threads have left the script
        locations.update(dict.fromkeys(stall.culprits, beside))
        place, beside = beside, None
    if place is not None:
        sentence = f"{sentence.rstrip('.')}, at {place.short}."
    # another thread may hold what the main thread waits for, or the interpreter
    if beside is not None and (stall.confidence == "proved" or stall.cause is Cause.interpreter_stuck):
        sentence = f"{sentence.rstrip('.')}; another of its threads is at {beside.short}."
    return Verdict(
        cause=stall.cause,
        culprits=stall.culprits,
        step=step,
        phase=stall.phase.name if stall.phase is not None else None,
        confidence=stall.confidence,
        sentence=sentence,
        signature=_signature(str(stall.cause), None if stall.goes_on else place, step),
        deterministic=math.isinf(stall.lasts_seconds) and not _trains_without_trainer(slots),
        location=place,
        locations=_only(locations, {*stall.culprits, *stall.waiters}),
        waiters=stall.waiters,
        advice=(ENDLESS_ADVICE,) if stall.goes_on else _advice(stall.cause),
        uninterruptible=stall.uninterruptible,
        counted=not _trains_without_trainer(slots),
        failed_reward=(
            hung_reward(stacks.get(rank, ()) for rank in stall.culprits)
            if stall.phase is Phase.reward
            else None
        ),
    )


def diagnose_slow_stop(
    seconds: float, slots: Mapping[int, Slot | None], stacks: Mapping[int, Sequence[Stack]]
) -> Verdict:
    """Return the verdict when ranks did not stop within `seconds` after a stop request.

    Named is the only rank that does not wait for others.
    """
    step, locations = last_step(slots), stack_locations(stacks)
    when = "" if _trains_without_trainer(slots) else f", after step {step}"
    voting = {rank for rank, slot in slots.items() if slot is not None and slot.phase is Phase.vote}
    others = sorted({*slots} - voting)
    # each token of a rank may be a collective, in which it is seen
    at_work = [rank for rank in others if not _waits_for_ranks(stacks.get(rank, ()))] or others
    culprits = tuple(at_work) if len(at_work) == 1 < len(slots) else ()
    phase = _phase(slots, culprits or sorted(slots))
    named = ""
    if culprits and phase is not None:
        place = locations.get(culprits[0])
        named = f": rank {culprits[0]} was in {phase}" + (f", at {place.short}" if place is not None else "")
    return Verdict(
        cause=Cause.stopped,
        culprits=culprits,
        step=step,
        phase=phase,
        confidence="deadline",
        sentence=f"Ranks did not stop within {seconds:g} s after the stop request{when}{named}.",
        signature=f"slow_stop:step{step}",
        locations=locations,
        waiters=tuple(sorted({*slots} - {*culprits})),
        counted=not _trains_without_trainer(slots),
    )


def add_locations(verdict: Verdict, stacks: Mapping[int, Sequence[Stack]]) -> Verdict:
    """Return a verdict on exits with the lines of the waiting ranks added."""
    locations = stack_locations({rank: stacks[rank] for rank in verdict.waiters if rank in stacks})
    if verdict.culprit is not None and verdict.location is not None:
        locations[verdict.culprit] = verdict.location
    return replace(verdict, locations=locations)


def caused_by_collectives(exits: Sequence[Exit]) -> bool:
    """Whether the ranks may have exited because their collectives could not complete.

    Gloo aborts one side of a mismatch (SIGABRT) and closes the connections of the other; a rank that exits
    early with code 0 does the same to its peers. An exception of the script, or any other signal, is a cause
    of its own.
    """
    return all(exit.signal == signal.SIGABRT or exit.completed or is_victim(exit) for exit in exits)


def stack_locations(stacks: Mapping[int, Sequence[Stack]]) -> dict[int, Location]:
    """Return the user's line of each rank whose main thread's stack is known."""
    found = {}
    for rank, threads in stacks.items():
        main = main_stack(threads)
        place = user_location(main) if main is not None else None
        if place is not None:
            found[rank] = place
    return found


def _trains_without_trainer(slots: Mapping[int, Slot | None]) -> bool:
    return any(slot is not None and slot.trains_without_trainer for slot in slots.values())


def _waits_for_ranks(threads: Sequence[Stack]) -> bool:
    """Whether the main thread is inside `torch.distributed`, or waits for what other ranks send through the
    board.

    No record shows a wait in a store while groups are created: on the board the rank looks as silent as the
    rank that it waits for.
    """
    main = main_stack(threads)
    frames = [frame for frame in main.frames if frame.line] if main is not None else []
    if frames and frames[0].file == EXCHANGE:
        return True
    outer = [frame for frame in frames if frame.file != RECORDER]
    return bool(outer) and "torch/distributed/" in outer[0].file


def _name_lock(threads: Sequence[Stack]) -> str:
    """What the main thread waits for if it is in a futex."""
    main = main_stack(threads)
    if main is None or not main.frames:
        return ANOTHER_THREAD
    return name_lock((frame.file, frame.function) for frame in main.frames)


def _common_places(
    culprits: Sequence[int], locations: Mapping[int, Location], stacks: Mapping[int, Sequence[Stack]]
) -> tuple[Location | None, Location | None]:
    """The line of user code that all culprits' main threads are in, and that of another of their threads;
    None if they differ.
    """
    mains = {locations.get(rank) for rank in culprits}
    place = mains.pop() if len(mains) == 1 else None
    others = {_other_thread(stacks.get(rank, ()), place) for rank in culprits}
    return place, others.pop() if len(others) == 1 and not mains else None


def _other_thread(threads: Sequence[Stack], place: Location | None) -> Location | None:
    """The line of user code that a thread beside the main thread is in, if it is another one."""
    for stack in threads:
        found = user_location(stack) if not stack.main else None
        if found is not None and found != place and is_user_file(found.file):
            return found
    return None


def _with_full_paths(
    by_stack: Mapping[int, Location], by_record: Mapping[int, Location]
) -> dict[int, Location]:
    """Prefer the records' lines; take the stack's full path if it shows the same line."""
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
    # a record keeps only the end of a long path, so the file name identifies the place
    return (
        f"{cause}@{place.file.rpartition('/')[2]}:{place.line}:step{step}" if place else f"{cause}:step{step}"
    )


def _only(locations: Mapping[int, Location], ranks: set[int]) -> dict[int, Location]:
    return {rank: place for rank, place in sorted(locations.items()) if rank in ranks}


def _advice(cause: Cause) -> tuple[str, ...]:
    return (ADVICE[cause],) if cause in ADVICE else ()
