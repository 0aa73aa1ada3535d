"""From how ranks ended to one verdict: who failed first, and who only noticed.

When one rank dies, its peers soon fail too, with errors of the collective they were in; those are victims.
The culprit is the first rank that was killed by a signal, else the first whose error is its own. Pure: takes
exits and slots, does no I/O and reads no clock. Called by the supervisor once evidence is gathered.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Exit, RankState, Slot
from grpo_run.watchdog.verdict import Location, Verdict

_PEER_ERROR = re.compile(
    r"connection (?:closed|reset) by peer|connectFullMesh failed|remote process has|socket (?:timeout|closed)"
    r"|Broken pipe|DistNetworkError|DistStoreError|NCCL (?:error|communicator was aborted)|ncclRemoteError",
    re.IGNORECASE,
)


_TORCH_ERRORS = frozenset(
    {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "TimeoutError"}
)
"""What torch raises from a collective or a store. Python's own connection errors are the script's: a reward server's."""


def is_victim(exit: Exit) -> bool:
    """The rank's error says that a peer went away, not that this rank did anything wrong."""
    return (
        exit.error is not None
        and exit.error.type in _TORCH_ERRORS
        and bool(_PEER_ERROR.search(f"{exit.error.type}: {exit.error.message}"))
    )


def diagnose(
    exits: Sequence[Exit], slots: Mapping[int, Slot | None], *, best_position: tuple[int, int]
) -> Verdict:
    """The verdict over an attempt in which at least one rank failed.

    Args:
        exits: the failed ranks, as seen until evidence was complete.
        slots: the last reading of every local rank's slot, by rank; None where nothing could be read.
        best_position: the furthest (train call, step) the run ever committed, over all attempts.
    """
    assert exits, "no failed rank, no verdict"
    ordered = sorted(exits, key=lambda exit: exit.order)
    signalled = [exit for exit in ordered if exit.signal is not None]
    own = sorted(
        (exit for exit in ordered if exit.signal is None and not is_victim(exit)),
        key=lambda exit: (exit.error is None, exit.error.wall_time if exit.error else 0.0, exit.order),
    )
    if signalled and not (own and own[0].error and own[0].order < signalled[0].order):
        culprit = signalled[0]
    else:
        culprit = own[0] if own else ordered[0]
    slot = slots.get(culprit.rank)
    step = max((reading.step for reading in slots.values() if reading is not None), default=0)
    phase = slot.phase.name if slot is not None and slot.phase is not None else None
    waiters = tuple(sorted(rank for rank in slots if rank != culprit.rank))
    everyone_victim = culprit.signal is None and is_victim(culprit)
    return Verdict(
        cause=_cause(culprit, slots, everyone_victim),
        culprits=() if everyone_victim else (culprit.rank,),
        step=step,
        phase=phase,
        confidence="unknown" if everyone_victim else "proved",
        sentence=_sentence(culprit, step, phase, everyone_victim),
        signature=_signature(culprit, step),
        deterministic=culprit.signal is None and not everyone_victim,
        location=_location(culprit),
        traceback=culprit.error.traceback if culprit.error else None,
        waiters=waiters,
        advice=_advice(culprit, best_position),
    )


def left_early(left: Sequence[Exit], failed: Sequence[Exit], slots: Mapping[int, Slot | None]) -> Verdict:
    """The verdict when some ranks ended with code 0 and the others lost their connection to them.

    Args:
        left: ended well, by their own account.
        failed: noticed, and could not go on.
    """
    ranks = tuple(sorted(exit.rank for exit in left))
    waiters = tuple(sorted(exit.rank for exit in failed))
    step = max((slot.step for slot in slots.values() if slot is not None), default=0)
    first = min(left, key=lambda exit: exit.order)
    place = _location(first)
    who = f"Rank {ranks[0]}" if len(ranks) == 1 else f"Ranks {', '.join(map(str, ranks))}"
    where = f" (at {place.short})" if place is not None else ""
    slot = slots.get(first.rank)
    return Verdict(
        cause=Cause.rank_exited_early,
        culprits=ranks,
        step=step,
        phase=slot.phase.name if slot is not None and slot.phase is not None else None,
        confidence="proved",
        sentence=f"{who} left at step {step}{where} while rank {waiters[0]} still trained and needed it.",
        signature=f"rank_exited_early:{ranks}:step{step}",
        deterministic=True,
        location=place,
        waiters=waiters,
    )


def _location(exit: Exit) -> Location | None:
    if exit.error is None or exit.error.location is None:
        return None
    file, line, function = exit.error.location
    return Location(file=file, line=line, function=function)


def _cause(culprit: Exit, slots: Mapping[int, Slot | None], everyone_victim: bool) -> Cause:
    if everyone_victim:
        return Cause.unknown
    if culprit.signal is not None:
        return Cause.signal
    if culprit.error is not None and culprit.error.type == "ConsensusError":
        return Cause.collective_mismatch
    slot = slots.get(culprit.rank)
    if slot is None or (slot.train_call <= 1 and slot.step == 0 and slot.resumed_step == 0):
        return Cause.startup_failure
    return Cause.exception


def _sentence(culprit: Exit, step: int, phase: str | None, everyone_victim: bool) -> str:
    place = f"at step {step}" + (f" in phase {phase}" if phase else "")
    if everyone_victim:
        return f"Every local rank lost its connection to a peer {place}; the first cause is not on this node."
    if culprit.signal is not None:
        return f"Rank {culprit.rank} was killed by {signal_name(culprit.signal)} {place}."
    if culprit.error is not None and culprit.error.type != "SystemExit":
        first_line = (
            culprit.error.message.strip().splitlines()[0][:200] if culprit.error.message.strip() else ""
        )
        return f"Rank {culprit.rank} raised {culprit.error.type} {place}" + (
            f": {first_line}" if first_line else "."
        )
    return f"Rank {culprit.rank} exited with code {culprit.exit_code} {place} without finishing the script."


def _signature(culprit: Exit, step: int) -> str:
    if culprit.signal is not None:
        return f"signal:{culprit.signal}:rank{culprit.rank}:step{step}"
    if culprit.error is not None:
        file, line, _ = culprit.error.location or ("?", 0, "?")
        return f"{culprit.error.type}@{file}:{line}:step{step}"
    return f"exit:{culprit.exit_code}:step{step}"


def _advice(culprit: Exit, best_position: tuple[int, int]) -> tuple[str, ...]:
    if culprit.signal == signal.SIGKILL:
        return ("If nobody killed it: look for the kernel's out-of-memory killer (dmesg, memory.events).",)
    if culprit.error is not None and best_position == (0, 0):
        return ("The script failed before its first step; starting it again would fail again.",)
    return ()


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; real-time signals and unknown ones by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def all_done(slots: Sequence[Slot | None]) -> bool:
    """Every rank's script has run its last line."""
    return bool(slots) and all(slot is not None and slot.state is RankState.done for slot in slots)
