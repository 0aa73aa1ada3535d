"""What `grpo-run replay` says of a run, and what it passes on of its command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_run.cli.replay import made_by_run, redirected, what_is_there


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
