"""Which checkpoints of the script are missed at the end of a run."""

from __future__ import annotations

from typing import Any

import pytest
from support.journal import as_events

from grpo_run.runtime.history.history import History


def history(*events: dict[str, Any]) -> History:
    """The history after these events."""
    return History.of(as_events({"time": 1.0, **event} for event in events))


def failed(step: int, *, lost: bool = True, call: int = 1) -> dict[str, Any]:
    """A checkpoint that could not be saved."""
    return {
        "event": "checkpoint_failed", "step": step, "train_call": call, "path": f"/out/checkpoint-{step}",
        "reason": "no room.", "lost": lost,
    }  # fmt: skip


def published(
    step: int, *, scheduled: bool = True, call: int = 1, best: str | None = None, keeps: int | None = None
) -> dict[str, Any]:
    """A checkpoint on disk."""
    return {
        "event": "checkpoint_published", "step": step, "train_call": call, "path": f"/out/checkpoint-{step}",
        "scheduled": scheduled, "best": best, "keeps": keeps,
    }  # fmt: skip


def test_a_checkpoint_that_is_not_tried_again_is_missed() -> None:
    """One that is still in memory is not."""
    assert history(failed(2), published(4)).lost.sentence == (
        "/out/checkpoint-2, which the script scheduled, is not on disk: no room."
    )
    assert history(failed(2, lost=False)).lost.sentence == ""


def test_a_step_that_is_saved_after_all_is_not_missed() -> None:
    """The run went back and repeated it; a snapshot of the same step is not the script's."""
    assert history(failed(2), published(2)).lost.sentence == ""
    for other in (published(2, scheduled=False), published(2, call=2)):
        assert history(failed(2), other).lost.sentence


def test_a_checkpoint_that_would_have_been_deleted_by_now_is_not_missed() -> None:
    """As many newer ones are on disk as `save_total_limit` keeps; the same one twice counts once."""
    first, second = published(4, keeps=2), published(6, keeps=2)
    assert history(failed(2), first, first).lost.sentence
    assert history(failed(2), first, second).lost.sentence == ""
    assert history(failed(8), published(4, keeps=1), published(6, keeps=1)).lost.sentence


@pytest.mark.parametrize(
    ("keeps", "best", "missed"),
    [
        (2, None, True),
        (2, "checkpoint-1", False),
        (2, "checkpoint-2", True),
        (2, "checkpoint-4", True),
        (1, None, False),
        (1, "checkpoint-2", True),
        (3, "checkpoint-1", True),
        (None, "checkpoint-1", True),
    ],
)
def test_the_best_checkpoint_counts_as_for_save_total_limit(
    keeps: int | None, best: str | None, missed: bool
) -> None:
    """It is kept beside newer ones, and takes the place of one; checkpoint 2 is lost, and 4 is on disk."""
    assert bool(history(failed(2), published(4, best=best, keeps=keeps)).lost.sentence) is missed


def test_a_few_of_many_are_named() -> None:
    """The first ones."""
    sentence = history(*(failed(step) for step in range(10, 20))).lost.sentence
    assert "checkpoint-10, /out/checkpoint-11, /out/checkpoint-12 and 7 more" in sentence
    assert sentence.count("checkpoint-") == 3


def test_a_refused_checkpoint_of_non_finite_weights_is_missed_and_a_damaged_one_is_not() -> None:
    """The damaged one has been on disk."""
    refused = {**failed(2), "event": "checkpoint_rejected", "reason": "weights are not finite."}
    assert "not finite" in history(refused).lost.sentence
    assert (
        history({"event": "checkpoint_rejected", "step": 2, "path": "x", "reason": "digest"}).lost.sentence
        == ""
    )
