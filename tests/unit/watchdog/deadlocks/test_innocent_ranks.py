"""In random programs of which one rank has a defect, no other rank is named.

They end after their last step, so a rank may also have come to the end while another still waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.deadlock_shell import records
from support.collective_programs import draw_training
from support.planted_defects import MORE_DEFECTS, places
from support.simulated_looks import prove_from_looks
from support.simulated_ranks import Model, Simulation

from grpo_run.watchdog.deadlocks.collectives import Collective, CollectiveProgress, can_meet
from grpo_run.watchdog.deadlocks.positions import Position, without_other_threads
from grpo_run.watchdog.deadlocks.proof import prove

SEEDS = 40
GROUPS = ("0", "grpo_run/vote", "pair", "odd")


def members_of(group: str, world: int) -> tuple[int, ...]:
    """Two groups of all ranks, one of the first two, one of the first and the last."""
    return {"pair": (0, 1), "odd": (0, world - 1)}.get(group, tuple(range(world)))


def stopped(programs: Sequence[Sequence[Collective]]) -> dict[int, Position]:
    """Run each rank's calls, each waiting for all members of its group, until no rank can continue."""
    world, done = len(programs), [0] * len(programs)

    def meets(rank: int) -> bool:
        if done[rank] == len(programs[rank]):
            return False
        here = programs[rank][done[rank]]
        return all(
            any(
                (one.group, one.sequence) == (here.group, here.sequence) and can_meet(here, one)
                for one in programs[other][: done[other] + 1]
            )
            for other in members_of(here.group, world)
        )

    while ready := [rank for rank in range(world) if meets(rank)]:
        for rank in ready:
            done[rank] += 1
    positions = {}
    for rank, program in enumerate(programs):
        known = tuple(
            replace(
                record,
                members=members_of(record.group, world),
                progress=CollectiveProgress.completed if i < done[rank] else CollectiveProgress.waiting,
            )
            for i, record in enumerate(program[: done[rank] + 1])
        )
        exited = done[rank] == len(program)
        positions[rank] = without_other_threads(Position(rank=rank, records=known, exited=exited))
    return positions


@given(st.data())
def test_a_rank_that_skips_a_call_is_named_or_no_rank_is(data: st.DataObject) -> None:
    """After some complete steps, one rank skips one call: the proof names this rank or none."""
    world = data.draw(st.integers(2, 4))
    kinds = st.tuples(
        st.sampled_from(GROUPS), st.sampled_from(["all_reduce", "all_gather"]), st.integers(1, 3)
    )
    drawn = data.draw(st.lists(kinds, min_size=2, max_size=6))
    step = [(group, f"{group}/{name}:{20 + i}:{size}") for i, (group, name, size) in enumerate(drawn)]
    steps, skipper = data.draw(st.integers(2, 4)), data.draw(st.integers(0, world - 1))
    programs = [
        [call for group, call in [*step, ("", "vote")] if rank in members_of(group, world)] * steps
        for rank in range(world)
    ]
    own_step = len(programs[skipper]) // steps
    del programs[skipper][data.draw(st.integers(own_step, len(programs[skipper]) - 1))]
    found = prove(stopped([records(*program) for program in programs]), world_size=world)
    assert found is not None
    assert found.culprits in {(), (skipper,)}


@pytest.mark.parametrize("world", [2, 3, 4, 8])
@pytest.mark.parametrize("kind", MORE_DEFECTS)
def test_a_defect_is_attributed_to_its_rank_or_to_none(kind: str, world: int) -> None:
    """In programs without a repeated step, and with up to four; of three and more ranks, most are named."""
    named = proved = 0
    for seed in range(SEEDS // world):
        random = Random(seed)
        program = draw_training(random, world=world, steps=1 + seed % 4)
        place = random.choice(places(program))
        MORE_DEFECTS[kind](program, place, random)
        ranks = Simulation(
            program, random, Model(eager=False, ring=200), leaves=place.rank if kind == "leave" else -1
        )
        while ranks.act():
            pass
        found = None if ranks.finished else prove_from_looks(ranks, drift=0)
        if found is not None:
            assert found.culprits in {(), (place.rank,)}, (seed, place, found.sentence)
            assert (found.culprits == ()) == ("do not tell which" in found.sentence)
            proved += 1
            named += bool(found.culprits)
    assert proved
    assert world == 2 or 2 * named >= proved
