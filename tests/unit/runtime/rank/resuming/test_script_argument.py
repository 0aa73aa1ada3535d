"""The script's `resume_from_checkpoint` is honored, but no damaged checkpoint is loaded."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.resuming import STARTED_AT, Ask, Rejected, Save, flip_a_byte, plain, remove_a_file

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.resuming.request import ResumeChoice, ResumeRequest


def test_a_checkpoint_of_this_run_wins_over_the_script_argument(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The script's argument applies only while this run has no checkpoint of its own."""
    newest = save(10)
    for argument in ("elsewhere/checkpoint-3", True):
        assert ask(replace(resume_request, script_argument=argument)).argument == str(newest)


def test_no_notice_if_the_script_names_the_checkpoint(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The script has chosen the other run's checkpoint itself."""
    path = save(10, run_id="run-0")
    assert ask(replace(resume_request, script_argument=str(path))) == ResumeChoice(
        argument=str(path), notice=None
    )


@pytest.mark.parametrize("argument", ["elsewhere/checkpoint-3", True])
def test_the_script_argument_is_passed_through_on_the_first_attempt(
    resume_request: ResumeRequest, ask: Ask, argument: str | bool
) -> None:
    """transformers then handles it as without grpo-run. A run that failed before its first checkpoint starts
    where its first attempt started.
    """
    request = replace(resume_request, script_argument=argument)
    assert ask(request) == ResumeChoice(argument=argument, from_script=True)
    later = ask(replace(request, first_attempt=False)).argument
    assert later == (None if argument is True else argument)


def test_true_ignores_incomplete_checkpoints_of_earlier_attempts(
    resume_request: ResumeRequest, ask: Ask, output: Path
) -> None:
    """In later attempts, `resume_from_checkpoint=True` means what existed before this run; passing True would
    raise, or load the incomplete checkpoint.
    """
    later = replace(resume_request, script_argument=True, first_attempt=False)
    plain(output, 7, written_at=STARTED_AT + 1000)
    assert ask(later).argument is None
    earlier = plain(output, 3, written_at=STARTED_AT - 1000)
    assert ask(later).argument == str(earlier)


def test_true_chooses_the_newest_complete_checkpoint(
    resume_request: ResumeRequest, ask: Ask, output: Path, rejected: Rejected
) -> None:
    """transformers would load the highest step and continue without optimizer state."""
    complete = plain(output, 6)
    remove_a_file(plain(output, 9))
    choice = ask(replace(resume_request, script_argument=True))
    assert choice.argument == str(complete)
    assert "checkpoint-9 cannot be used: optimizer.pt is missing" in (choice.notice or "")
    assert "checkpoint-6 is used instead" in (choice.notice or "")
    assert "accepted without verifying digests" in (choice.notice or "")
    assert rejected == [("checkpoint-9", "optimizer.pt is missing")]
    assert (output / "checkpoint-9").is_dir()


def test_a_directory_in_the_output_directory_means_the_newest_up_to_it(
    resume_request: ResumeRequest, ask: Ask, output: Path
) -> None:
    """Scripts pass the result of `get_last_checkpoint`, which may be incomplete."""
    oldest, middle, newest = plain(output, 3), plain(output, 6), plain(output, 9)
    remove_a_file(middle)
    assert ask(replace(resume_request, script_argument=str(newest))).argument == str(newest)
    assert ask(replace(resume_request, script_argument=str(middle))).argument == str(oldest)


def test_a_script_argument_without_a_usable_checkpoint_is_refused(
    resume_request: ResumeRequest, ask: Ask, output: Path
) -> None:
    """The run neither loads a damaged checkpoint nor starts from step 0 silently."""
    remove_a_file(plain(output, 9))
    with pytest.raises(UsageError, match=r"none of 1 checkpoints.*optimizer\.pt is missing"):
        ask(replace(resume_request, script_argument=True))


def test_a_directory_elsewhere_is_used_if_complete_and_refused_otherwise(
    resume_request: ResumeRequest, ask: Ask, tmp_path: Path
) -> None:
    """No other checkpoint replaces one that the script named."""
    path = plain(tmp_path / "other", 5)
    choice = ask(replace(resume_request, script_argument=str(path)))
    assert (choice.argument, choice.from_script) == (str(path), True)
    remove_a_file(path)
    with pytest.raises(UsageError, match="from_pretrained"):
        ask(replace(resume_request, script_argument=str(path)))


def test_true_skips_a_corrupt_checkpoint_of_another_run(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The older checkpoint of that run is chosen."""
    older = save(5, run_id="run-0")
    flip_a_byte(save(10, run_id="run-0"))
    assert ask(replace(resume_request, script_argument=True)).argument == str(older)
