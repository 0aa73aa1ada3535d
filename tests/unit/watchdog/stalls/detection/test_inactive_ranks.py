"""Ranks that do nothing are ended only if none works and none is unknown."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from support.builders.watchdog.observed_slots import facts, look, nest
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

KINDS = st.sampled_from(["quiet", "waits", "works", "unknown", "exited"])


@given(kinds=st.lists(KINDS, min_size=2, max_size=5), seconds=st.floats(0.0, 1e4), connected=st.booleans())
def test_the_quiet_rule_ends_nobody_while_a_rank_works_or_is_unknown(
    kinds: list[str], seconds: float, connected: bool
) -> None:
    """It ends exactly the ranks that do nothing, once nobody has worked for as long as the deadline."""
    slots = {rank: make_slot(rank, phases=nest((Phase.reward, seconds))) for rank in range(len(kinds))}
    stall = look(
        slots,
        learned={},
        completed={},
        settings=DeadlineSettings(ceiling_seconds=1e6, first_seconds=1e6),
        processes={
            rank: None if kind in ("unknown", "exited")
            else facts(quiet_seconds=seconds if kind == "quiet" else 0.0, connected=connected)
            for rank, kind in enumerate(kinds)
        },
        waiting={rank: kind == "waits" for rank, kind in enumerate(kinds)},
        still=dict.fromkeys(slots, seconds),
        exited=[rank for rank, kind in enumerate(kinds) if kind == "exited"],
    )  # fmt: skip
    nobody_works = not {"works", "unknown"} & set(kinds)
    quiet = tuple(rank for rank, kind in enumerate(kinds) if kind == "quiet")
    if nobody_works and quiet and seconds > (300.0 if connected else 60.0):
        assert stall is not None
        assert sorted(stall.culprits) == list(quiet)
    else:
        assert stall is None
