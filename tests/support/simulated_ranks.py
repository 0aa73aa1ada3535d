"""A model of ranks that run a random program.

Discrete steps in a random order. A thread moves when it can; a collective completes on one rank at a time,
some time after the ranks that it needs have issued it. What the watchdog sees of the ranks at any instant is
in `simulated_looks.py`. What real ranks show for each step is in
`tests/integration/test_collective_records.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from functools import partial
from random import Random

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, Collective, CollectiveProgress, can_meet
from support.collective_programs import MAIN, SYMMETRIC, Program, Step

RECORDED = {"reduce_scatter": "all_reduce"}
"""Operations that Gloo's Flight Recorder shows under another name."""


@dataclass(eq=False, kw_only=True)
class Issued:
    """One collective on one rank. `entry` is its log entry; None if C++ issued it."""

    group: str
    sequence: int
    step: Step
    thread: str
    completed: bool = False
    entry: Entry | None = None
    continuation: Step | None = None


@dataclass(eq=False, kw_only=True)
class Entry:
    """One entry of the collective log."""

    group: str
    sequence: int
    step: Step
    thread: str
    operation: str
    progress: CollectiveProgress = CollectiveProgress.enqueued
    count: int = 1


@dataclass(eq=False, kw_only=True)
class Thread:
    """One thread of a rank. `entered`: it is inside its current step, and was not before it began."""

    rank: int
    name: str
    steps: list[Step]
    running: bool
    at: int = 0
    entered: bool = False
    left: int = 0
    switches: int = 0
    backward: Entry | None = None
    reductions: list[Issued] = field(default_factory=list)

    @property
    def step(self) -> Step | None:
        """The current step; None if the thread has ended."""
        return self.steps[self.at] if self.at < len(self.steps) else None

    @property
    def ident(self) -> str:
        """An identifier of the thread, unique on its rank."""
        return f"t{self.rank}{self.name}"


@dataclass(frozen=True, kw_only=True)
class Model:
    """What differs between backends and runs.

    `eager`: the sender of a rooted collective need not wait for the receivers. `ring`: how many records the
    Flight Recorder and the log retain.
    """

    eager: bool
    ring: int


class Simulation:
    """Ranks in one program.

    Args:
        leaves: a rank that exits at its last step, whatever its collectives do.
    """

    def __init__(self, program: Program, random: Random, model: Model, *, leaves: int = -1) -> None:
        self.program, self.random, self.model = program, random, model
        self.leaves = leaves
        self.threads = [
            [
                Thread(rank=rank, name=name, steps=steps, running=name == MAIN)
                for name, steps in threads.items()
            ]
            for rank, threads in enumerate(program.threads)
        ]
        ranks = range(program.world)
        self.issued: list[dict[str, list[Issued]]] = [{group: [] for group in program.groups} for _ in ranks]
        self.recorder: list[list[Issued]] = [[] for _ in ranks]
        self.log: list[list[Entry]] = [[] for _ in ranks]
        self.handles: list[dict[str, Issued]] = [{} for _ in ranks]
        self.messages: list[set[tuple[str, str]]] = [set() for _ in ranks]
        self.uses_futures = [False for _ in ranks]
        self.exited = [False for _ in ranks]

    def actions(self) -> dict[tuple[int, str], Callable[[], None]]:
        """Everything that can happen next, by rank and what it belongs to: a thread, a collective or the
        exit.
        """
        found: dict[tuple[int, str], Callable[[], None]] = {}
        for rank, threads in enumerate(self.threads):
            for thread in threads:
                if thread.running and thread.step is not None and self._can_advance(thread):
                    found[rank, thread.name] = partial(self._advance, thread)
            for one in self._pending(rank):
                if self._can_complete(rank, one):
                    found[rank, f"{one.group} {one.sequence}"] = partial(self._complete, rank, one)
            if not self.exited[rank] and self._may_exit(rank):
                found[rank, "exit"] = partial(self._exit, rank)
        return found

    def act(self, late: AbstractSet[tuple[int, str]] = frozenset()) -> bool:
        """Let one thing happen that is not `late`; False if nothing can."""
        actions = self.actions()
        possible = [action for owner, action in actions.items() if owner not in late]
        if possible:
            self.random.choice(possible)()
        return bool(possible)

    def some_late(self) -> set[tuple[int, str]]:
        """Threads, drawn at random, and perhaps the completion of a collective."""
        everyone = [(thread.rank, thread.name) for threads in self.threads for thread in threads]
        late = set(self.random.sample(everyone, self.random.randint(1, max(1, len(everyone) // 2))))
        if self.random.random() < 0.2:
            late |= set(self.actions())
        return late

    @property
    def finished(self) -> bool:
        """Whether every rank has exited."""
        return all(self.exited)

    def _exit(self, rank: int) -> None:
        self.exited[rank] = True

    def _may_exit(self, rank: int) -> bool:
        """All its threads have ended, and so have its collectives, on all ranks."""
        return all(not thread.running or thread.step is None for thread in self.threads[rank]) and all(
            rank == self.leaves or one.completed
            for group, own in self.issued[rank].items()
            for mine in own
            for member in self.program.groups[group]
            for one in self.issued[member][group][mine.sequence - 1 : mine.sequence]
        )

    def _pending(self, rank: int) -> Iterator[Issued]:
        for own in self.issued[rank].values():
            yield from (one for one in own if not one.completed)

    def _others(self, rank: int, one: Issued) -> dict[int, Issued | None]:
        """What the other members have issued at this place."""
        return {
            member: next(iter(self.issued[member][one.group][one.sequence - 1 : one.sequence]), None)
            for member in self.program.groups[one.group]
            if member != rank
        }

    def _can_complete(self, rank: int, one: Issued) -> bool:
        step, others = one.step, self._others(rank, one)
        if step.operation in SYMMETRIC and step.operation != "barrier" and step.elements == 0:
            return True
        if any(
            other is not None and not can_meet(as_collective(one), as_collective(other))
            for other in others.values()
        ):
            return False
        if step.operation in ("broadcast", "scatter"):
            if rank != step.root:
                return others[step.root] is not None
            return self.model.eager or None not in others.values()
        if step.operation in ("reduce", "gather") and rank != step.root:
            return self.model.eager or others[step.root] is not None
        return None not in others.values()

    def _complete(self, rank: int, one: Issued) -> None:
        one.completed = True
        if one.continuation is not None:
            issued = self._issue(rank, one.continuation, "runner")
            self.handles[rank][f"{one.continuation.key}+"] = issued

    def _issue(self, rank: int, step: Step, thread: str, *, native: bool = False) -> Issued:
        own = self.issued[rank][step.group]
        one = Issued(group=step.group, sequence=len(own) + 1, step=step, thread=thread)
        if not native:
            one.entry = Entry(
                group=step.group, sequence=one.sequence, step=step, thread=thread, operation=step.operation
            )
            self._add_to_log(rank, one.entry)
        own.append(one)
        self.recorder[rank] = [*self.recorder[rank], one][-self.model.ring :]
        return one

    def _add_to_log(self, rank: int, entry: Entry) -> None:
        self.log[rank] = [*self.log[rank], entry][-self.model.ring :]

    def _can_advance(self, thread: Thread) -> bool:
        """Whether the thread can take its next small step."""
        step, rank = thread.step, thread.rank
        assert step is not None
        if step.kind == "take":
            return step.key in self.handles[rank]
        if step.kind == "join":
            return all(other.step is None for other in self.threads[rank] if other.name == step.thread)
        if not thread.entered:
            return True
        if step.kind == "wait":
            return self.handles[rank][step.key].completed
        if step.kind == "reduce_gradients":
            return len(thread.reductions) < step.count or all(one.completed for one in thread.reductions)
        if step.kind == "send":
            return (step.key, "recv") in self.messages[step.peer]
        if step.kind == "recv":
            return (step.key, "send") in self.messages[step.peer]
        if step.kind == "monitored":
            return all((step.key, "monitored") in messages for messages in self.messages)
        return True

    def _advance(self, thread: Thread) -> None:
        step, rank = thread.step, thread.rank
        assert step is not None
        thread.switches += 1
        if not thread.entered:
            self._enter(thread, step)
            return
        if step.kind == "pause" and thread.left:
            thread.left -= 1
            return
        if step.kind == "reduce_gradients" and len(thread.reductions) < step.count:
            one = Step(kind="issue", group=step.group, operation="all_reduce", elements=7)
            thread.reductions.append(self._issue(rank, one, thread.ident, native=True))
            return
        if step.kind == "reduce_gradients":
            assert thread.backward is not None
            thread.backward.count = len(thread.reductions)
            thread.backward.progress = CollectiveProgress.completed
            thread.backward, thread.reductions = None, []
        if step.kind == "wait":
            entry = self.handles[rank][step.key].entry
            if entry is not None and not step.limited:
                entry.progress, entry.thread = CollectiveProgress.completed, thread.ident
        thread.at, thread.entered = thread.at + 1, False

    def _enter(self, thread: Thread, step: Step) -> None:
        rank = thread.rank
        thread.entered = True
        if step.kind == "issue":
            self.handles[rank][step.key] = self._issue(rank, step, thread.ident)
        elif step.kind == "continue_with":
            one, self.uses_futures[rank] = self.handles[rank][step.key], True
            one.continuation = step
            if one.completed:
                self._complete(rank, one)
        elif step.kind == "start":
            next(other for other in self.threads[rank] if other.name == step.thread).running = True
        elif step.kind == "pause":
            thread.left = step.count
        elif step.kind in ("send", "recv", "monitored"):
            self.messages[rank].add((step.key, step.kind))
        elif step.kind == "reduce_gradients":
            thread.backward = Entry(
                group=step.group, sequence=len(self.issued[rank][step.group]) + 1, step=step,
                thread=thread.ident, operation=BACKWARD,
            )  # fmt: skip
            self._add_to_log(rank, thread.backward)
        elif step.kind == "wait" and not step.limited:
            entry = self.handles[rank][step.key].entry
            assert entry is not None
            entry.progress, entry.thread = CollectiveProgress.waiting, thread.ident

    def stalled_in_known_waits(self) -> bool:
        """Whether every thread that has not ended waits in a collective that needs all members."""
        for rank, threads in enumerate(self.threads):
            waits = 0
            unfinished = [thread for thread in threads if thread.running and thread.step is not None]
            for thread in unfinished:
                step = thread.step
                assert step is not None
                if thread.entered and step.kind == "wait" and not step.limited:
                    issued = self.handles[rank][step.key].step
                    if issued.operation in SYMMETRIC and not issued.limited:
                        waits += 1
                        continue
                if step.kind == "take" and thread.name != MAIN:
                    continue
                return False
            if (self.uses_futures[rank] or not waits) and not self.exited[rank]:
                return False
        return not self.finished


def as_collective(one: Issued, *, recorded: bool = False) -> Collective:
    """A collective as the Flight Recorder shows it."""
    step = one.step
    inputs = step.operation != "barrier"
    name = RECORDED.get(step.operation, step.operation) if recorded else step.operation
    return Collective(
        group=one.group,
        sequence=one.sequence,
        operation=name,
        sizes=((step.elements,),) if inputs else (),
        dtypes=(step.dtype,) if inputs else (),
        progress=CollectiveProgress.completed if one.completed else CollectiveProgress.enqueued,
        thread=one.thread,
        timeout_seconds=50.0 if step.limited else 1800.0,
    )
