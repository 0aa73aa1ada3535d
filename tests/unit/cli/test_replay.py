"""What `grpo-run replay` says of a run, and what it passes on of its command."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_run.cli.replay import redirected, what_is_there


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
    ("word", "expected"),
    [
        ("out", "own"), ("./out/", "own"), ("--output_dir=out", "--output_dir=own"), ("out2", "out2"),
        ("--steps=4", "--steps=4"), ("--a=b=out", "--a=b=own"), ("", ""), ("--x=", "--x="),
        ("\0out", "\0out"),
    ],
)  # fmt: skip
def test_only_the_output_directory_is_redirected(
    word: str, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However the script's argument spells it."""
    monkeypatch.chdir(tmp_path)
    assert redirected(word, [os.path.realpath("out")], Path("own")) == expected
