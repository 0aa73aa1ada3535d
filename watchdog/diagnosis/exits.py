"""Diagnosis of exits: which rank failed first, and which ranks only lost their peer.

When one rank exits, its peers soon fail too, with errors of the collective they were in; those are victims.
The culprit is the first rank that was killed by a signal, or else the first rank with an error of its own. A
rank that has run out of memory is never a victim, and is blamed before ranks that were aborted: its exit is
what aborts them. An alarm that has ended the ranks is recognized too. Pure: takes exits and slots, does no
I/O and reads no clock. Called by `fault.py`.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping, Sequence

from grpo_run.watchdog.causes import Cause, Origin, origin_of
from grpo_run.watchdog.diagnosis._out_of_memory import memory_advice, memory_sentence, memory_signature
from grpo_run.watchdog.diagnosis._place import last_step, phase_of, phases_of, position_of
from grpo_run.watchdog.memory.shortage import Shortage, shortage_of, shortage_of_bus_error
from grpo_run.watchdog.observation import Exit, Phase, ProcessEnd, RankError, Slot
from grpo_run.watchdog.text import rank_names
from grpo_run.watchdog.verdict import Location, Verdict

_PEER_ERROR = re.compile(
    r"connection (?:closed|reset) by peer|connectFullMesh failed|remote process has|socket (?:timeout|closed)"
    r"|Broken pipe|DistNetworkError|DistStoreError|NCCL (?:error|communicator was aborted)|ncclRemoteError",
    re.IGNORECASE,
)
_TORCH_ERRORS = frozenset(
    {"RuntimeError", "DistBackendError", "DistNetworkError", "DistStoreError", "DistError", "TimeoutError"}
)
"""Errors that torch raises from collectives and stores. Python's own connection errors come from the
script."""


def is_victim(exit: Exit) -> bool:
    """Whether the rank's error only reports that a peer exited."""
    return exit.error is not None and is_lost_peer(exit.error)


def is_lost_peer(error: RankError) -> bool:
    """Whether the error only reports that a peer exited."""
    found = error.type in _TORCH_ERRORS and _PEER_ERROR.search(f"{error.type}: {error.message}")
    return bool(found) and shortage_of(error, None) is None


NOT_OF_SCRIPT = frozenset({"KeyboardInterrupt", "InjectedFault"})
"""Exceptions that the script raises for somebody else: a SIGINT, and a fault of `--inject`."""
MAX_SAID_CHARACTERS = 200
"""Of a line of an exception's message in a sentence; the evidence has all of it."""


def diagnose_exits(
    exits: Sequence[Exit],
    slots: Mapping[int, Slot | None],
    *,
    best_position: tuple[int, int],
    shared_memory_free_bytes: int | None = None,
) -> Verdict:
    """Return the verdict on an attempt in which at least one rank failed.

    Args:
        exits: the failed ranks, as observed until evidence was complete.
        slots: last reading of every local rank's slot; None if nothing could be read.
        best_position: the furthest (train call, step) that the run has committed, over all attempts.
        shared_memory_free_bytes: space in /dev/shm, read after the exits; None if it is not known.
    """
    assert exits, "a verdict needs at least one failed rank"
    ordered = sorted(exits, key=lambda exit: exit.order)
    lost = [exit for exit in ordered if exit.forkserver is not None]
    if lost:
        return _diagnose_forkserver(lost, slots)
    signalled = [exit for exit in ordered if exit.signal is not None]
    own = sorted(
        (exit for exit in ordered if exit.signal is None and not is_victim(exit)),
        key=lambda exit: (exit.error is None, exit.error.wall_time if exit.error else 0.0, exit.order),
    )
    short = sorted(
        (exit for exit in ordered if shortage_of(exit.error, None) is not None),
        key=lambda exit: (exit.signal is not None, exit.error.wall_time if exit.error else 0.0, exit.order),
    )
    if short and signalled and signalled[0].signal == signal.SIGABRT:
        culprit = short[0]
    elif signalled and not (own and own[0].error and own[0].order < signalled[0].order):
        culprit = signalled[0]
    else:
        culprit = own[0] if own else ordered[0]
    slot = slots.get(culprit.rank)
    step = last_step(slots)
    waiters = tuple(sorted(rank for rank in slots if rank != culprit.rank))
    all_victims = culprit.signal is None and is_victim(culprit)
    alone = slot is not None and slot.trains_without_trainer
    starting = culprit.signal is None and not all_victims and _is_starting(culprit, slot)
    origin, final = origin_of(culprit, starting=starting)
    board_phases = [one.phase for one in slot.phases] if slot is not None else None
    shortage = shortage_of(culprit.error, board_phases)
    if shortage is None and culprit.signal == signal.SIGBUS:
        shortage = shortage_of_bus_error(shared_memory_free_bytes, board_phases)
    place = position_of(culprit, slot, step, shortage)
    return Verdict(
        cause=shortage.cause if shortage is not None else _cause(culprit, slots, all_victims),
        culprits=() if all_victims else (culprit.rank,),
        step=step,
        phase=phase_of(culprit, slot),
        confidence="unknown" if all_victims else "proved",
        sentence=(
            _sentence(culprit, place, all_victims)
            if shortage is None
            else memory_sentence(shortage, culprit.rank, place)
        ),
        signature=_signature(culprit, step, alone, shortage),
        deterministic=culprit.signal is None and not all_victims,
        location=_location(culprit),
        traceback=culprit.error.traceback if culprit.error else None,
        waiters=waiters,
        advice=(
            _advice(culprit, best_position, alone, origin) if shortage is None else memory_advice(shortage)
        ),
        starting=starting,
        origin=origin,
        final=final,
        counted=not alone,
        shortage=shortage,
        exception=_exception(culprit),
    )


def diagnose_early_exit(
    completed: Sequence[Exit], failed: Sequence[Exit], slots: Mapping[int, Slot | None]
) -> Verdict:
    """Return the verdict when some ranks exited with code 0 and the others lost their connection to them.

    Args:
        completed: ranks that exited with code 0.
        failed: ranks that lost their connection.
    """
    ranks = tuple(sorted(exit.rank for exit in completed))
    waiters = tuple(sorted(exit.rank for exit in failed))
    step = last_step(slots)
    first = min(completed, key=lambda exit: exit.order)
    place = _location(first)
    where = f", at {place.short}," if place is not None else ""
    slot = slots.get(first.rank)
    counted = slot is None or not slot.trains_without_trainer
    return Verdict(
        cause=Cause.rank_exited_early,
        culprits=ranks,
        step=step,
        phase=phase_of(first, slot),
        sentence=(
            f"{rank_names(ranks, capitalize=True)} exited{position_of(first, slot, step)}{where}"
            f" while rank {waiters[0]} was still training."
        ),
        signature=f"rank_exited_early:{ranks}:step{step}",
        # without counted steps it is not known whether the same place is the same time
        deterministic=counted,
        location=place,
        waiters=waiters,
        counted=counted,
    )


def _diagnose_forkserver(lost: Sequence[Exit], slots: Mapping[int, Slot | None]) -> Verdict:
    """Return the verdict on ranks that the kernel has killed because the process that had started them has
    ended.
    """
    first = lost[0]
    end = first.forkserver
    assert end is not None
    slot = slots.get(first.rank)
    step = last_step(slots)
    ranks = [exit.rank for exit in lost]
    return Verdict(
        cause=Cause.signal,
        step=step,
        phase=phase_of(first, slot),
        sentence=(
            f"The forkserver, which starts the ranks, {end_text(end)}{position_of(first, slot, step)};"
            f" {rank_names(ranks)} died with it."
        ),
        signature=f"forkserver:{end.signal or end.exit_code}:step{step}",
        waiters=tuple(sorted(slots)),
        advice=_kill_advice(end.signal),
        counted=slot is None or not slot.trains_without_trainer,
    )


def _location(exit: Exit) -> Location | None:
    if exit.error is None or exit.error.location is None:
        return None
    file, line, function = exit.error.location
    return Location(file=file, line=line, function=function)


def _cause(culprit: Exit, slots: Mapping[int, Slot | None], all_victims: bool) -> Cause:
    if all_victims:
        return Cause.unknown
    if culprit.signal is not None:
        return Cause.signal
    if culprit.error is not None and culprit.error.type == "ConsensusError":
        return Cause.collective_mismatch
    if culprit.exit_code == 0:
        return Cause.rank_exited_early
    slot = slots.get(culprit.rank)
    if slot is None or (
        not slot.trains_without_trainer and slot.train_call <= 1 and slot.step == 0 and slot.resumed_step == 0
    ):
        return Cause.startup_failure
    return Cause.exception


def _exception(culprit: Exit) -> str:
    """The class of the script's own exception; empty if it has raised none, or for an interrupt or an
    injected fault.
    """
    if culprit.signal is not None or culprit.error is None:
        return ""
    return "" if culprit.error.type in NOT_OF_SCRIPT else culprit.error.type


def _is_starting(culprit: Exit, slot: Slot | None) -> bool:
    """Whether the rank failed before the first step of a `train()` call, or between two calls, and not in
    steps of its own.
    """
    if slot is not None and slot.trains_without_trainer:
        return False
    return set(phases_of(culprit, slot)) <= {Phase.startup, Phase.idle}


def _sentence(culprit: Exit, place: str, all_victims: bool) -> str:
    if all_victims:
        return (
            f"Every local rank lost its connection to a peer{place}; the first failure is not on this node."
        )
    if culprit.signal is not None:
        return f"Rank {culprit.rank} was killed by {signal_name(culprit.signal)}{place}."
    if culprit.error is not None and culprit.error.type != "SystemExit":
        said = _said(culprit.error)
        return f"Rank {culprit.rank} raised {culprit.error.type}{place}" + (f": {said}" if said else ".")
    how = f"Rank {culprit.rank} exited with code {culprit.exit_code}{place} without finishing the script"
    if culprit.error is None:
        return how + (", by os._exit or in native code." if culprit.exit_code else ".")
    said = _said(culprit.error)
    return f"{how}: {said}" if said and not said.lstrip("-").isdigit() else f"{how}."


def _said(error: RankError) -> str:
    """The first line of an exception's message, with what it announces and the exception that caused it, if
    any.
    """
    lines = [line.strip() for line in error.message.splitlines() if line.strip()]
    said = lines[0][:MAX_SAID_CHARACTERS] if lines else ""
    if said.endswith(":") and len(lines) > 1:
        said += f" {lines[1][:MAX_SAID_CHARACTERS]}"
    _, _, cause = error.root.partition(": ")
    if error.root and not (cause and cause in said):
        said = f"{said}; caused by {error.root}" if said else f"caused by {error.root}"
    return said


def _signature(culprit: Exit, step: int, alone: bool, shortage: Shortage | None) -> str:
    if shortage is not None and not alone:
        return memory_signature(shortage, step)
    if culprit.signal is not None:
        return f"signal:{culprit.signal}:rank{culprit.rank}:step{step}"
    if culprit.error is not None:
        file, line, _ = culprit.error.location or ("?", 0, "?")
        when = f"own-step{culprit.error.own_steps}" if alone else f"step{step}"
        return f"{culprit.error.type}@{file}:{line}:{when}"
    return f"exit:{culprit.exit_code}:step{step}"


def _advice(culprit: Exit, best_position: tuple[int, int], alone: bool, origin: Origin) -> tuple[str, ...]:
    if culprit.signal == signal.SIGKILL:
        return _kill_advice(culprit.signal)
    if culprit.signal == signal.SIGBUS:
        return ("A bus error may come from a full /dev/shm, or from a mapped file that was truncated.",)
    if alone:
        return ()
    if culprit.exit_code == 0:
        return ("To end training early, set control.should_training_stop in a callback.",)
    if origin in (Origin.files, Origin.network, Origin.device) and best_position == (0, 0):
        return ("The script failed before its first step: if it fails in the same way again, the run ends.",)
    return ()


def _kill_advice(number: int | None) -> tuple[str, ...]:
    if number != signal.SIGKILL:
        return ()
    return ("If no user sent it, check for the kernel's out-of-memory killer (dmesg, memory.events).",)


def end_text(end: ProcessEnd) -> str:
    """Return how a process ended, such as `was killed by SIGKILL` or `exited with code 1`."""
    if end.signal is not None:
        return f"was killed by {signal_name(end.signal)}"
    return f"exited with code {end.exit_code}"


def signal_name(number: int) -> str:
    """Return `SIGKILL` for 9; real-time and unknown signals by number."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def diagnose_alarm(exits: Sequence[Exit], slots: Mapping[int, Slot | None]) -> Verdict | None:
    """Return the verdict if the ranks ended the attempt on purpose, else None.

    Whatever else failed did so because ranks left, or because weights were broken.

    Args:
        exits: the failed ranks.
        slots: last reading of every local rank's slot.
    """
    errors = [exit.error for exit in exits if exit.error is not None and exit.error.alarm is not None]
    if not errors:
        return None
    alarm = min(errors, key=lambda error: error.wall_time).alarm
    assert alarm is not None
    return Verdict(
        cause=Cause(alarm.cause),
        step=alarm.step,
        sentence=alarm.sentence,
        signature=alarm.signature,
        waiters=tuple(sorted(slots)),
        advice=alarm.advice,
        alarm=alarm,
    )
