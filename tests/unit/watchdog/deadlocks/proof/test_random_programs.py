"""In random programs, no healthy rank is called deadlocked and no innocent one is named."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.collective_positions import VOTE, Call, at_line, ran

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress, can_meet
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove

GROUPS = ("0", "grpo_run/vote", "pair", "odd")


def members_of(group: str, world: int) -> tuple[int, ...]:
    """Two groups of all ranks, one of the first two, one of the first and the last."""
    return {"pair": (0, 1), "odd": (0, world - 1)}.get(group, tuple(range(world)))


@st.composite
def same_program(draw: st.DrawFn) -> tuple[dict[int, Position], int]:
    """Ranks somewhere in one program, with anything pending, waiting and retained that may be."""
    world = draw(st.integers(2, 4))
    program = draw(st.lists(st.tuples(st.sampled_from(GROUPS), st.sampled_from(["all_reduce", "all_gather", "backward"]),  # noqa: E501
                                      st.integers(1, 3)), min_size=1, max_size=12))  # fmt: skip
    reached = [draw(st.integers(0, len(program))) for _ in range(world)]
    knows = draw(st.sets(st.sampled_from(GROUPS)))
    firsts = {
        group
        for group in GROUPS
        if min(reached[member] for member in members_of(group, world))
        <= next((i for i, call in enumerate(program) if call[0] == group), 0)
    }
    positions = {}
    for rank in range(world):
        counts: Counter[str] = Counter()
        records = []
        for index, (group, operation, elements) in enumerate(program[: reached[rank]]):
            members = members_of(group, world)
            if rank not in members:
                continue
            counts[group] += 1
            met = all(reached[member] > index for member in members)
            # A collective that all have enqueued may not have completed yet.
            done = met and (counts[group] == 1 or draw(st.booleans()))
            sizes = () if operation == "backward" else ((elements,),)
            records.append(
                Collective(
                    group=group, sequence=counts[group], operation=operation, sizes=sizes, dtypes=(),
                    progress=CollectiveProgress.completed if done else CollectiveProgress.enqueued,
                    members=members if group in knows else (), location=at_line(index),
                )
            )  # fmt: skip
        pending = [i for i, record in enumerate(records) if record.progress is CollectiveProgress.enqueued]
        if pending and draw(st.booleans()):
            waited = draw(st.sampled_from(pending))
            records[waited] = replace(records[waited], progress=CollectiveProgress.waiting)
        ended = reached[rank] == len(program) and not pending
        kept = tuple(records[-draw(st.integers(1, 12)) :])
        # A ring holds hundreds: no rank is that far ahead of one that is still in a group's first collective.
        forgotten = {record.group for record in records} - {record.group for record in kept}
        kept = tuple(r for r in records if r in kept or r.group in forgotten & firsts)
        positions[rank] = Position(
            rank=rank,
            records=None if draw(st.integers(0, 9)) == 0 else kept,
            exited=ended and draw(st.booleans()),
            outside_training=ended and draw(st.booleans()),
            in_backward=draw(st.booleans()),
        )
        if draw(st.booleans()):
            positions[rank] = without_other_threads(positions[rank])
    return positions, world


@given(same_program())
def test_ranks_of_one_program_are_never_deadlocked(drawn: tuple[dict[int, Position], int]) -> None:
    """No false proof: ranks anywhere in the same program are late, never deadlocked."""
    positions, world = drawn
    assert prove(positions, world_size=world) is None


def stopped(programs: Sequence[Sequence[Call]]) -> dict[int, Position]:
    """Run each rank's calls, each waiting for all members of its group, until no rank can continue."""
    world = len(programs)
    done = [0] * world
    records = [list(ran(program)) for program in programs]

    def meets(rank: int) -> bool:
        if done[rank] == len(programs[rank]):
            return False
        here = records[rank][done[rank]]
        for other in members_of(here.group, world):
            place = next((i for i, r in enumerate(records[other])
                          if (r.group, r.sequence) == (here.group, here.sequence)), None)  # fmt: skip
            if place is None or place > done[other] or not can_meet(here, records[other][place]):
                return False
        return True

    moved = True
    while moved:
        moved = False
        for rank in range(world):
            while meets(rank):
                done[rank] += 1
                moved = True
    positions = {}
    for rank in range(world):
        past = [replace(r, progress=CollectiveProgress.completed) for r in records[rank][: done[rank]]]
        here = [
            replace(r, progress=CollectiveProgress.waiting)
            for r in records[rank][done[rank] : done[rank] + 1]
        ]
        filled = tuple(replace(r, members=members_of(r.group, world)) for r in (*past, *here))
        positions[rank] = without_other_threads(Position(rank=rank, records=filled, exited=not here))
    return positions


@given(st.data())
def test_a_rank_that_skips_a_call_is_named_or_no_rank_is(data: st.DataObject) -> None:
    """After some complete steps, one rank skips one call: the proof names this rank or none."""
    world = data.draw(st.integers(2, 4))
    kinds = st.tuples(
        st.sampled_from(GROUPS), st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 3)
    )
    drawn = data.draw(st.lists(kinds, min_size=2, max_size=6))
    step: list[Call] = [(group, operation, 20 + i, size) for i, (group, operation, size) in enumerate(drawn)]
    steps, skipper = data.draw(st.integers(2, 4)), data.draw(st.integers(0, world - 1))
    programs = [
        [call for _ in range(steps) for call in [*step, VOTE] if rank in members_of(call[0], world)]
        for rank in range(world)
    ]
    own_step = len(programs[skipper]) // steps
    left_out = data.draw(st.integers(own_step, len(programs[skipper]) - 1))
    del programs[skipper][left_out]
    found = prove(stopped(programs), world_size=world)
    assert found is not None
    assert found.culprits in {(), (skipper,)}
