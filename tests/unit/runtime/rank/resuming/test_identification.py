"""A call keeps its number in the run if the script skips stages or renames its output directory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.resuming import Save

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.history.train_calls import CallDirectory, KnownCall
from grpo_run.runtime.rank.resuming.identification import IdentifiedCall, find_mismatch, identify

AT = 1_790_000_000.0


def directory(path: str, at: float = AT) -> CallDirectory:
    """A directory whose name was chosen at a time."""
    return CallDirectory(path=path, not_before=at, not_after=at + 5.0)


def known(ordinal: int, trainer_class: str, path: str, **fields: Any) -> KnownCall:
    """A call that the run has begun."""
    return KnownCall(
        ordinal=ordinal, trainer_class=trainer_class, settings="s", directories=(directory(path),), reached=6,
        saved=5,
        target_steps=10, checkpoint=f"{path}/checkpoint-5", **fields,
    )  # fmt: skip


SFT = known(1, "SFTTrainer", "/o/sft", finished=True)
GRPO = known(2, "GRPOTrainer", "/o/grpo", interrupted=True)


def ask(
    trainer_class: str, path: str, calls: Sequence[KnownCall] = (SFT, GRPO), *, claimed: Sequence[int] = (),
    position: int = 1, settings: str = "s",
) -> IdentifiedCall:  # fmt: skip
    """Identify a call in a later attempt."""
    call = TrainCall(ordinal=position, trainer_class=trainer_class, output_dir=path)
    return identify(
        call, calls, claimed, settings=settings, directory=directory(path, AT + 7200), run_id="run-1"
    )


def text_of(identified: IdentifiedCall, step: int, *, rejected: bool = False) -> str:
    """The message about a call that starts from a step; empty if there is none."""
    found = find_mismatch(identified, step=step, rejected=rejected, output_dir=identified.call.output_dir)
    return found.text if found is not None else ""


def test_a_stage_after_a_skipped_one_keeps_its_number() -> None:
    """SFT only if its model is not there, then GRPO: GRPO is the first call now, and still call 2."""
    found = ask("GRPOTrainer", "/o/grpo")
    assert (found.call.ordinal, found.known, found.lost, found.skipped) == (2, GRPO, None, None)
    assert text_of(found, 5) == ""


def test_of_two_calls_in_one_directory_the_one_with_equal_settings_is_recognized() -> None:
    """The script skips the first, which is finished."""
    calls = [
        known(1, "GRPOTrainer", "/o/x", finished=True),
        replace(known(2, "GRPOTrainer", "/o/x"), settings="t"),
    ]
    assert ask("GRPOTrainer", "/o/x", calls, settings="t").call.ordinal == 2
    assert ask("GRPOTrainer", "/o/x", calls, settings="changed").call.ordinal == 1


def test_an_older_checkpoint_is_said_and_no_reason_to_end_the_run() -> None:
    """A snapshot in memory does not follow a run to another machine."""
    mismatch = find_mismatch(ask("GRPOTrainer", "/o/grpo"), step=2, rejected=False, output_dir="/o/grpo")
    assert mismatch is not None
    assert not mismatch.serious


def test_a_new_stage_never_takes_the_number_of_another() -> None:
    """SFT had finished and is skipped, GRPO was never begun."""
    found = ask("GRPOTrainer", "/o/grpo", [SFT])
    assert (found.call.ordinal, found.known) == (2, None)
    assert text_of(found, 0) == ""


def test_repeated_calls_are_recognized_one_after_another() -> None:
    """Two calls of one class in one directory."""
    calls = [known(1, "GRPOTrainer", "/o/x", finished=True), known(2, "GRPOTrainer", "/o/x")]
    assert ask("GRPOTrainer", "/o/x", calls).call.ordinal == 1
    assert ask("GRPOTrainer", "/o/x", calls, claimed=[1]).call.ordinal == 2
    assert ask("GRPOTrainer", "/o/x", calls, claimed=[1, 2]).call.ordinal == 3


def test_a_name_with_the_time_is_recognized_with_equal_settings_only() -> None:
    """Another seed or another amount of data is another call."""
    calls = [replace(GRPO, directories=(directory("/o/grpo-1790000002"),))]
    now = "/o/grpo-1790007202"
    found = ask("GRPOTrainer", now, calls)
    assert (found.call.ordinal, found.moved_from) == (2, "/o/grpo-1790000002")
    assert found.directories == (Path("/o/grpo-1790000002"),)
    assert ask("GRPOTrainer", now, calls, settings="other").known is None


def test_a_directory_that_was_moved_is_recognized_by_its_checkpoints(save: Save, output: Path) -> None:
    """Renamed by hand, or mounted elsewhere in another container."""
    save(5, ordinal=2)
    assert ask("GRPOTrainer", str(output)).call.ordinal == 2
    assert ask("GRPOTrainer", str(output), []).call.ordinal == 2


def test_a_call_that_is_lost_is_named_with_its_newest_checkpoint() -> None:
    """It gets a number of its own, so that checkpoints of the lost one are never taken for its own."""
    found = ask("GRPOTrainer", "/o/grpo-amber-birch")
    assert (found.call.ordinal, found.lost) == (3, GRPO)
    text = text_of(found, 0)
    for part in (
        "starts from step 0",
        "/o/grpo-amber-birch",
        "/o/grpo)",
        "step 6 of 10",
        "/o/grpo/checkpoint-5",
    ):
        assert part in text


def test_a_stage_that_is_left_out_although_it_was_interrupted_is_named() -> None:
    """A script that skips SFT because its directory exists goes on with half a model."""
    calls = [known(1, "SFTTrainer", "/o/sft", interrupted=True)]
    found = ask("GRPOTrainer", "/o/grpo", calls)
    assert (found.call.ordinal, found.skipped) == (2, calls[0])
    assert "was interrupted at step 6 of 10" in text_of(found, 0)


def test_a_call_that_was_interrupted_before_its_first_checkpoint_has_nothing_to_lose() -> None:
    """In another directory it starts over, which is right; left out by the script, it is missing."""
    early = replace(known(1, "SFTTrainer", "/o/sft-amber", interrupted=True), saved=0, checkpoint=None)
    found = ask("SFTTrainer", "/o/sft-birch", [early])
    assert (found.lost, found.skipped) == (None, None)
    assert text_of(found, 0) == ""
    assert "no checkpoint of it exists" in text_of(ask("GRPOTrainer", "/o/grpo", [early]), 0)


@pytest.mark.parametrize(
    ("step", "rejected", "said"), [(5, False, False), (0, False, True), (2, True, False)]
)
def test_a_checkpoint_that_is_gone_is_said(step: int, rejected: bool, said: bool) -> None:
    """Unless the checkpoints were rejected, which was said already."""
    found = ask("GRPOTrainer", "/o/grpo")
    assert bool(text_of(found, step, rejected=rejected)) is said
    if said:
        assert "/o/grpo/checkpoint-5 is gone" in text_of(found, step)


def test_a_loop_that_goes_on_to_its_next_call_is_not_a_serious_mismatch() -> None:
    """The first call finished and is skipped now; the second, with equal settings, begins."""
    calls = [known(1, "GRPOTrainer", "/o/fold-1", finished=True)]
    found = ask("GRPOTrainer", "/o/fold-2", calls)
    assert (found.call.ordinal, found.known) == (2, None)
    mismatch = find_mismatch(found, step=0, rejected=False, output_dir="/o/fold-2")
    assert mismatch is not None
    assert not mismatch.serious
