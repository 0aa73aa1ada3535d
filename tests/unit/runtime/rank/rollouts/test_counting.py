"""What rollouts generate is counted on the board."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.rank.rollouts.counting import counted
from grpo_run.watchdog.observation import EndReason, Slot

CAPPED = (EndReason.repetition, EndReason.deadline, EndReason.eos)


@pytest.mark.parametrize(
    ("reasons", "ended"),
    [(None, [2.0, 1.0, 0.0, 0.0]), (CAPPED, [1.0, 0.0, 1.0, 1.0])],
    ids=["from the tokens", "known"],
)
def test_rollouts_are_counted_with_and_without_caps(
    session: Any, reading: Callable[[], Slot], reasons: Any, ended: list[float]
) -> None:
    """Tokens, completions and their ends: from the tokens, or as the caps have them."""
    trainer = SimpleNamespace(eos_token_ids=[1, 2], max_completion_length=4)
    generated = [[9, 9], [9, 9], [9, 9, 9]], [[5, 2], [5, 6, 7, 8], [5, 6, 7, 1]], "more"
    count = counted(trainer, session.slot, lambda: reasons)
    for rollout in (1.0, 2.0):
        assert count(lambda prompts: generated, ["a", "b", "c"]) is generated
        slot = reading()
        assert [slot.ended(reason) for reason in EndReason] == [rollout * one for one in ended]
        names = ("prompt_tokens", "completions", "tokens_generated", "prompt_length")
        assert [slot.value(name) for name in names] == [7 * rollout, 3 * rollout, 10 * rollout, 7 / 3]


@pytest.mark.parametrize("generated", [None, (), {"prompt_ids": []}, ([[9]], [(1, 2)]), ("ab", "cd"), 7])
def test_what_is_no_rollout_is_not_counted(session: Any, reading: Callable[[], Slot], generated: Any) -> None:
    """A subclass may return something else; it gets what it returned."""
    assert counted(SimpleNamespace(), session.slot, lambda: None)(lambda: generated) is generated
    slot = reading()
    assert (slot.tokens_generated, slot.completions, slot.prompt_tokens) == (0, 0.0, 0.0)
