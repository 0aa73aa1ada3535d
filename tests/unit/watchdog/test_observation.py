"""Slots, phases and exits as observed."""

from __future__ import annotations

from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.observation import OpenPhase, Phase, RankState, all_done


def test_the_names_of_phases_are_fixed() -> None:
    """They are metric labels."""
    names = """startup data generate reward score forward_backward optimizer vote checkpoint eval cleanup idle
    weight_sync callback"""
    assert [phase.name for phase in Phase] == names.split()


def test_the_innermost_open_callback_is_named() -> None:
    """Also while another phase runs inside it; outside callbacks there is no name."""
    outer = OpenPhase(phase=Phase.callback, since_seconds=1.0, callback="Judge.on_step_end")
    inner = OpenPhase(phase=Phase.eval, since_seconds=2.0)
    slot = make_slot(0, phases=(outer, inner))
    assert (slot.callback, slot.phase, outer.key, inner.key) == (
        "Judge.on_step_end", Phase.eval, "Judge.on_step_end", Phase.eval,
    )  # fmt: skip
    assert make_slot(0).callback == ""


def test_a_run_is_done_when_every_rank_is() -> None:
    """One rank that is not done, or cannot be read, is enough to be not done."""
    done = make_slot(0, state=RankState.done)
    assert all_done([done, done])
    assert not any(all_done(slots) for slots in ([done, make_slot(1)], [done, None], []))
