"""The staging area: choice of slots, and snapshots."""

from __future__ import annotations

import stat
import tempfile
from contextlib import ExitStack
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from support.slots import held, snapshot

from grpo_run.runtime.snapshots.area import SLOTS, StagingArea
from grpo_run.runtime.snapshots.slot import DRAINED, STAGED

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
