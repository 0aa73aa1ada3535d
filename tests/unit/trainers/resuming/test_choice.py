"""From which checkpoint a `train()` call starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files as made
from support.identities import identity

from grpo_run.runtime.checkpoints import manifest, publishing
from grpo_run.runtime.checkpoints.manifest import MANIFEST, TrainCall
from grpo_run.runtime.checkpoints.model_shape import model_shape
from grpo_run.runtime.checkpoints.world_size import Batch
from grpo_run.runtime.errors import CheckpointError, UsageError
from grpo_run.trainers.resuming.choice import PassedOver, Question, Resume, choose

STARTED_AT = 2_000_000_000.0
Save = Callable[..., Path]


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The call's `output_dir`."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def save(output: Path) -> Save:
    """Writes a complete checkpoint of run-1's first call, on two ranks."""

    def make(step: int, *, folder: Path = output, finished: bool = False, **changes: Any) -> Path:
        path = plain(folder, step)
        manifest.write_manifest(path, identity(folder, step, **({"world_size": 2} | changes)))
        if finished:
            manifest.mark_finished(path)
        return path

    return make


def plain(folder: Path, step: int, *, written_at: float | None = None, ranks: int = 2) -> Path:
    """A checkpoint as transformers writes it, without a manifest."""
    path = made.plain(folder, step, ranks=ranks)
    if written_at is not None:
        os.utime(path, (written_at, written_at))
    return path


def spoil(path: Path) -> None:
    """One byte of the weights is another."""
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)


def cut(path: Path) -> None:
    """Half written, as by a killed process."""
    (path / "optimizer.pt").unlink()


@pytest.fixture
def question(output: Path) -> Question:
    """The first call of run-1's first attempt, the script asking for nothing."""
    return Question(
        call=TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(output)),
        run_id="run-1",
        world_size=2,
        first_attempt=True,
        run_started_at=STARTED_AT,
        script_asks=None,
        resume_from=None,
    )


@pytest.fixture
def rejected() -> list[tuple[str, str]]:
    """Checkpoints passed over, as (name, why)."""
    return []


@pytest.fixture
def ask(rejected: list[tuple[str, str]]) -> Callable[..., Resume]:
    """Chooses, taking down what is passed over; every checkpoint can be reshaped unless said otherwise."""

    def answer(question: Question, can_reshape: Callable[[Path, int], str | None] | None = None) -> Resume:
        def note(one: PassedOver) -> None:
            rejected.append((one.path.name, one.reason))

        return choose(question, note, can_reshape or (lambda folder, ranks: None))

    return answer


Ask = Callable[..., Resume]
Rejected = list[tuple[str, str]]


def test_a_run_without_checkpoints_starts_anew(question: Question, ask: Ask) -> None:
    """Nothing is given to `train()`, and there is nothing to say."""
    assert ask(question) == Resume(argument=None)


def test_the_newest_of_our_own_is_taken(question: Question, ask: Ask, save: Save) -> None:
    """By step."""
    save(5)
    newest = save(10)
    answer = ask(question)
    assert answer.argument == str(newest)
    assert answer.own is not None
    assert answer.own.manifest.step == 10
    assert not answer.finished


def test_our_own_wins_over_what_the_script_asks(question: Question, ask: Ask, save: Save) -> None:
    """The script's wish is from before there was anything to lose."""
    newest = save(10)
    for wish in ("elsewhere/checkpoint-3", True):
        assert ask(replace(question, script_asks=wish)).argument == str(newest)


def test_a_corrupt_checkpoint_is_rejected_and_an_older_one_taken(
    question: Question, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """With the file that does not match."""
    older = save(5)
    spoil(save(10))
    assert ask(question).argument == str(older)
    assert [name for name, _ in rejected] == ["checkpoint-10"]
    assert "model.safetensors" in rejected[0][1]


def test_when_all_are_corrupt_the_run_starts_anew(
    question: Question, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """Each of them is named."""
    for step in (5, 10):
        spoil(save(step))
    assert ask(question).argument is None
    assert [name for name, _ in rejected] == ["checkpoint-10", "checkpoint-5"]


def test_a_half_written_checkpoint_is_not_taken(
    question: Question, ask: Ask, save: Save, output: Path
) -> None:
    """No manifest, no checkpoint, however new."""
    older = save(5)
    plain(output, 10)
    assert ask(question).argument == str(older)


@pytest.mark.parametrize("other", [{"ordinal": 2}, {"trainer_class": "SFTTrainer"}])
def test_another_calls_checkpoint_is_not_ours(
    question: Question, ask: Ask, save: Save, rejected: Rejected, other: dict[str, Any]
) -> None:
    """A script may train twice into the same directory; nothing is wrong with the other's."""
    save(10, **other)
    assert ask(question) == Resume(argument=None)
    assert rejected == []


def test_another_runs_checkpoints_are_noticed_and_left_alone(
    question: Question, ask: Ask, save: Save
) -> None:
    """It starts anew, and says whose they are and how to go on from them."""
    save(10, run_id="run-0")
    answer = ask(question)
    assert (answer.argument, answer.own) == (None, None)
    assert answer.notice is not None
    assert "run-0" in answer.notice
    assert "--resume-from run-0" in answer.notice


def test_no_notice_when_the_script_itself_asks(question: Question, ask: Ask, save: Save) -> None:
    """It knows what it does."""
    path = save(10, run_id="run-0")
    assert ask(replace(question, script_asks=str(path))) == Resume(argument=str(path), notice=None)


@pytest.mark.parametrize("wish", ["elsewhere/checkpoint-3", True])
def test_what_the_script_asks_is_done_on_the_first_attempt(
    question: Question, ask: Ask, wish: str | bool
) -> None:
    """As without us."""
    assert ask(replace(question, script_asks=wish)) == Resume(argument=wish, as_asked=True)


def test_an_explicit_path_is_asked_for_again_when_there_is_none_of_ours(question: Question, ask: Ask) -> None:
    """A run that fell before its first checkpoint begins where it began."""
    later = replace(question, script_asks="elsewhere/checkpoint-3", first_attempt=False)
    assert ask(later).argument == "elsewhere/checkpoint-3"


def test_later_attempts_do_not_take_our_half_written_directory_for_the_scripts(
    question: Question, ask: Ask, output: Path
) -> None:
    """`resume_from_checkpoint=True` means what was there before this run."""
    meant = plain(output, 3, written_at=STARTED_AT - 1000)
    plain(output, 7, written_at=STARTED_AT + 1000)
    later = replace(question, script_asks=True, first_attempt=False)
    assert ask(later).argument == str(meant)


def test_later_attempts_start_anew_when_there_was_nothing_before(
    question: Question, ask: Ask, output: Path
) -> None:
    """Not with True, which would raise, or take the half-written one."""
    plain(output, 7, written_at=STARTED_AT + 1000)
    assert ask(replace(question, script_asks=True, first_attempt=False)).argument is None


def test_a_finished_call_is_restored(question: Question, ask: Ask, save: Save) -> None:
    """And not trained again."""
    save(10)
    newest = save(20, finished=True)
    answer = ask(question)
    assert (answer.argument, answer.finished) == (str(newest), True)


def test_resuming_from_another_run_takes_its_newest(question: Question, ask: Ask, save: Save) -> None:
    """By its id."""
    save(5, run_id="run-0")
    newest = save(10, run_id="run-0")
    assert ask(replace(question, resume_from="run-0")).argument == str(newest)


def test_our_own_wins_over_resuming_from_elsewhere(question: Question, ask: Ask, save: Save) -> None:
    """After a fault the run goes on from its own, not from where it once began."""
    save(10, run_id="run-0")
    own = save(3)
    assert ask(replace(question, resume_from="run-0")).argument == str(own)


def test_resuming_from_a_corrupt_checkpoint_of_a_run_takes_an_older_one(
    question: Question, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """As for our own."""
    older = save(5, run_id="run-0")
    spoil(save(10, run_id="run-0"))
    assert ask(replace(question, resume_from="run-0")).argument == str(older)
    assert rejected


def test_resuming_from_a_checkpoint_directory_takes_it(
    question: Question, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """One of ours, wherever it lies, and an older one when that is what was named."""
    save(10, folder=tmp_path / "other", run_id="run-0")
    named = save(5, folder=tmp_path / "other", run_id="run-0")
    assert ask(replace(question, resume_from=str(named))).argument == str(named)


def test_resuming_from_a_plain_directory_takes_it(question: Question, ask: Ask, tmp_path: Path) -> None:
    """As transformers wrote it, when it has all its parts; that there are no digests is said."""
    path = plain(tmp_path / "other", 5)
    answer = ask(replace(question, resume_from=str(path)))
    assert (answer.argument, answer.own) == (str(path), None)
    assert "accepted without digests" in (answer.notice or "")
    cut(path)
    with pytest.raises(UsageError, match=r"optimizer\.pt is missing"):
        ask(replace(question, resume_from=str(path)))


def test_resuming_from_a_corrupt_directory_is_refused(
    question: Question, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """The person named it; starting from other weights than theirs, or from these, would both be wrong."""
    path = save(5, folder=tmp_path / "other", run_id="run-0")
    spoil(path)
    with pytest.raises(UsageError, match=r"model\.safetensors"):
        ask(replace(question, resume_from=str(path)))


def test_resuming_from_a_directory_that_is_no_checkpoint_is_refused(
    question: Question, ask: Ask, tmp_path: Path
) -> None:
    """A run directory, say, or an output directory: one line here, not a traceback in the trainer."""
    (tmp_path / "runs").mkdir()
    with pytest.raises(UsageError, match="--resume-from"):
        ask(replace(question, resume_from=str(tmp_path / "runs")))


def test_resuming_from_nothing_is_refused(question: Question, ask: Ask) -> None:
    """A word that is neither a run nor a directory."""
    with pytest.raises(UsageError, match="--resume-from no-such-run"):
        ask(replace(question, resume_from="no-such-run"))


def test_a_later_call_without_a_checkpoint_elsewhere_does_as_the_script_says(
    question: Question, ask: Ask
) -> None:
    """The other run may not have come that far."""
    second = replace(question, resume_from="run-0", call=question.call.model_copy(update={"ordinal": 2}))
    assert ask(second) == Resume(argument=None, as_asked=True)


def test_the_directory_of_a_damaged_manifest_is_refused(question: Question, ask: Ask, save: Save) -> None:
    """It is not taken for one that never had a manifest."""
    path = save(5, run_id="run-0")
    (path / MANIFEST).write_text("{")
    with pytest.raises(UsageError, match="not a manifest"):
        ask(replace(question, resume_from=str(path)))
    with pytest.raises(UsageError, match="not a manifest"):
        ask(replace(question, script_asks=str(path)))


def test_a_damaged_manifest_is_corrupt_and_an_older_one_taken(question: Question, save: Save) -> None:
    """Whose it was cannot be known any more; nobody should load it."""
    older = save(5)
    (save(10) / MANIFEST).write_text("{")
    seen: list[PassedOver] = []
    assert choose(question, seen.append).argument == str(older)
    assert [(one.path.name, one.corrupt, one.ours) for one in seen] == [("checkpoint-10", True, True)]


def test_another_runs_corrupt_checkpoint_is_left_to_its_owner(question: Question, save: Save) -> None:
    """It is passed over, and not ours to move."""
    save(5, run_id="run-0")
    spoil(save(10, run_id="run-0"))
    seen: list[PassedOver] = []
    choose(replace(question, resume_from="run-0"), seen.append)
    assert [(one.corrupt, one.ours) for one in seen] == [(True, False)]


def test_a_disk_that_does_not_answer_proves_nothing(
    question: Question, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one is taken, and the newer one keeps its name."""
    older, newest = save(5), save(10)
    real = manifest.digest

    def digest(path: Path) -> manifest.FileEntry:
        if path.parent == newest:
            raise OSError(116, "Stale file handle")
        return real(path)

    monkeypatch.setattr(manifest, "digest", digest)
    seen: list[PassedOver] = []
    assert choose(question, seen.append).argument == str(older)
    assert [one.corrupt for one in seen] == [False]


def test_other_places_hold_checkpoints_too(question: Question, ask: Ask, save: Save, tmp_path: Path) -> None:
    """The newest of all; at one step the output directory's, unless that is spoiled."""
    memory = tmp_path / "memory"
    both = replace(question, also_in=(memory,))
    here, there = save(5), save(5, folder=memory)
    assert ask(both).argument == str(here)
    newest = save(10, folder=memory)
    assert ask(both).argument == str(newest)
    spoil(newest)
    spoil(here)
    assert ask(both).argument == str(there)


def test_true_takes_the_newest_complete_one(
    question: Question, ask: Ask, output: Path, rejected: Rejected
) -> None:
    """Transformers would take the highest number and train on without an optimizer."""
    whole = plain(output, 6)
    cut(plain(output, 9))
    answer = ask(replace(question, script_asks=True))
    assert answer.argument == str(whole)
    assert "checkpoint-9 is not complete: optimizer.pt is missing" in (answer.notice or "")
    assert "checkpoint-6 is used instead" in (answer.notice or "")
    assert "accepted without digests" in (answer.notice or "")
    assert rejected == [("checkpoint-9", "optimizer.pt is missing")]
    assert (output / "checkpoint-9").is_dir()


def test_what_get_last_checkpoint_gave_the_script_is_no_better(
    question: Question, ask: Ask, output: Path
) -> None:
    """A directory of the output directory means the newest up to there."""
    oldest, middle, newest = plain(output, 3), plain(output, 6), plain(output, 9)
    cut(middle)
    assert ask(replace(question, script_asks=str(newest))).argument == str(newest)
    assert ask(replace(question, script_asks=str(middle))).argument == str(oldest)


def test_when_none_is_complete_that_is_said(question: Question, ask: Ask, output: Path) -> None:
    """Neither a damaged one nor, in silence, none."""
    cut(plain(output, 9))
    with pytest.raises(UsageError, match=r"none of 1 checkpoints.*optimizer\.pt is missing"):
        ask(replace(question, script_asks=True))


def test_a_checkpoint_named_elsewhere_is_used_whole_or_not_at_all(
    question: Question, ask: Ask, tmp_path: Path
) -> None:
    """The script named it: no other is put in its place."""
    path = plain(tmp_path / "other", 5)
    answer = ask(replace(question, script_asks=str(path)))
    assert (answer.argument, answer.as_asked) == (str(path), True)
    cut(path)
    with pytest.raises(UsageError, match="from_pretrained"):
        ask(replace(question, script_asks=str(path)))


def test_another_runs_corrupt_checkpoint_is_not_given_to_the_script(
    question: Question, ask: Ask, save: Save
) -> None:
    """By its digests; the older one of that run is."""
    older = save(5, run_id="run-0")
    spoil(save(10, run_id="run-0"))
    assert ask(replace(question, script_asks=True)).argument == str(older)


BATCH = {
    "per_device_train_batch_size": 4,
    "gradient_accumulation_steps": 1,
    "global_batch": 8,
    "layout": "ddp",
}
ONE = {"world_size": 1, "batch": Batch(ranks=1, per_device=8, accumulation=1)}


def test_fewer_ranks_go_on_with_the_same_batch(question: Question, ask: Ask, save: Save) -> None:
    """And what is not kept is said."""
    path = save(10, **BATCH)
    answer = ask(replace(question, **ONE))
    assert answer.argument == str(path)
    assert "random numbers" in (answer.notice or "")


def test_another_batch_is_refused_with_what_fits(question: Question, ask: Ask, save: Save) -> None:
    """Before anything is loaded, and never by starting anew."""
    save(10, **BATCH)
    smaller = replace(question, world_size=1, batch=Batch(ranks=1, per_device=4, accumulation=1))
    with pytest.raises(
        UsageError, match="set per_device_train_batch_size=8 or gradient_accumulation_steps=2"
    ):
        ask(smaller)
    save(20)
    with pytest.raises(UsageError, match="does not say with what batch: start 2 ranks"):
        ask(smaller)


def test_cut_state_is_refused(question: Question, ask: Ask, save: Save) -> None:
    """With the number of ranks that fits."""
    save(10, **(BATCH | {"layout": "deepspeed-zero3"}))
    with pytest.raises(UsageError, match=r"deepspeed-zero3 .* start 2 ranks"):
        ask(replace(question, **ONE))


def test_within_a_rollout_the_next_older_boundary_is_taken(
    question: Question, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """What was passed over and why is said; with none left, the ranks that fit are."""
    boundary = save(5, **BATCH)
    save(10, **BATCH)

    def can_reshape(folder: Path, ranks: int) -> str | None:
        return "it lies within a rollout of 2 ranks" if folder.name == "checkpoint-10" else None

    answer = ask(replace(question, **ONE), can_reshape)
    assert answer.argument == str(boundary)
    assert rejected == [("checkpoint-10", "it lies within a rollout of 2 ranks")]
    with pytest.raises(UsageError, match="within a rollout; start 2 ranks"):
        ask(replace(question, **ONE), lambda folder, ranks: "it lies within a rollout")


SHAPES = (("weight", (4, 2), "float32"),)


def test_another_model_is_refused_before_it_is_loaded(question: Question, ask: Ask, save: Save) -> None:
    """With what differs; the same one is not."""
    path = save(10, model_shape=model_shape(SHAPES))
    assert ask(replace(question, parameters=SHAPES)).argument == str(path)
    other = (("weight", (4, 3), "float32"),)
    for where in (
        {},
        {"run_id": "run-9", "resume_from": "run-1"},
        {"run_id": "run-9", "resume_from": str(path)},
    ):
        with pytest.raises(UsageError, match=r"weight is \[4, 2\] there and \[4, 3\] here"):
            ask(replace(question, parameters=other, **where))


def test_the_choice_travels_to_the_other_ranks(
    question: Question, ask: Ask, save: Save, tmp_path: Path
) -> None:
    """All of it; a rank that cannot see the checkpoint says so."""
    save(10, finished=True)
    for answer in (ask(question), ask(replace(question, run_id="run-9")), Resume(argument=None)):
        assert Resume.from_text(answer.to_text(), script_asks=None) == answer
    theirs = Resume.from_text(Resume(argument="a", as_asked=True).to_text(), script_asks="b")
    assert theirs.argument == "b"
    text = ask(question).to_text()
    publishing.reject(Path(ask(question).argument), "gone")  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        Resume.from_text(text, script_asks=None)
    with pytest.raises(CheckpointError):
        Resume.from_text(Resume(argument=str(tmp_path / "none")).to_text(), script_asks=None)
