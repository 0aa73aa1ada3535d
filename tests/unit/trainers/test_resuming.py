"""From which checkpoint a `train()` call starts."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime import checkpoints
from grpo_run.runtime.checkpoints import FoundCheckpoint, TrainCall
from grpo_run.runtime.errors import UsageError
from grpo_run.trainers.resuming import Question, Resume, choose

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
        call = TrainCall(
            ordinal=changes.pop("ordinal", 1),
            trainer_class=changes.pop("trainer_class", "GRPOTrainer"),
            output_dir=str(folder),
        )
        fields: dict[str, Any] = {"run_id": "run-1", "train_call": call, "step": step, "world_size": 2}
        checkpoints.write_manifest(path, versions={}, **(fields | changes))
        if finished:
            checkpoints.mark_finished(path)
        return path

    return make


def plain(folder: Path, step: int, *, written_at: float | None = None) -> Path:
    """A checkpoint as transformers writes it, without a manifest."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    if written_at is not None:
        os.utime(path, (written_at, written_at))
    return path


def spoil(path: Path) -> None:
    """One byte of the weights is another."""
    (path / "model.safetensors").write_bytes(b"weightz")


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
def ask(rejected: list[tuple[str, str]]) -> Callable[[Question], Resume]:
    """Chooses, taking down what is rejected."""

    def note(found: FoundCheckpoint, why: str) -> None:
        rejected.append((found.path.name, why))

    return lambda question: choose(question, note)


Ask = Callable[[Question], Resume]
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


def test_another_world_size_is_rejected(question: Question, ask: Ask, save: Save, rejected: Rejected) -> None:
    """With both numbers."""
    save(10, world_size=4)
    assert ask(question).argument is None
    assert rejected == [("checkpoint-10", "written by 4 ranks, this run has 2")]


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
    assert ask(replace(question, script_asks=str(path))) == Resume(argument=str(path))


@pytest.mark.parametrize("wish", ["elsewhere/checkpoint-3", True])
def test_what_the_script_asks_is_done_on_the_first_attempt(
    question: Question, ask: Ask, wish: str | bool
) -> None:
    """As without us."""
    assert ask(replace(question, script_asks=wish)) == Resume(argument=wish)


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


def test_other_ranks_follow_the_step_that_was_chosen(
    question: Question, ask: Ask, save: Save, rejected: Rejected
) -> None:
    """Without reading every byte again: rank 0 has verified it."""
    older = save(5)
    spoil(save(10))
    assert ask(replace(question, only_step=5)).argument == str(older)
    assert rejected == []


def test_other_ranks_take_none_when_rank_0_took_none(question: Question, ask: Ask, save: Save) -> None:
    """Whatever they see."""
    save(5)
    assert ask(replace(question, only_step=-1)).own is None


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
    """As transformers wrote it."""
    path = plain(tmp_path / "other", 5)
    assert ask(replace(question, resume_from=str(path))) == Resume(argument=str(path))


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
    assert ask(second) == Resume(argument=None)
