"""An interpreter that does not run is blamed before any phase, if it is known not to run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.observed_slots import facts, look, nest, stalled
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations


def test_of_waiting_ranks_the_one_with_a_stuck_interpreter_is_blamed() -> None:
    """Nothing else distinguishes it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, 20.0))) for rank in range(2)}
    stall = stalled(slots, processes={0: facts(), 1: facts("R", heartbeat_age_seconds=19.0)})
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.interpreter_stuck, (1,), (0,))


@pytest.mark.parametrize(
    ("age", "cause"),
    [(19.0, Cause.interpreter_stuck), (1.0, Cause.reward_stall), (float("nan"), Cause.reward_stall)],
)
def test_a_late_heartbeat_overrides_the_phase(age: float, cause: Cause) -> None:
    """A regular expression that holds the GIL is no slow reward server; an unknown heartbeat says nothing."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 20.0)))}
    assert stalled(slots, processes={0: facts("R", heartbeat_age_seconds=age)}).cause is cause


def test_a_late_heartbeat_alone_is_no_hang() -> None:
    """A long call into C is no hang before the phase is overdue."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 5.0)))}
    assert look(slots, processes={0: facts("T", heartbeat_age_seconds=5.0)}) is None


def test_a_culprit_that_cannot_be_killed_is_marked() -> None:
    """A restart would fail while it holds the accelerator."""
    slots = {0: make_slot(0, phases=nest((Phase.checkpoint, 20.0)))}
    stall = stalled(slots, processes={0: facts("D")})
    assert stall.uninterruptible
    assert "rank 0 is in uninterruptible sleep" in stall.sentence
    assert look(slots, processes={}) is not None  # not seen: a hang all the same


@given(
    state=st.sampled_from("RSDTtZ"),
    age=st.floats(0.0, 1e4) | st.just(float("nan")),
    ended=st.floats(0.0, 100.0),
)
def test_a_rank_that_is_not_known_to_be_frozen_is_not_ended_as_frozen(
    state: str, age: float, ended: float
) -> None:
    """However old its heartbeat is."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, 10.0))) for rank in (0, 1)}
    unknown = facts(state=state, heartbeat_age_seconds=age)
    learned = {Phase.reward: Durations().ended_after(ended)}
    for told in (unknown, None):
        stall = look(
            slots, settings=DeadlineSettings(), learned=learned, completed={}, processes={0: facts(), 1: told}
        )
        assert stall is None


def test_a_frozen_rank_is_ended_in_any_phase_while_others_work() -> None:
    """Nothing that another rank does lets its interpreter run."""
    for phase in Phase:
        slots = {rank: make_slot(rank, phases=nest((phase, 25.0))) for rank in (0, 1)}
        stall = stalled(
            slots, settings=DeadlineSettings(), learned={}, completed={},
            processes={0: facts(), 1: facts(heartbeat_age_seconds=21.0, frozen_seconds=21.0)},
        )  # fmt: skip
        assert (stall.culprits, stall.cause, stall.deadline_seconds) == ((1,), Cause.interpreter_stuck, 20.0)
