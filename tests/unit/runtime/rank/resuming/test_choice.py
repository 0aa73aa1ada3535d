"""Rank 0 chooses the newest verified checkpoint of the call, or what `--resume-from` names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.resuming import Ask, Rejected, Save, flip_a_byte, plain, remove_a_file

from grpo_run.runtime.checkpoints import digests
from grpo_run.runtime.checkpoints.compatibility import BatchGeometry
from grpo_run.runtime.checkpoints.digests import FileEntry, digest_file
from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest
from grpo_run.runtime.checkpoints.search import FoundCheckpoint
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.resuming.choice import choose
from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeChoice, ResumeRequest


def test_a_run_without_checkpoints_starts_from_step_zero(resume_request: ResumeRequest, ask: Ask) -> None:
    """`train()` gets no checkpoint, and the user gets no message."""
    assert ask(resume_request) == ResumeChoice(argument=None)


def test_the_newest_checkpoint_of_this_run_is_chosen(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """Newest means the highest step. A finished call is marked, so that it is not trained again."""
    save(5)
    newest = save(10)
    choice = ask(resume_request)
    assert choice.argument == str(newest)
    assert choice.checkpoint is not None
    assert choice.checkpoint.manifest.step == 10
    assert not choice.finished
    end = save(20, finished=True)
    choice = ask(resume_request)
    assert (choice.argument, choice.finished) == (str(end), True)


def test_a_corrupt_checkpoint_is_rejected_and_an_older_one_chosen(
    resume_request: ResumeRequest, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """The reason names the file that does not match its digest. Without an older one, the run starts
    from step 0.
    """
    older = save(5)
    flip_a_byte(save(10))
    assert ask(resume_request).argument == str(older)
    assert [name for name, _ in rejected] == ["checkpoint-10"]
    assert "model.safetensors" in rejected[0][1]
    flip_a_byte(older)
    assert ask(resume_request).argument is None
    assert [name for name, _ in rejected[1:]] == ["checkpoint-10", "checkpoint-5"]


@pytest.mark.parametrize("other", [{"ordinal": 2}, {"trainer_class": "SFTTrainer"}])
def test_a_checkpoint_of_another_call_is_ignored(
    resume_request: ResumeRequest, ask: Ask, save: Save, rejected: Rejected, other: dict[str, Any]
) -> None:
    """A script may train twice into one directory; the other call's checkpoint is not reported."""
    save(10, **other)
    assert ask(resume_request) == ResumeChoice(argument=None)
    assert rejected == []


def test_checkpoints_of_a_run_that_has_not_finished_are_not_trained_over(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """Rotation would delete them. The refusal names the other run, its step, and the two ways to go on."""
    save(10, run_id="run-0")
    with pytest.raises(
        UsageError, match=r"run-0.*has not finished \(step 10\).*--resume-from run-0.*--fresh"
    ):
        ask(resume_request)


@pytest.mark.parametrize("fresh", [True, False])
def test_checkpoints_of_a_finished_run_or_with_fresh_are_ignored_with_a_notice(
    resume_request: ResumeRequest, ask: Ask, save: Save, fresh: bool
) -> None:
    """The notice names the other run and the option that resumes from it."""
    save(10, run_id="run-0", finished=not fresh)
    choice = ask(replace(resume_request, fresh=fresh))
    assert (choice.argument, choice.checkpoint) == (None, None)
    assert choice.notice is not None
    assert "run-0" in choice.notice
    assert "--resume-from run-0" in choice.notice


def test_a_new_run_does_not_continue_an_earlier_one_with_its_id(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """The first attempt cannot have saved it. Later attempts resume from what the new run has saved."""
    named, own = save(5, run_id="run-0"), save(10)
    fresh = replace(resume_request, fresh=True, resume_from=str(named))
    with pytest.raises(UsageError, match=r"checkpoint-10 .*same id, run-1; .*--run-id"):
        ask(fresh)
    assert ask(replace(fresh, first_attempt=False)).argument == str(own)


def test_resume_from_a_run_id_chooses_its_newest_checkpoint(
    resume_request: ResumeRequest, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """The value of `--resume-from` is a run id. A corrupt checkpoint is skipped. After a fault, the run
    resumes from its own checkpoint, not from its starting point.
    """
    older, newest = save(5, run_id="run-0"), save(10, run_id="run-0")
    request = replace(resume_request, resume_from="run-0")
    assert ask(request).argument == str(newest)
    assert rejected == []
    flip_a_byte(newest)
    assert ask(request).argument == str(older)
    assert rejected
    own = save(3)
    assert ask(request).argument == str(own)


def test_resume_from_a_directory_chooses_it(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """It can be anywhere, and older than others next to it."""
    save(10, folder=tmp_path / "other", run_id="run-0")
    named = save(5, folder=tmp_path / "other", run_id="run-0")
    assert ask(replace(resume_request, resume_from=str(named))).argument == str(named)


def test_resume_from_a_directory_without_a_manifest_chooses_it_if_complete(
    resume_request: ResumeRequest, ask: Ask, tmp_path: Path
) -> None:
    """A notice says that digests are not verified; a missing file is refused."""
    path = plain(tmp_path / "other", 5)
    choice = ask(replace(resume_request, resume_from=str(path)))
    assert (choice.argument, choice.checkpoint) == (str(path), None)
    assert "accepted without verifying digests" in (choice.notice or "")
    remove_a_file(path)
    with pytest.raises(UsageError, match=r"optimizer\.pt is missing"):
        ask(replace(resume_request, resume_from=str(path)))


def test_resume_from_what_cannot_be_used_is_refused(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """No other checkpoint replaces one that the user named. A directory of something else gives no traceback
    from the trainer.
    """
    corrupt = save(5, folder=tmp_path / "other", run_id="run-0")
    flip_a_byte(corrupt)
    (tmp_path / "runs").mkdir()
    for named, reason in (
        (corrupt, r"model\.safetensors"),
        (tmp_path / "runs", "--resume-from"),
        ("no-such-run", "--resume-from no-such-run"),
    ):
        with pytest.raises(UsageError, match=reason):
            ask(replace(resume_request, resume_from=str(named)))


def test_a_later_call_without_a_checkpoint_in_the_other_run_uses_the_script_argument(
    resume_request: ResumeRequest, ask: Ask
) -> None:
    """The other run may have ended before this call."""
    second = replace(
        resume_request, resume_from="run-0", call=resume_request.call.model_copy(update={"ordinal": 2})
    )
    assert ask(second) == ResumeChoice(argument=None, from_script=True)


@pytest.mark.parametrize(("named", "resumed"), [(1, None), (2, 20)])
def test_only_calls_up_to_the_named_checkpoint_are_taken_from_the_other_run(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path, named: int, resumed: int | None
) -> None:
    """What the other run did after it, perhaps a collapse, is done anew."""
    folder = tmp_path / "out"
    paths = {1: save(10, run_id="run-0", finished=True), 2: save(20, run_id="run-0", ordinal=2)}
    request = replace(resume_request, resume_from=str(paths[named]))
    assert ask(request).argument == str(folder / "checkpoint-10")
    second = replace(request, call=request.call.model_copy(update={"ordinal": 2}))
    assert ask(second).argument == (None if resumed is None else str(folder / f"checkpoint-{resumed}"))


def test_a_named_directory_with_a_damaged_manifest_is_refused(
    resume_request: ResumeRequest, ask: Ask, save: Save
) -> None:
    """It is not treated as a checkpoint without a manifest."""
    path = save(5, run_id="run-0")
    (path / MANIFEST).write_text("{")
    with pytest.raises(UsageError, match="not a manifest"):
        ask(replace(resume_request, resume_from=str(path)))
    with pytest.raises(UsageError, match="not a manifest"):
        ask(replace(resume_request, script_argument=str(path)))


def test_a_checkpoint_with_a_damaged_manifest_is_corrupt_and_an_older_one_chosen(
    resume_request: ResumeRequest, save: Save
) -> None:
    """The run of the checkpoint is unknown, so it is corrupt for every run."""
    older = save(5)
    (save(10) / MANIFEST).write_text("{")
    seen: list[RejectedCheckpoint] = []
    assert choose(resume_request, seen.append).argument == str(older)
    assert [(one.path.name, one.corrupt, one.own) for one in seen] == [("checkpoint-10", True, True)]


def test_a_corrupt_checkpoint_of_another_run_is_reported_as_not_own(
    resume_request: ResumeRequest, save: Save
) -> None:
    """Such a checkpoint is not renamed."""
    save(5, run_id="run-0")
    flip_a_byte(save(10, run_id="run-0"))
    seen: list[RejectedCheckpoint] = []
    choose(replace(resume_request, resume_from="run-0"), seen.append)
    assert [(one.corrupt, one.own) for one in seen] == [(True, False)]


def test_a_read_error_does_not_mark_a_checkpoint_as_corrupt(
    resume_request: ResumeRequest, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint is chosen; the newer one is not renamed."""
    older, newest = save(5), save(10)
    real = digest_file

    def digest(path: Path) -> FileEntry:
        if path.parent == newest:
            raise OSError(116, "Stale file handle")
        return real(path)

    monkeypatch.setattr(digests, "digest_file", digest)
    seen: list[RejectedCheckpoint] = []
    assert choose(resume_request, seen.append).argument == str(older)
    assert [one.corrupt for one in seen] == [False]


BATCH_OF_FOUR = {
    "layout": "ddp", "global_batch": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 1,
}  # fmt: skip


def test_other_directories_are_searched_too(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """The newest step wins; at equal steps the output directory wins, unless its checkpoint is corrupt."""
    memory = tmp_path / "memory"
    both = replace(resume_request, also_search=(memory,))
    on_disk, in_memory = save(5), save(5, folder=memory)
    assert ask(both).argument == str(on_disk)
    newest = save(10, folder=memory)
    assert ask(both).argument == str(newest)
    flip_a_byte(newest)
    flip_a_byte(on_disk)
    assert ask(both).argument == str(in_memory)


def test_a_snapshot_in_memory_must_fit_like_a_checkpoint_on_disk(
    resume_request: ResumeRequest, ask: Ask, save: Save, tmp_path: Path, rejected: list[tuple[str, str]]
) -> None:
    """One of another number of ranks is used if its exact state can be regrouped, else an older checkpoint
    is.
    """
    older = save(5)
    path = save(10, folder=tmp_path / "memory", world_size=4, **BATCH_OF_FOUR)
    found = FoundCheckpoint(path=path, manifest=read_manifest(path))
    request = replace(
        resume_request, in_memory=found, batch=BatchGeometry(ranks=2, per_device=4, accumulation=1)
    )
    choice = ask(request)
    assert (choice.argument, choice.in_memory) == (str(path), True)
    assert choice.notice is not None
    choice = ask(request, lambda folder, ranks: "it lies within a rollout" if folder == path else None)
    assert (choice.argument, choice.in_memory) == (str(older), False)
    assert rejected == [("checkpoint-10", "it lies within a rollout")]
