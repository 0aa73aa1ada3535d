"""What the watchdog sees of simulated ranks at any instant, and what it proves from that.

A look returns what the detector would read of every rank: Flight Recorder, collective log and thread report,
    read one
after the other while the ranks go on.
"""

from __future__ import annotations

from grpo_run.runtime.supervisor.detection._deadlock_detector import Poll
from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective
from grpo_run.watchdog.deadlocks.deadlock import Deadlock
from grpo_run.watchdog.deadlocks.positions import Position, ThreadReport, with_threads, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove
from grpo_run.watchdog.deadlocks.recording import merge
from grpo_run.watchdog.verdict import Location
from support.collective_programs import MAIN, Step
from support.simulated_ranks import Entry, Issued, Simulation, as_collective


def prove_from_looks(ranks: Simulation, drift: int) -> Deadlock | None:
    """What the detector proves from two looks, between whose parts up to `drift` things happen."""
    first, second = look(ranks, drift), look(ranks, drift)
    if not second.equals(first):
        return None
    positions = {
        rank: with_threads(position, second.threads.get(rank)) for rank, position in second.positions.items()
    }
    return prove(positions, world_size=ranks.program.world)


def look(ranks: Simulation, drift: int) -> Poll:
    """One look at all ranks, in the order in which the detector reads."""

    def drifting() -> list[int]:
        order = list(range(ranks.program.world))
        ranks.random.shuffle(order)
        return order

    def drift_on() -> None:
        for _ in range(ranks.random.randint(0, drift)):
            ranks.act()

    recorded: dict[int, tuple[Collective, ...]] = {}
    gone = set()
    for rank in drifting():
        drift_on()
        if ranks.exited[rank]:
            gone.add(rank)
        else:
            recorded[rank] = tuple(_recorded(one) for one in ranks.recorder[rank])
    positions = {}
    for rank in drifting():
        drift_on()
        asleep = _sleeps_in_backward(ranks, rank)
        positions[rank] = Position(
            rank=rank,
            records=merge(recorded.get(rank, ()), [_logged(ranks, entry) for entry in ranks.log[rank]]),
            exited=rank in gone,
            outside_training=rank in gone and rank != ranks.leaves,
            in_backward=asleep,
        )
    assumed = {rank: without_other_threads(position) for rank, position in positions.items()}
    threads = {}
    if prove(assumed, world_size=ranks.program.world) is not None:
        for rank in drifting():
            drift_on()
            if rank not in gone and not ranks.exited[rank]:
                threads[rank] = _report(ranks, rank)
    return Poll(
        movement=tuple(len(log) for log in ranks.log),
        recorded=recorded,
        main_threads={},
        positions=positions,
        threads=threads,
    )


def _sleeps_in_backward(ranks: Simulation, rank: int) -> bool:
    return ranks.threads[rank][0].backward is not None and ranks.random.random() < 0.9


def _recorded(one: Issued) -> Collective:
    return as_collective(one, recorded=True)


def _logged(ranks: Simulation, entry: Entry) -> Collective:
    step = entry.step
    backward = entry.operation == BACKWARD
    return Collective(
        group=entry.group,
        sequence=entry.sequence,
        operation=entry.operation,
        sizes=() if backward or step.operation == "barrier" else ((step.elements,),),
        dtypes=() if backward or step.operation == "barrier" else (step.dtype,),
        progress=entry.progress,
        location=Location(file="/train.py", line=step.line, function="main"),
        members=ranks.program.groups[entry.group],
        root=step.root if step.operation in ("broadcast", "reduce") else -1,
        thread=entry.thread,
        timeout_seconds=0.0 if step.limited else 1800.0,
        count=entry.count,
    )


def _report(ranks: Simulation, rank: int) -> ThreadReport:
    waiting, passive, active = {}, {}, []
    in_backward = None
    for thread in ranks.threads[rank]:
        step = thread.step
        if not thread.running or step is None:
            continue
        if thread.entered and step.kind == "wait" and not step.limited and not _is_limited(ranks, rank, step):
            waiting[thread.ident] = thread.switches
        elif thread.entered and step.kind == "reduce_gradients":
            in_backward = thread.switches
        elif step.kind == "take" and thread.name != MAIN and step.key not in ranks.handles[rank]:
            passive[thread.ident] = thread.switches
        else:
            active.append(thread.name)
    return ThreadReport(
        waiting=waiting,
        passive=passive,
        active=tuple(active),
        in_backward=in_backward,
        issued={
            group: len(own) for group, own in ranks.issued[rank].items() if any(one.entry for one in own)
        },
        uses_futures=ranks.uses_futures[rank],
    )


def _is_limited(ranks: Simulation, rank: int, wait: Step) -> bool:
    return ranks.handles[rank][wait.key].step.limited
