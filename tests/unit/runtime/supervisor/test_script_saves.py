"""When a save of the script's own is complete."""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.runtime.supervisor.no_trainer import SETTLE_SECONDS, ScriptSaves
from grpo_run.watchdog.observation import Slot

MakeSlot = Callable[..., Slot]


def slots(make_slot: MakeSlot, *calls: int) -> dict[int, Slot | None]:
    """Ranks with these numbers of begun and ended calls."""
    return {rank: make_slot(rank, save_state_calls=count) for rank, count in enumerate(calls)}


def test_a_save_is_complete_when_the_last_rank_has_returned(make_slot: MakeSlot) -> None:
    """And it is complete once."""
    saves = ScriptSaves()
    assert not saves.observe(slots(make_slot, 0, 0), 1.0)
    assert not saves.observe(slots(make_slot, 1, 2), 2.0)
    assert saves.observe(slots(make_slot, 2, 2), 3.0)
    assert not saves.observe(slots(make_slot, 2, 2), 4.0)
    assert not saves.observe(slots(make_slot, 4, 2), 5.0), "rank 1 saves, too, and has not done so again"
    assert not saves.observe(slots(make_slot, 4, 3), 100.0)
    assert saves.observe(slots(make_slot, 4, 4), 101.0)


def test_a_rank_that_never_saves_is_waited_for_a_moment(make_slot: MakeSlot) -> None:
    """It may be behind, or the script saves on rank 0 only."""
    saves = ScriptSaves()
    assert not saves.observe(slots(make_slot, 2, 0), 10.0)
    assert not saves.observe(slots(make_slot, 2, 0), 10.0 + SETTLE_SECONDS / 2)
    assert saves.observe(slots(make_slot, 2, 0), 10.0 + SETTLE_SECONDS)
    assert saves.observe(slots(make_slot, 6, 0), 13.0), "rank 0 has begun another one since"


def test_ranks_that_go_no_further_are_not_waited_for(make_slot: MakeSlot) -> None:
    """What was saved counts, also if the run fails right after it."""
    assert ScriptSaves().observe(slots(make_slot, 2, 0), 10.0, ended=True)
    assert not ScriptSaves().observe(slots(make_slot, 1, 0), 10.0, ended=True), "a save that was cut off"


def test_a_slot_that_cannot_be_read_keeps_its_count(make_slot: MakeSlot) -> None:
    """Unknown is not zero."""
    saves = ScriptSaves()
    assert saves.observe(slots(make_slot, 2, 2), 1.0)
    assert not saves.observe({**slots(make_slot, 4, 2), 1: None}, 100.0)
