"""Whether another number of ranks may go on, and what would fit."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from grpo_run.runtime.checkpoints.compatibility import (
    Batch,
    describe_world_size_change,
    explain_world_size_mismatch,
)

EIGHT = Batch(ranks=2, per_device=4, accumulation=1)


def refused(**changes: Any) -> str | None:
    """checkpoint-40 of two ranks, gone on from by one."""
    fields: dict[str, Any] = {
        "written_by": 2, "layout": "ddp", "written_batch": EIGHT,
        "current_batch": Batch(ranks=1, per_device=4, accumulation=1), "ranks": 1,
    }  # fmt: skip
    return explain_world_size_mismatch("checkpoint-40", **(fields | changes))


def test_the_sentence_says_what_fits() -> None:
    """Every way to the same batch."""
    assert refused() == (
        "checkpoint-40 was written with 2 ranks x per_device_train_batch_size 4 x gradient_accumulation_steps 1"
        " = 8 samples per optimizer step, but this run has 1 rank x per_device_train_batch_size 4"
        " x gradient_accumulation_steps 1 = 4 samples per optimizer step:"
        " set per_device_train_batch_size=8 or gradient_accumulation_steps=2, or start 2 ranks"
    )


@pytest.mark.parametrize("layout", ["ddp", None])
def test_replicated_state_with_the_same_batch_is_allowed(layout: str | None) -> None:
    """However it is spread."""
    for now in (Batch(ranks=1, per_device=8, accumulation=1), Batch(ranks=1, per_device=2, accumulation=4)):
        assert refused(layout=layout, current_batch=now) is None


@pytest.mark.parametrize("layout", ["deepspeed-zero2", "deepspeed-zero3", "fsdp2", "tensor-parallel"])
def test_state_cut_over_ranks_is_refused(layout: str) -> None:
    """Whatever the batch; the number that fits is named."""
    text = refused(layout=layout, current_batch=Batch(ranks=1, per_device=8, accumulation=1))
    assert text is not None
    assert layout in text
    assert text.endswith("start 2 ranks")


def test_the_same_number_of_ranks_is_never_refused() -> None:
    """A batch that was changed on purpose, or a manifest that does not say."""
    assert refused(ranks=2) is None
    assert refused(ranks=2, layout="fsdp2", written_batch=None) is None


@pytest.mark.parametrize("unknown", [{"written_batch": None}, {"current_batch": None}])
def test_an_unknown_batch_is_refused(unknown: dict[str, None]) -> None:
    """Nothing is guessed."""
    text = refused(**unknown)
    assert text is not None
    assert text.endswith("start 2 ranks")


sizes = st.integers(1, 16)


@given(written=st.tuples(sizes, sizes, sizes), now=st.tuples(sizes, sizes, sizes))
def test_what_is_proposed_fits(written: tuple[int, int, int], now: tuple[int, int, int]) -> None:
    """Each setting named gives the batch that was written."""
    before = Batch(ranks=written[0], per_device=written[1], accumulation=written[2])
    mine = Batch(ranks=now[0], per_device=now[1], accumulation=now[2])
    text = refused(written_batch=before, written_by=before.ranks, current_batch=mine, ranks=mine.ranks)
    if text is None:
        assert before.ranks == mine.ranks or before.samples == mine.samples
        return
    for word in text.rpartition(": ")[2].replace(",", "").split():
        name, _, value = word.partition("=")
        if name == "per_device_train_batch_size":
            assert mine.ranks * int(value) * mine.accumulation == before.samples
        if name == "gradient_accumulation_steps":
            assert mine.ranks * mine.per_device * int(value) == before.samples
    ranks = int(text.rpartition("start ")[2].split()[0])
    if "with the batch it was written with" in text:
        assert ranks == before.ranks
    else:
        assert ranks * mine.per_device * mine.accumulation == before.samples


def test_the_notice_says_what_is_kept_and_what_not() -> None:
    """The order of the data is; random numbers are not."""
    text = describe_world_size_change("checkpoint-40", written_by=2, ranks=1, samples=8)
    assert "same 8 samples in the same order" in text
    assert "random numbers" in text
