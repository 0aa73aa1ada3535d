"""A rank is blamed only if it is overdue and does not wait for another one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.observed_slots import SHORT, facts, look, nest, stalled
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase, RankState, Slot
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings
from grpo_run.watchdog.stalls.durations import Durations


def test_a_rank_that_waits_for_a_working_rank_is_not_blamed() -> None:
    """Rank 0 has waited beyond its deadline; rank 1 still generates, within its own."""
    slots = {
        0: make_slot(0, phases=nest((Phase.optimizer, 60.0))),
        1: make_slot(1, phases=nest((Phase.generate, 61.0))),
    }
    learned = {Phase.optimizer: SHORT, Phase.generate: Durations.of([60.0] * 30)}
    assert look(slots, learned=learned, waiting={0: True, 1: False}) is None


def test_a_rank_within_its_deadline_protects_ranks_that_may_wait() -> None:
    """Rank 0 may be blocked in a collective of C++; it is blamed once rank 1 is overdue too."""
    slots: dict[int, Slot | None] = {
        0: make_slot(0, phases=nest((Phase.optimizer, 60.0))),
        1: make_slot(1, phases=nest((Phase.generate, 61.0))),
    }
    learned = {Phase.optimizer: SHORT, Phase.generate: Durations.of([60.0] * 30)}
    assert look(slots, learned=learned, waiting={}) is None
    assert look(slots | {1: None}, learned=learned, waiting={}) is None
    assert look({0: slots[0]}, learned=learned, waiting={}, whole_world=False) is None
    stall = stalled(slots, waiting={})
    assert stall.culprits == (1, 0)
    assert stall.sentence.endswith("; rank 0 missed its deadline too.")
    assert {rank: one.culprits for rank, one in stall.alone.items()} == {0: (0,), 1: (1,)}
    assert "too" not in stall.alone[0].sentence


def test_the_longest_silent_rank_is_named_first() -> None:
    """The later one may only wait for it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, ago))) for rank, ago in ((0, 20.0), (1, 40.0))}
    assert stalled(slots).culprits == (1, 0)


def test_an_unreadable_rank_is_neither_culprit_nor_reason() -> None:
    """All observed ranks wait beyond their deadlines, possibly for the unreadable one."""
    slots = {0: make_slot(0, phases=nest((Phase.vote, 500.0))), 1: None}
    assert look(slots) is None
    assert look({0: None, 1: None}) is None
    assert look({0: None, 1: make_slot(1, state=RankState.absent, phases=nest((Phase.data, 900.0)))}) is None


def test_a_zombie_is_not_judged() -> None:
    """Its slot shows its last phase; the agent is about to read its exit code."""
    slots = {0: make_slot(0, phases=nest((Phase.reward, 60.0)))}
    assert look(slots, processes={0: facts("Z")}) is None


def test_no_rank_is_blamed_if_all_wait() -> None:
    """The sentence says so."""
    slots = {rank: make_slot(rank, phases=nest((Phase.optimizer, 20.0 + rank))) for rank in range(2)}
    stall = stalled(slots, waiting={0: True, 1: True})
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.no_progress, (), (0, 1))
    assert "cannot tell which" in stall.sentence
    assert stall.waited_seconds == pytest.approx(20.0)


def test_all_ranks_waiting_is_no_hang_before_the_last_deadline() -> None:
    """The collective may be about to complete; ranks on other nodes may still work."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, ago))) for rank, ago in ((0, 60.0), (1, 0.1))}
    assert look(slots) is None
    long_ago = {rank: make_slot(rank, phases=nest((Phase.vote, 60.0))) for rank in range(2)}
    assert look(long_ago, whole_world=False) is None


def test_a_stopped_rank_does_not_merely_wait() -> None:
    """SIGSTOP inside a collective: its slot says that it waits."""
    slots = {rank: make_slot(rank, phases=nest((Phase.vote, 20.0))) for rank in range(3)}
    stall = stalled(
        slots, processes={0: facts(), 1: facts("T", heartbeat_age_seconds=float("nan")), 2: facts()}
    )
    assert (stall.cause, stall.culprits, stall.waiters) == (Cause.interpreter_stuck, (1,), (0, 2))
    assert stall.sentence.startswith("Rank 1 is stopped (SIGSTOP), in vote for 20.0 s")


ranks_seen = st.dictionaries(
    st.integers(0, 3),
    st.tuples(
        st.sampled_from(list(Phase)),
        st.floats(0, 500),
        st.booleans(),
        st.booleans(),
        st.sampled_from("RSDTZ"),
    ),
    min_size=1,
)


@given(ranks_seen)
def test_only_overdue_ranks_that_do_not_wait_are_ever_blamed(seen: dict[int, Any]) -> None:
    """For any mixture of phases, waits, states and unreadable slots."""
    slots: dict[int, Slot | None] = {
        rank: make_slot(rank, phases=nest((phase, ago))) if readable else None
        for rank, (phase, ago, readable, _, _) in seen.items()
    }
    waits = {rank: waits for rank, (_, _, _, waits, _) in seen.items()}
    stall = look(slots, waiting=waits, processes={rank: facts(one[4]) for rank, one in seen.items()})
    if stall is None:
        return
    assert not set(stall.culprits) & set(stall.waiters)
    for rank in stall.culprits:
        phase, ago, readable, waits_too, state = seen[rank]
        assert readable
        assert ago > 8.0
        assert state != "Z"
        assert state == "T" or not (waits_too or phase is Phase.vote)


def test_a_thread_that_runs_in_a_waiting_rank_is_blamed_only_if_nobody_works() -> None:
    """Native code may wait for other ranks without releasing the interpreter; they may be at work for it."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, 25.0))) for rank in (0, 1)}
    told = {0: facts(), 1: facts(heartbeat_age_seconds=21.0, frozen_seconds=21.0)}
    common: dict[str, Any] = {
        "settings": DeadlineSettings(),
        "learned": {},
        "completed": {},
        "processes": told,
    }
    assert look(slots, waiting={0: False, 1: True}, **common) is None
    assert stalled(slots, waiting={0: True, 1: True}, **common).culprits == (1,)


def test_next_to_a_rank_that_does_not_wait_one_that_may_wait_is_not_blamed() -> None:
    """Rank 0 is in its backward pass, and its Flight Recorder does not answer."""
    slots = {
        0: make_slot(0, phases=nest((Phase.forward_backward, 90.0))),
        1: make_slot(1, phases=nest((Phase.reward, 90.0))),
    }
    stall = stalled(
        slots, settings=DeadlineSettings(), learned={}, completed={}, waiting={1: False},
        processes={rank: facts(quiet_seconds=80.0, connected=False) for rank in (0, 1)},
    )  # fmt: skip
    assert stall.culprits == (1,)
