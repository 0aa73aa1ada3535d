"""Which rank is wrong when ranks are deadlocked: the few against the many, or the one that left the common path.

Called by `proof.py` with collectives that are already known to be deadlocked; proves nothing itself, and
names nobody where the records do not tell.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations

from grpo_run.watchdog.deadlocks.collectives import BACKWARD, DEFAULT_GROUP, Collective, can_meet
from grpo_run.watchdog.verdict import Location

SHORTEST_CONTEXT = 2
"""One collective before the parting is no context: the same call comes from within a save and from a log."""
LONGEST_CONTEXT = 32
"""Collectives before the parting that are compared with earlier steps: more than one step of GRPO, as a habit may span two
(saving every second). Of 16, 24, 32, 40 and 64, replayed on 540 planted deadlocks, 32 and 40 left the fewest undecided and
none named a wrong rank."""

Records = Sequence[Collective]


def find_culprits(
    stands: Mapping[int, Collective], records: Mapping[int, Records], *, world_size: int
) -> tuple[int, ...]:
    """The ranks at fault among those in `stands`, empty where it cannot be told.

    `stands` is the collective each deadlocked rank is in, `records` all that each rank enqueued, oldest first.
    Three ranks or more that could all stand in any of these collectives vote: the most common one is right.
    Two ranks, or a tie, are decided by `departing`.
    """
    voters = [
        rank
        for rank in sorted(stands)
        if all(belongs(rank, stand, records[rank], world_size) for stand in stands.values())
    ]
    if len(voters) < 2:
        return ()
    camps = _camps(voters, stands, _same_place)
    if len(voters) > 2:
        majority = _largest(camps) or _largest(_camps(voters, stands, _same_line))
        if majority:
            return tuple(rank for rank in voters if rank not in majority)
    blamed: set[int] = set()
    cleared: set[int] = set()
    for one, other in combinations(voters, 2):
        if any(one in camp and other in camp for camp in camps):
            continue
        wrong = departing(one, records[one], other, records[other], world_size=world_size)
        if wrong is not None:
            blamed.add(wrong)
            cleared.add(other if wrong == one else one)
    return () if blamed & cleared else tuple(sorted(blamed))


def belongs(rank: int, collective: Collective, records: Records, world_size: int) -> bool:
    """Whether `rank`, which enqueued `records`, is a member of the collective's group, as far as is known."""
    if collective.members:
        return rank in collective.members
    if world_size == 2 or collective.group == DEFAULT_GROUP:
        return True
    return any(record.group == collective.group for record in records)


def _same_place(one: Collective, other: Collective) -> bool:
    return (one.group, one.sequence) == (other.group, other.sequence) and can_meet(one, other)


def _same_line(one: Collective, other: Collective) -> bool:
    return _same_place(one, other) and _line(one.location) == _line(other.location)


def _camps(
    voters: Iterable[int], stands: Mapping[int, Collective], alike: Callable[[Collective, Collective], bool]
) -> list[list[int]]:
    camps: list[list[int]] = []
    for rank in voters:
        for camp in camps:
            if alike(stands[camp[0]], stands[rank]):
                camp.append(rank)
                break
        else:
            camps.append([rank])
    return camps


def _largest(camps: Sequence[list[int]]) -> list[int]:
    """The camp with more ranks than any other, empty on a tie or when there is one camp only."""
    ordered = sorted(camps, key=len, reverse=True)
    return ordered[0] if len(ordered) > 1 and len(ordered[0]) > len(ordered[1]) else []


def departing(one: int, ours: Records, other: int, theirs: Records, *, world_size: int) -> int | None:
    """The rank of two whose next collective is not what both did before in the same context, None if unclear.

    The context is the longest run of collectives (at most `LONGEST_CONTEXT`) before the place where the two part
    that also occurs earlier; what followed there is what the ranks are known to do.
    """
    first, second = _shared(ours, other, theirs, world_size), _shared(theirs, one, ours, world_size)
    first, second = _without_holes(first, second), _without_holes(second, first)
    start, other_start = _first_common(first, second), _first_common(second, first)
    if start is None or other_start is None:
        return None
    first, second = first[start:], second[other_start:]
    alone = min(_first_alone(first, second), _first_alone(second, first))
    if alone >= min(len(first), len(second)):
        return None
    # calls from one line look alike: one that left out the first of several shows by its place among other groups' calls
    for place in (alone, _first_swapped(first, second, alone)):
        habit = _usual_size if _alike(first[place], second[place]) else _usual
        known, other_known = habit(first, place), habit(second, place)
        if known != other_known:
            return other if known else one
    return None


def _shared(ours: Records, other: int, theirs: Records, world_size: int) -> list[Collective]:
    """Our collectives in groups the other rank is in as well."""
    return [
        record for record in ours if not record.point_to_point and belongs(other, record, theirs, world_size)
    ]


def _by_place(records: Records) -> dict[tuple[str, int], Collective]:
    return {(record.group, record.sequence): record for record in records}


def _without_holes(ours: Records, theirs: Records) -> list[Collective]:
    """Ours without those the other must have enqueued too, as it is further in the group, but no longer retains."""
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


def _first_alone(ours: Records, theirs: Records) -> int:
    """The index of our first collective that the other has not, or has otherwise; the length if there is none.

    Two lines for one collective are no difference in programs whose ranks take different branches to it. There
    the ranks agree on a line again later, which they do not after one has skipped a collective.
    """
    places = _by_place(theirs)
    agreed: dict[str, int] = {}
    for record in ours:
        line, met = _line(record.location), places.get((record.group, record.sequence))
        if met is not None and line is not None and line == _line(met.location):
            agreed[record.group] = max(record.sequence, agreed.get(record.group, 0))
    branches: set[tuple[object, object]] = set()
    for i, record in enumerate(ours):
        met = places.get((record.group, record.sequence))
        if met is None or not can_meet(record, met):
            return i
        lines = _line(record.location), _line(met.location)
        if None in lines or lines[0] == lines[1] or lines in branches:
            continue
        if record.sequence > agreed.get(record.group, 0):
            return i
        branches.add(lines)
    return len(ours)


def _first_swapped(ours: Records, theirs: Records, end: int) -> int:
    """The index before `end` at which the two ranks' calls, of all groups together, first differ; `end` if there is none."""
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


def _usual(records: Records, place: int) -> bool:
    """Whether the collective at `place` is what followed the same context before."""
    contexts = _contexts(records, place)
    longest = max((length for length, _ in contexts), default=0)
    return any(_alike(records[index], records[place]) for length, index in contexts if length == longest)


def _usual_size(records: Records, place: int) -> bool:
    """Whether this operation had these sizes each time before, and at least twice; varying sizes tell nothing.

    Contexts half as long as the longest count too: the oldest steps are cut off by the ring's start.
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
