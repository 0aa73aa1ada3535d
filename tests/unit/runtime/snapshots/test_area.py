"""The staging area: choice of slots, and snapshots."""

from __future__ import annotations

import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slots import fill, held, snapshot

from grpo_run.runtime.snapshots.area import SLOTS, StagingArea
from grpo_run.runtime.snapshots.slot import DRAINED, STAGED, StagedSnapshot, StagingSlot
from grpo_run.watchdog.causes import Cause

OUT = Path("/out")


def test_only_the_user_can_read_the_area(staging: StagingArea) -> None:
    """It contains weights and prompts."""
    for path in (staging.path, *(slot.path for slot in staging.slots)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    staging.slots[0].begin_snapshot()
    staging.slots[0].prepare_snapshot(snapshot(OUT))
    staging.slots[0].complete_snapshot()
    staging.slots[0].mark_drained()
    assert stat.S_IMODE(staging.slots[0].files.stat().st_mode) == 0o700
    for name in (STAGED, DRAINED):
        assert stat.S_IMODE((staging.slots[0].path / name).stat().st_mode) == 0o600


@pytest.mark.parametrize(
    ("older", "newer"),
    [
        ({"step": 5}, {"step": 6}),
        ({"step": 9, "ordinal": 1}, {"step": 2, "ordinal": 2}),
        ({"step": 9, "attempt": 0}, {"step": 2, "attempt": 1}),
        ({"step": 9, "attempt": 0, "ordinal": 2}, {"step": 2, "attempt": 1, "ordinal": 1}),
        ({"step": 9, "staged_at": 1.0}, {"step": 9, "staged_at": 2.0}),
    ],
)
def test_snapshots_are_ordered_newest_first(
    staging: StagingArea, older: dict[str, Any], newer: dict[str, Any]
) -> None:
    """By attempt, call, step and time: an attempt may repeat earlier steps and calls."""
    fill(staging.slots[0], snapshot(OUT, **newer))
    fill(staging.slots[1], snapshot(OUT, **older))
    assert [slot.index for _, slot in staging.snapshots()] == [0, 1]


# ---- which slot is next ----


def test_slots_are_chosen_drained_first_then_superseded_then_empty(staging: StagingArea) -> None:
    """Allocated memory is reused before more is taken."""
    first, second, third = staging.slots
    assert staging.choose_slot() == first
    fill(first, snapshot(OUT, 1, scheduled=False))
    assert staging.choose_slot() == second
    fill(second, snapshot(OUT, 2, scheduled=False))
    assert staging.choose_slot() == first
    second.mark_drained()
    assert staging.choose_slot() == second
    with held(second):
        assert staging.choose_slot() == first
        with held(first):
            assert staging.choose_slot() == third
            with held(third):
                assert staging.choose_slot() is None


def test_scheduled_snapshots_are_kept_until_they_are_on_disk(staging: StagingArea) -> None:
    """With `sacrifice` the oldest is overwritten, but never the newest."""
    for step, slot in enumerate(staging.slots):
        fill(slot, snapshot(OUT, step))
    assert staging.choose_slot() is None
    assert staging.choose_slot(sacrifice=True) == staging.slots[0]
    with held(staging.slots[0]):
        assert staging.choose_slot(sacrifice=True) == staging.slots[1]
        with held(staging.slots[1]):
            assert staging.choose_slot(sacrifice=True) is None


def held_bytes(staging: StagingArea) -> list[bool]:
    """Whether each slot's files have memory."""
    return [any(path.stat().st_blocks for path in slot.path.rglob("*.pt")) for slot in staging.slots]


def test_memory_that_nobody_needs_is_freed(staging: StagingArea) -> None:
    """What is on disk or superseded goes; the newest snapshot, a scheduled one and a slot in use stay."""
    first, second, third = staging.slots

    def done(staged: StagedSnapshot, slot: StagingSlot) -> bool:
        return slot.drained

    fill(first, snapshot(OUT, 1))
    fill(second, snapshot(OUT, 2, scheduled=False))
    fill(third, snapshot(OUT, 3, scheduled=False))
    with held(second):
        assert staging.free_unneeded(done) == 0
    assert staging.free_unneeded(done) > 0
    assert held_bytes(staging) == [True, False, True]
    assert [staged.step for staged, _ in staging.snapshots()] == [3, 1]
    first.mark_drained()
    third.mark_drained()
    assert staging.free_unneeded(done, keep_newest=True) > 0
    assert held_bytes(staging) == [False, False, True]
    assert staging.free_unneeded(done) > 0
    assert held_bytes(staging) == [False, False, False]
    assert staging.snapshots() == []
    assert staging.free_unneeded(done) == 0
    fill(first, snapshot(OUT, 4))
    assert [staged.step for staged, _ in staging.snapshots()] == [4]


STATE = st.one_of(
    st.none(),
    st.fixed_dictionaries({"scheduled": st.booleans(), "drained": st.booleans(), "busy": st.booleans()}),
)


@given(
    states=st.lists(STATE, min_size=SLOTS, max_size=SLOTS),
    steps=st.permutations(range(SLOTS)),
    sacrifice=st.booleans(),
)
def test_a_needed_slot_is_never_chosen(
    states: list[dict[str, bool] | None], steps: list[int], sacrifice: bool
) -> None:
    """Property: no locked slot, not the newest undrained one, and no scheduled one without `sacrifice`."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        staging = StagingArea(Path(folder))
        there = {}
        for slot, state, step in zip(staging.slots, states, steps, strict=True):
            if state is None:
                continue
            there[slot.index] = (step, state)
            slot.begin_snapshot()
            slot.prepare_snapshot(snapshot(OUT, step, scheduled=state["scheduled"]))
            slot.complete_snapshot()
            if state["drained"]:
                slot.mark_drained()
            if state["busy"]:
                stack.enter_context(held(slot))
        newest = max(there, key=lambda index: there[index][0], default=None)
        chosen = staging.choose_slot(sacrifice=sacrifice)

        def may_go(index: int) -> bool:
            if index not in there:
                return True
            state = there[index][1]
            if state["busy"]:
                return False
            return state["drained"] or (index != newest and (sacrifice or not state["scheduled"]))

        allowed = {slot.index for slot in staging.slots if may_go(slot.index)}
        assert (chosen is None) == (not allowed)
        if chosen is not None:
            assert chosen.index in allowed
            drained = {index for index in allowed if index in there and there[index][1]["drained"]}
            assert chosen.index in (drained or allowed)


# ---- what else lies there ----


def test_trouble_is_visible_to_every_process_until_it_is_cleared(staging: StagingArea) -> None:
    """Ranks read the same file."""
    rank = StagingArea(staging.path)
    assert rank.trouble is None
    staging.set_trouble(Cause.disk_full, "the disk is full")
    assert rank.trouble is Cause.disk_full
    assert "the disk is full" in (staging.path / "TROUBLE.json").read_text()
    staging.set_trouble(None)
    staging.set_trouble(None)
    assert rank.trouble is None


def test_clearing_frees_the_memory(staging: StagingArea) -> None:
    """Clearing twice is not an error."""
    fill(staging.slots[0], snapshot(OUT))
    assert staging.slots[0].size_bytes() > 0
    staging.clear()
    assert not staging.path.exists()
    staging.clear()
