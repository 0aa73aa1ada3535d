"""No instant of a program that finishes is proved a deadlock; every planted defect that stalls ranks is.

The programs and the ranks are a model (`support/simulated_ranks.py`). What real ranks show of every call
is in `integration/test_collective_records.py`, and 20 odd ways to wait, on real ranks, in
`fault/test_healthy_collectives.py`.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.collective_programs import draw_program
from support.planted_defects import DEFECTS, places
from support.simulated_looks import prove_from_looks
from support.simulated_ranks import Model, Simulation

SEEDS = st.integers(0, 2**40)
SEEDS_OF_DEFECTS = 150


def check_healthy(seed: int) -> None:
    """Run one program to its end, and look at it often; between two looks the ranks may go on.

    Most looks come when all but some late threads have gone as far as they can: then most ranks wait.
    """
    random = Random(seed)
    program = draw_program(random, world=random.randint(2, 4), events=random.randint(1, 16))
    model = Model(eager=random.random() < 0.5, ring=random.choice((8, 24, 200)))
    ranks = Simulation(program, random, model)
    late = ranks.some_late()
    while not ranks.finished:
        if ranks.act(late) and random.random() > 0.03:
            continue
        found = prove_from_looks(ranks, drift=0 if random.random() < 0.7 else 2)
        assert found is None, (seed, found)
        if random.random() < 0.3:
            late = ranks.some_late()
        assert ranks.act() or ranks.finished, f"the program of seed {seed} does not finish"


@settings(max_examples=300, deadline=None)
@given(SEEDS)
def test_no_instant_of_a_program_that_finishes_is_a_deadlock(seed: int) -> None:
    """Of 2 to 4 ranks with threads, several groups, late waits, messages, limits and pauses."""
    check_healthy(seed)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(10))
def test_no_instant_of_ten_thousand_programs_is_a_deadlock(block: int) -> None:
    """One thousand programs in each block."""
    for number in range(1000):
        check_healthy(block * 1000 + number)


def stall(seed: int, kind: str) -> bool:
    """Plant a defect; returns whether it stalls ranks in collectives that need all members.

    Such a stall must be proved.
    """
    random = Random(seed)
    program = draw_program(random, world=random.randint(2, 4), events=random.randint(3, 14), accounted=True)
    candidates = places(program)
    if not candidates:
        return False
    place = random.choice(candidates)
    DEFECTS[kind](program, place, random)
    leaves = place.rank if kind == "leave" else -1
    ranks = Simulation(program, random, Model(eager=False, ring=200), leaves=leaves)
    while ranks.act():
        pass
    if not ranks.stalled_in_known_waits():
        return False
    assert prove_from_looks(ranks, drift=0) is not None, (seed, kind, place)
    return True


@pytest.mark.parametrize("kind", DEFECTS)
def test_every_defect_that_stalls_ranks_is_proved(kind: str) -> None:
    """And such stalls are frequent, so the test would notice a proof that is never found."""
    assert sum(stall(seed, kind) for seed in range(SEEDS_OF_DEFECTS)) >= 3
