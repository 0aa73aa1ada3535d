"""The rank that others wait for: named while it happens, and never invented."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, Slot
from grpo_run.watchdog.stalls.awaited import AwaitedRank, find_awaited_rank
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings, Occurrence
from grpo_run.watchdog.stalls.observed import Observed
from grpo_run.watchdog.stalls.overdue import PhaseClock


def in_phase(rank: int, phase: Phase, **changes: object) -> Slot:
    """A slot with one open phase."""
    return make_slot(rank, phases=(OpenPhase(phase=phase, since_seconds=900.0),), **changes)


def clock(rank: int, phase: Phase, since: float) -> PhaseClock:
    """A clock of an innermost phase, read at 1,000 s, with a deadline of 300 s."""
    return PhaseClock(
        rank=rank, phase=phase, since_seconds=since, silent_seconds=1000.0 - since, deadline_seconds=300.0,
        occurrence=Occurrence.later, deadline_at_seconds=since + 300.0,
    )  # fmt: skip


def find(
    slots: Mapping[int, Slot | None],
    waiting: Mapping[int, bool | None],
    *,
    still: float = 30.0,
    since: Mapping[int, float] = {},
    busy: Mapping[int, bool | None] = {},
) -> AwaitedRank | None:
    """Find the awaited rank; every rank's slot has been still for `still` seconds."""
    observed = Observed(
        slots=slots, now=1000.0, learned={}, completed={}, settings=DeadlineSettings(),
        waiting={rank: waits for rank, waits in waiting.items() if waits is not None},
        still=dict.fromkeys(slots, still),
    )  # fmt: skip
    return find_awaited_rank(
        observed,
        clock=lambda slot: clock(slot.rank, slot.phase or Phase.startup, since.get(slot.rank, 900.0)),
        busy=busy,
    )


def test_the_rank_that_does_not_wait_is_awaited() -> None:
    """With its phase, since when, until when, and who waits."""
    slots = {0: in_phase(0, Phase.vote), 1: in_phase(1, Phase.reward), 2: in_phase(2, Phase.data)}
    found = find(slots, {0: False, 1: False, 2: True}, busy={1: True})
    assert found == AwaitedRank(
        rank=1, phase=Phase.reward, since_seconds=900.0, deadline_at_seconds=1200.0, busy=True, waiters=(0, 2)
    )


def test_the_longest_silent_rank_is_named_first() -> None:
    """Of several that do not wait."""
    slots = {rank: in_phase(rank, Phase.reward) for rank in range(3)}
    found = find(slots, {0: True, 1: False, 2: False}, since={1: 950.0, 2: 940.0})
    assert found is not None
    assert (found.rank, found.since_seconds, found.waiters) == (2, 940.0, (0,))


@pytest.mark.parametrize("why", ["short wait", "nobody waits", "all wait", "done", "unreadable"])
def test_nobody_is_named_without_a_wait_or_without_a_rank_to_wait_for(why: str) -> None:
    """A short wait is usual; a rank that has ended or cannot be read is no rank to wait for."""
    working: Slot | None = in_phase(
        1, Phase.reward, state=RankState.done if why == "done" else RankState.training
    )
    slots = {0: in_phase(0, Phase.reward), 1: None if why == "unreadable" else working}
    waiting: dict[int, bool | None] = {0: why != "nobody waits", 1: why == "all wait"}
    assert find(slots, waiting, still=1.9 if why == "short wait" else 30.0) is None


def test_the_run_waits_for_its_only_rank() -> None:
    """No other rank does."""
    slots = {0: in_phase(0, Phase.reward)}
    found = find(slots, {0: False})
    assert found is not None
    assert (found.rank, found.phase, found.waiters) == (0, Phase.reward, ())
    assert find(slots, {0: False}, still=1.9) is None


def test_a_rank_that_may_wait_is_a_waiter_and_not_awaited() -> None:
    """Only a Flight Recorder could tell whether it waits in its backward pass."""
    slots = {0: in_phase(0, Phase.forward_backward), 1: in_phase(1, Phase.forward_backward)}
    assert find(slots, {0: None, 1: None}) is None
    found = find(slots, {0: None, 1: False})
    assert found is not None
    assert (found.rank, found.waiters) == (1, (0,))


def test_next_to_ranks_that_do_nothing_the_one_that_works_is_awaited() -> None:
    """No record tells who waits at start-up, for example in a store."""
    slots = {rank: make_slot(rank, phases=(), state=RankState.starting) for rank in range(3)}
    nobody_waits = dict.fromkeys(slots, False)
    found = find(slots, nobody_waits, busy={0: False, 1: True, 2: False})
    assert found is not None
    assert (found.rank, found.busy, found.waiters) == (1, True, (0, 2))
    for busy in ({0: False, 1: True}, {0: False, 1: False, 2: False}):
        assert find(slots, nobody_waits, busy=busy) is None
