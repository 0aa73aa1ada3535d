"""What `grpo-run replay` says of a run, and what it passes on of its command."""

from __future__ import annotations

import os
import re
from argparse import ArgumentTypeError
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_run.cli.replay import (
    changes_from,
    check_numbers,
    made_by_run,
    redirected,
    reward_file,
    sample_numbers,
    what_is_there,
)
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.step_comparison import CallRecords
from grpo_run.runtime.history.step_records import StepRecord


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "no checkpoint before a step of this run is left; launch with --keep-every STEPS"),
        ((12,), "no checkpoint before a step of this run is left"),
        ((8, 4), "steps 5 to 12 can be replayed, from the checkpoints of steps 4, 8; launch with"),
        (range(11), "from the checkpoints of steps 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10;"),
        (range(-9, 12), ", …;"),
    ],
)
def test_the_steps_that_can_be_replayed_are_named(steps: Sequence[int], said: str) -> None:
    """And how to keep more."""
    assert said in what_is_there(steps, reached=12)


@pytest.mark.parametrize(
    ("word", "redirects"),
    [
        ("out", True), ("./out/", True), ("--output_dir=out", True), ("out2", False), ("--steps=4", False),
        ("--a=b=out", True), ("", False), ("--x=", False), ("\0out", False),
    ],
)  # fmt: skip
def test_only_the_output_directory_is_redirected(
    word: str, redirects: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the script's argument spells it."""
    monkeypatch.chdir(tmp_path)
    out = Path(os.path.realpath("out"))
    name, sign, _ = word.rpartition("=")
    expected = f"{name}{sign}/own{out}" if redirects else word
    assert redirected(word, [out], Path("/own")) == expected


def test_folders_around_outputs_are_the_runs_if_nothing_in_them_is_older(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with data that the script reads is not redirected, nor is the working directory."""
    monkeypatch.chdir(tmp_path)
    for path in ("mine/sft", "mine/grpo", "data/run/out"):
        (tmp_path / path).mkdir(parents=True)
    (tmp_path / "data" / "prompts").touch()
    os.utime(tmp_path / "data" / "prompts", (1000, 1000))
    found = made_by_run(["mine/sft", "mine/grpo", "data/run/out"], began=2000.0)
    expected = ("mine/sft", "mine/grpo", "data/run/out", "mine", "data/run")
    assert set(found) == {tmp_path.resolve() / path for path in expected}


def test_samples_that_a_step_does_not_have_are_refused() -> None:
    """Unless nothing is known of the step before it is replayed."""
    assert sample_numbers("3,5") == (3, 5)
    check_numbers((3, 5), range(6), 7)
    check_numbers((99,), (), 7)
    with pytest.raises(UsageError, match="--drop-sample 6: the samples of step 7 are 0 to 5"):
        check_numbers((3, 6), range(6), 7)
    with pytest.raises(ArgumentTypeError, match="'3;5' is not a list of numbers"):
        sample_numbers("3;5")


def test_a_step_without_samples_cannot_be_changed() -> None:
    """As of supervised training; where nothing is recorded, the step itself may have some."""
    record = StepRecord(train_call=1, step=7)
    with pytest.raises(UsageError, match="step 7 trains on no samples with rewards"):
        changes_from(CallRecords(ranks={0: {7: record}}, logged={}), 7)
    assert changes_from(CallRecords(ranks={}, logged={}), 7) == 7


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def judge(**given): ...", ""), ("from json import loads as judge", ""), ("def (", "invalid syntax"),
        ("other = 1", "defines no reward function of the run (judge, length)"), (None, "No such file"),
    ],
)  # fmt: skip
def test_a_file_without_a_reward_function_of_the_run_is_refused(
    text: str | None, said: str, tmp_path: Path
) -> None:
    """Before anything is launched."""
    file = tmp_path / "rewards.py"
    if text is not None:
        file.write_text(text)
    if said:
        with pytest.raises(UsageError, match=re.escape(said)):
            reward_file(str(file), {"judge", "length"})
    else:
        assert reward_file(str(file), {"judge", "length"}) == str(file)
