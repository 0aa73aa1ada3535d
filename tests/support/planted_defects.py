"""Defects planted into programs that finish: what scripts get wrong about their collectives.

Used with `simulated_ranks.py`. Each defect changes one rank of a program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from support.collective_programs import MAIN, SYMMETRIC, Program, Step


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank issues a collective that needs all members."""

    rank: int
    thread: str
    index: int


def places(program: Program) -> list[Place]:
    """All places at which a defect may be planted: collectives of groups of several ranks."""
    return [
        Place(rank=rank, thread=name, index=index)
        for rank, threads in enumerate(program.threads)
        for name, steps in threads.items()
        for index, step in enumerate(steps)
        if step.kind == "issue"
        and step.operation in SYMMETRIC
        and step.elements
        and not step.limited
        and len(program.groups[step.group]) > 1
    ]


def skip(program: Program, place: Place, random: Random) -> None:
    """Leave the collective out, and everything that is done with its handle."""
    key = program.threads[place.rank][place.thread][place.index].key
    for steps in program.threads[place.rank].values():
        steps[:] = [step for step in steps if step.key != key]


def change(program: Program, place: Place, random: Random, **changes: object) -> None:
    """Change the collective."""
    steps = program.threads[place.rank][place.thread]
    steps[place.index] = replace(steps[place.index], **changes)  # type: ignore[arg-type]


def wrong_operation(program: Program, place: Place, random: Random) -> None:
    """Issue another operation."""
    own = program.threads[place.rank][place.thread][place.index].operation
    change(program, place, random, operation="all_gather" if own != "all_gather" else "all_reduce")


def wrong_size(program: Program, place: Place, random: Random) -> None:
    """Issue it with more elements."""
    change(program, place, random, elements=99)


def wrong_dtype(program: Program, place: Place, random: Random) -> None:
    """Issue it with items of another size."""
    change(program, place, random, dtype="Half")


def extra(program: Program, place: Place, random: Random) -> None:
    """Issue and await one more collective before it."""
    steps = program.threads[place.rank][place.thread]
    step = replace(steps[place.index], key="extra", operation=random.choice(SYMMETRIC))
    steps[place.index : place.index] = [step, Step(kind="wait", key="extra")]


def swap(program: Program, place: Place, random: Random) -> None:
    """Issue and await the collective before the one that precedes it in the thread."""
    steps = program.threads[place.rank][place.thread]
    own = steps[place.index : place.index + 2]
    if len(own) == 2 and own[1].kind == "wait" and own[1].key == own[0].key:
        del steps[place.index : place.index + 2]
        before = [i for i, step in enumerate(steps[: place.index]) if step.kind == "issue"]
        steps[before[-1] if before else place.index : before[-1] if before else place.index] = own


def leave(program: Program, place: Place, random: Random) -> None:
    """Exit instead of issuing it."""
    for name, steps in program.threads[place.rank].items():
        steps[place.index if name == place.thread else 0 :] = []
        if name == MAIN and place.thread != MAIN:
            steps.append(Step(kind="start", thread=place.thread))


def repeat(program: Program, place: Place, random: Random) -> None:
    """Issue and await the same collective once more, from the same line."""
    steps = program.threads[place.rank][place.thread]
    again = replace(steps[place.index], key="extra")
    steps[place.index : place.index] = [again, Step(kind="wait", key="extra")]


def wrong_group(program: Program, place: Place, random: Random) -> None:
    """Issue it in another group."""
    own = program.threads[place.rank][place.thread][place.index].group
    others = [
        group
        for group, members in program.groups.items()
        if group != own and place.rank in members and len(members) > 1
    ]
    if others:
        change(program, place, random, group=random.choice(others))


def new_line(program: Program, place: Place, random: Random) -> None:
    """Issue and await one more collective before it, from a line that no rank uses."""
    extra(program, place, random)
    change(program, place, random, line=999)


DEFECTS: dict[str, Callable[[Program, Place, Random], None]] = {
    one.__name__: one for one in (skip, swap, wrong_operation, wrong_size, wrong_dtype, extra, leave)
}
MORE_DEFECTS = DEFECTS | {one.__name__: one for one in (repeat, wrong_group, new_line)}
"""Also those that may do no harm."""
