"""Random programs of several ranks that finish, as a language of a few steps.

Used by `simulated_ranks.py`. A program is drawn as one sequence of events
(a collective of a group, a send, a pause), and every thread runs its steps in the order of that sequence.
Each group is used by one thread of a rank. Such a program cannot deadlock. Imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from random import Random

WORLD = "0"
SYMMETRIC = ("all_reduce", "all_gather", "barrier", "reduce_scatter")
ROOTED = ("broadcast", "reduce", "gather", "scatter")
OTHER = ("all_to_all",)
MAIN = "main"


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a thread; which fields it uses depends on `kind`.

    `issue` starts a collective, on `line` of the script, and stores its handle under `key`; `wait` blocks
    until that handle is complete, with a time limit if `limited`; `take` blocks until another thread has
    stored it. `send` and `recv` block until the other has come. `monitored` is a monitored barrier of all
    ranks. `pause` takes `count` units of time. `start` and `join` a thread. `reduce_gradients` is a backward
    pass in which C++ issues `count` all-reduces; `continue_with` issues a collective when the one of `key` is
    complete.
    """

    kind: str
    key: str = ""
    group: str = WORLD
    operation: str = ""
    elements: int = 1
    dtype: str = "Float"
    root: int = -1
    limited: bool = False
    peer: int = -1
    count: int = 0
    thread: str = ""
    line: int = 1


@dataclass(kw_only=True)
class Program:
    """Steps by rank and thread; only `main` runs at first. `groups` has the members of each group."""

    groups: dict[str, tuple[int, ...]]
    threads: list[dict[str, list[Step]]]
    late_waits: dict[tuple[int, str], list[Step]] = field(default_factory=dict)

    @property
    def world(self) -> int:
        """The number of ranks."""
        return len(self.threads)


class Draw:
    """Draws one program.

    Args:
        accounted: leave out whatever keeps a stalled rank from being proved stuck.
    """

    def __init__(self, random: Random, *, world: int, events: int, accounted: bool = False) -> None:
        self.random = random
        self.world = world
        self.operations = SYMMETRIC if accounted else SYMMETRIC * 2 + ROOTED + OTHER
        self.sizes = (1, 3, 8) if accounted else (0, 1, 3, 8)
        self.limited_waits = 0.0 if accounted else 0.1
        everyone = tuple(range(world))
        groups = {WORLD: everyone}
        for number in range(1, random.randint(2, 4)):
            members = tuple(sorted(random.sample(everyone, random.randint(1, world))))
            groups[str(number)] = members
        self.program = Program(groups=groups, threads=[{MAIN: []} for _ in everyone])
        self.serving = [{group: random.choice((MAIN, "one", "two")) for group in groups} for _ in everyone]
        kinds = [self.collective] * 8 + [self.objects] + [self.pause] * 6
        if not accounted:
            kinds += [self.message, self.ring, self.monitored, self.limited]
            kinds += [self.backward, self.continuation]
        for rank in everyone:
            for thread in sorted({*self.serving[rank].values()} - {MAIN}):
                if random.random() < 0.5:
                    self.steps(rank, thread)
        for number in range(events):
            random.choice(kinds)(f"k{number}")
        self.finish()

    def steps(self, rank: int, thread: str) -> list[Step]:
        """The steps of a thread, which the main thread starts here if it does not exist yet."""
        threads = self.program.threads[rank]
        if thread not in threads:
            threads[MAIN].append(Step(kind="start", thread=thread))
            threads[thread] = []
        return threads[thread]

    def any_group(self) -> str:
        """A group that threads issue collectives in."""
        return self.random.choice(list(self.serving[0]))

    def issue(self, key: str, group: str, operation: str, **fields: object) -> None:
        """Issue one collective on every member; each waits now, later, in another thread, or never."""
        for rank in self.program.groups[group]:
            own = self.steps(rank, self.serving[rank][group])
            own.append(Step(kind="issue", key=key, group=group, operation=operation, **fields))  # type: ignore[arg-type]
            wait = Step(kind="wait", key=key, limited=self.random.random() < self.limited_waits)
            when = self.random.random()
            if when < 0.6:
                own.append(wait)
            elif when < 0.8:
                self.program.late_waits.setdefault((rank, self.serving[rank][group]), []).append(wait)
            elif when < 0.95:
                other = self.random.choice(list(self.program.threads[rank]))
                self.steps(rank, other).extend([Step(kind="take", key=key), wait])
        self.some_late_waits()

    def some_late_waits(self, *, all_of_them: bool = False) -> None:
        """Let threads wait for handles that they have kept."""
        for (rank, thread), waits in self.program.late_waits.items():
            while waits and (all_of_them or self.random.random() < 0.3):
                self.steps(rank, thread).append(waits.pop(self.random.randrange(len(waits))))

    def collective(self, key: str) -> None:
        """Any collective of any group."""
        group = self.any_group()
        operation = self.random.choice(self.operations)
        root = self.random.choice(self.program.groups[group]) if operation in ROOTED else -1
        self.issue(
            key, group, operation, elements=self.random.choice(self.sizes),
            dtype=self.random.choice(("Float", "Long")), root=root,
        )  # fmt: skip

    def objects(self, key: str) -> None:
        """An object collective: sizes, then bytes."""
        group = self.any_group()
        operation = self.random.choice([one for one in ("all_gather", "broadcast") if one in self.operations])
        root = self.random.choice(self.program.groups[group]) if operation == "broadcast" else -1
        for part, dtype in (("sizes", "Long"), ("bytes", "Byte")):
            for rank in self.program.groups[group]:
                own = self.steps(rank, self.serving[rank][group])
                own += [
                    Step(
                        kind="issue", key=key + part, group=group, operation=operation, dtype=dtype, root=root
                    ),
                    Step(kind="wait", key=key + part),
                ]

    def message(self, key: str) -> None:
        """A send and its receive, in any threads."""
        source, destination = self.random.sample(range(self.world), 2)
        for rank, kind, peer in ((source, "send", destination), (destination, "recv", source)):
            thread = self.random.choice(list(self.program.threads[rank]))
            self.steps(rank, thread).append(Step(kind=kind, key=key, peer=peer))

    def ring(self, key: str) -> None:
        """Every rank sends to the next; even ranks send first."""
        for rank in range(self.world):
            after, before = (rank + 1) % self.world, (rank - 1) % self.world
            pair = [
                Step(kind="send", key=f"{key}{rank}", peer=after),
                Step(kind="recv", key=f"{key}{before}", peer=before),
            ]
            self.steps(rank, MAIN).extend(pair if rank % 2 == 0 and rank != self.world - 1 else pair[::-1])

    def monitored(self, key: str) -> None:
        """A monitored barrier of all ranks."""
        if all(serving[WORLD] == MAIN for serving in self.serving):
            for rank in range(self.world):
                self.steps(rank, MAIN).append(Step(kind="monitored", key=key))

    def limited(self, key: str) -> None:
        """A barrier with a time limit of its own."""
        group = self.any_group()
        for rank in self.program.groups[group]:
            own = self.steps(rank, self.serving[rank][group])
            own += [
                Step(kind="issue", key=key, group=group, operation="barrier", limited=True),
                Step(kind="wait", key=key),
            ]

    def pause(self, key: str) -> None:
        """One thread of one rank is late."""
        rank = self.random.randrange(self.world)
        thread = self.random.choice(list(self.program.threads[rank]))
        self.steps(rank, thread).append(Step(kind="pause", count=self.random.choice((1, 10, 40))))

    def backward(self, key: str) -> None:
        """A backward pass of DDP, if the main threads use the group."""
        group = self.any_group()
        members = self.program.groups[group]
        if all(self.serving[rank][group] == MAIN for rank in members):
            count = self.random.randint(0, 3)
            for rank in members:
                self.steps(rank, MAIN).append(
                    Step(kind="reduce_gradients", key=key, group=group, count=count)
                )

    def continuation(self, key: str) -> None:
        """A collective whose completion issues another one, in a group of its own."""
        group = self.any_group()
        members = self.program.groups[group]
        own = f"c{key}"
        self.program.groups[own] = members
        for rank in members:
            steps = self.steps(rank, self.serving[rank][group])
            steps += [
                Step(kind="issue", key=key, group=group, operation="all_reduce"),
                Step(kind="continue_with", key=key, group=own, operation="all_reduce"),
            ]
            thread = self.random.choice(list(self.program.threads[rank]))
            if self.random.random() < 0.7:
                self.steps(rank, thread).extend(
                    [Step(kind="take", key=f"{key}+"), Step(kind="wait", key=f"{key}+")]
                )

    def finish(self) -> None:
        """Wait for the remaining handles and join all threads."""
        self.some_late_waits(all_of_them=True)
        for threads in self.program.threads:
            threads[MAIN] += [Step(kind="join", thread=thread) for thread in threads if thread != MAIN]


def draw_program(random: Random, *, world: int, events: int, accounted: bool = False) -> Program:
    """Draw a program that finishes. The arguments are those of `Draw`."""
    return Draw(random, world=world, events=events, accounted=accounted).program


def draw_training(random: Random, *, world: int, steps: int) -> Program:
    """Draw one step of a single thread on every rank, which is repeated: a program as in a training.

    Each collective has a line of its own and is waited for at once.
    """
    everyone = tuple(range(world))
    groups = {WORLD: everyone}
    for number in range(1, random.randint(1, 4)):
        groups[str(number)] = tuple(sorted(random.sample(everyone, random.randint(2, world))))
    program = Program(groups=groups, threads=[{MAIN: []} for _ in everyone])
    calls = [
        Step(
            kind="issue", group=random.choice(list(groups)), line=10 + number,
            operation=random.choice(SYMMETRIC), elements=random.choice((1, 3, 8)),
            dtype=random.choice(("Float", "Long")),
        )
        for number in range(random.randint(2, 6))
    ]  # fmt: skip
    for step in range(steps):
        for call in calls:
            key = f"k{call.line}in{step}"
            for rank in groups[call.group]:
                program.threads[rank][MAIN] += [replace(call, key=key), Step(kind="wait", key=key)]
    return program
