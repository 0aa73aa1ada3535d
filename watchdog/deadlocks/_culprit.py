"""Which rank is at fault in a deadlock: the minority, or the rank that departed from the common sequence.

Called by `proof.py` with collectives that are known to be deadlocked. Proves nothing itself, and names no
rank where the records do not tell.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import combinations

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, DEFAULT_GROUP, Collective, can_meet
from grpo_run.watchdog.verdict import Location

SHORTEST_CONTEXT = 2
"""Fewest collectives before the difference that count as context: a save and a log may issue the same single
call."""
LONGEST_CONTEXT = 32
"""Most collectives before the difference that are compared with earlier steps. This is more than one step of
GRPO, because a pattern may span two steps (a save every second step). Of 16, 24, 32, 40 and 64, replayed on
540 injected deadlocks, 32 and 40 left the fewest undecided, and none named a wrong rank."""

Records = Sequence[Collective]


def find_culprits(
    stuck: Mapping[int, Collective],
    records: Mapping[int, Records],
    *,
    world_size: int,
    unmet: Collection[tuple[int, int]] = (),
) -> tuple[int, ...]:
    """Return the ranks at fault; empty if the records do not tell.

    Ranks without a fault issue the same collectives in the same order, however far each has come, so one of
    two that differ is at fault. If one rank differs from several that do not differ from one another, it is
    that one. Of two ranks, or in a tie, only earlier steps can tell (`_departed`).

    Args:
        stuck: the collective that each deadlocked rank is in.
        records: all collectives that each rank enqueued, oldest first.
        unmet: pairs of a rank and one that it waits for, which will issue nothing more.
    """
    ranks = sorted({*stuck, *(rank for pair in unmet for rank in pair)})
    pairs = [
        (one, other, *_compared(one, records[one], other, records[other], world_size=world_size))
        for one, other in combinations(ranks, 2)
    ]
    # a rank may reach a collective on a line of its own; this says less than another operation does
    for by_line in (False, True):
        differing: dict[int, set[int]] = {}
        for one, other, first, second in pairs:
            ended = (one, other) in unmet or (other, one) in unmet
            if ended or _difference(first, second, by_line=by_line) is not None:
                differing.setdefault(one, set()).add(other)
                differing.setdefault(other, set()).add(one)
        majority = _majority(differing)
        if majority:
            return tuple(rank for rank in sorted(differing) if rank not in majority)
    blamed: set[int] = set()
    cleared: set[int] = set()
    for one, other, first, second in pairs:
        wrong = _departed(one, first, other, second)
        if wrong is not None:
            blamed.add(wrong)
            cleared.add(other if wrong == one else one)
    return () if blamed & cleared else tuple(sorted(blamed))


def is_member(rank: int, collective: Collective, records: Records, world_size: int) -> bool:
    """Whether `rank`, which enqueued `records`, is a member of the collective's group, as far as known."""
    if collective.members:
        return rank in collective.members
    if world_size == 2 or collective.group == DEFAULT_GROUP:
        return True
    return any(record.group == collective.group for record in records)


def _majority(differing: Mapping[int, set[int]]) -> list[int]:
    """The largest set of ranks that differ from the same ones; empty on a tie."""
    camps: dict[frozenset[int], list[int]] = {}
    for rank, others in differing.items():
        camps.setdefault(frozenset(others), []).append(rank)
    ordered = sorted(camps.values(), key=len, reverse=True)
    return ordered[0] if len(ordered) > 1 and len(ordered[0]) > len(ordered[1]) else []


def _compared(
    one: int, ours: Records, other: int, theirs: Records, *, world_size: int
) -> tuple[Records, Records]:
    """What two ranks issued in groups of both, from the first collective on that both retain."""
    first, second = _shared(ours, other, theirs, world_size), _shared(theirs, one, ours, world_size)
    first, second = _without_gaps(first, second), _without_gaps(second, first)
    start, other_start = _first_common(first, second), _first_common(second, first)
    if start is None or other_start is None:
        return first, second
    return first[start:], second[other_start:]


def _difference(first: Records, second: Records, *, by_line: bool = True) -> int | None:
    """Index of the first difference; None if one rank has issued what the other has, and perhaps more."""
    place = min(
        _first_difference(one, two, by_line=by_line) for one, two in ((first, second), (second, first))
    )
    return place if place < min(len(first), len(second)) else None


def _departed(one: int, first: Records, other: int, second: Records) -> int | None:
    """Return the rank of two that departed from what both did earlier in the same context, or None.

    The context is the longest sequence of collectives (at most `LONGEST_CONTEXT`) before the first difference
    that also occurs earlier. What followed it there is the established behavior.
    """
    difference = _difference(first, second)
    if difference is None:
        return None
    # calls from one line look alike: a rank that left out the first of several is found by the order of its
    # calls across groups
    for place in (difference, _first_reordered(first, second, difference)):
        follows_pattern = _has_usual_size if _alike(first[place], second[place]) else _is_usual
        known, other_known = follows_pattern(first, place), follows_pattern(second, place)
        if known != other_known:
            return other if known else one
    return None


def _shared(ours: Records, other: int, theirs: Records, world_size: int) -> list[Collective]:
    """Our collectives in groups that the other rank is a member of."""
    return [
        record
        for record in ours
        if not record.point_to_point and is_member(other, record, theirs, world_size)
    ]


def _by_place(records: Records) -> dict[tuple[str, int], Collective]:
    return {(record.group, record.sequence): record for record in records}


def _without_gaps(ours: Records, theirs: Records) -> list[Collective]:
    """Our records without those that the other rank must have enqueued too but no longer retains."""
    highest: dict[str, int] = {}
    for record in theirs:
        highest[record.group] = max(record.sequence, highest.get(record.group, 0))
    places = _by_place(theirs)
    return [
        record
        for record in ours
        if (record.group, record.sequence) in places or record.sequence > highest.get(record.group, 0)
    ]


def _first_common(ours: Records, theirs: Records) -> int | None:
    places = _by_place(theirs)
    return next((i for i, record in enumerate(ours) if (record.group, record.sequence) in places), None)


def _first_difference(ours: Records, theirs: Records, *, by_line: bool) -> int:
    """Index of our first collective that the other rank lacks or has in another form, or the length.

    Two lines for one collective are no difference in a program whose ranks reach it on different branches.
    Such ranks have the same line again at a later collective; ranks of which one skipped a collective do not.
    """
    places = _by_place(theirs)
    agreed: dict[str, int] = {}
    for record in ours:
        line, counterpart = _line(record.location), places.get((record.group, record.sequence))
        if counterpart is not None and line is not None and line == _line(counterpart.location):
            agreed[record.group] = max(record.sequence, agreed.get(record.group, 0))
    branches: set[tuple[object, object]] = set()
    for i, record in enumerate(ours):
        counterpart = places.get((record.group, record.sequence))
        if counterpart is None or not can_meet(record, counterpart):
            return i
        if not by_line:
            continue
        lines = _line(record.location), _line(counterpart.location)
        if None in lines or lines[0] == lines[1] or lines in branches:
            continue
        if record.sequence > agreed.get(record.group, 0):
            return i
        branches.add(lines)
    return len(ours)


def _first_reordered(ours: Records, theirs: Records, end: int) -> int:
    """Index before `end` at which the ranks' calls, over all groups, first differ; `end` if there is none."""
    return next((i for i in range(end) if not _alike(ours[i], theirs[i])), end)


def _contexts(records: Records, place: int) -> list[tuple[int, int]]:
    """(length, index) of each earlier place whose preceding collectives equal those before `place`."""
    found = []
    for index in range(1, place):
        length = 0
        while length < min(index, LONGEST_CONTEXT) and _alike(
            records[index - 1 - length], records[place - 1 - length]
        ):
            length += 1
        if length >= SHORTEST_CONTEXT:
            found.append((length, index))
    return found


def _is_usual(records: Records, place: int) -> bool:
    """Whether the collective at `place` has followed the same context before."""
    contexts = _contexts(records, place)
    longest = max((length for length, _ in contexts), default=0)
    return any(_alike(records[index], records[place]) for length, index in contexts if length == longest)


def _has_usual_size(records: Records, place: int) -> bool:
    """Whether this operation had the same sizes at least twice before, and never others.

    Contexts half as long as the longest count too: the start of the log cuts off the oldest steps.
    """
    contexts = _contexts(records, place)
    longest = max((length for length, _ in contexts), default=0)
    history = [
        (records[index].sizes, records[index].dtypes)
        for length, index in contexts
        if 2 * length >= longest and _alike(records[index], records[place])
    ]
    now = (records[place].sizes, records[place].dtypes)
    return len(history) > 1 and set(history) == {now}


def _alike(one: Collective, other: Collective) -> bool:
    """Whether two collectives may come from the same place in the program; their sizes may differ."""
    if (one.group, _operation(one)) != (other.group, _operation(other)):
        return False
    return one.location is None or other.location is None or _line(one.location) == _line(other.location)


def _operation(collective: Collective) -> str:
    return "all_reduce" if collective.operation == BACKWARD else collective.operation


def _line(location: Location | None) -> tuple[str, int] | None:
    return (location.file, location.line) if location else None
