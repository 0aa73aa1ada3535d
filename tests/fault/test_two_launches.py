"""Two launches into one output directory: one trains, the other is refused and harms nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import SCRIPTS, Run, Runs

SCRIPT = str(SCRIPTS / "sft.py")
LAST_STEP = 12
STEPS = ("--max-steps", str(LAST_STEP), "--save-steps", "2", "--save-total-limit", "1")
WORDS = (SCRIPT, "--output-dir", "out", *STEPS)


def check_refused(first: Run, second: Run) -> None:
    """The refusal names the live run, and leaves nothing of the launch."""
    second.ended(2)
    said = second.printed()
    assert f"is live in {first.directory} (pid {first.process.pid}, at step " in said
    assert f"grpo-run stop {first.directory}" in said
    assert "--fresh" not in said
    assert not second.directory.exists()


def test_a_second_launch_is_refused_whatever_its_options(runs: Runs, tmp_path: Path) -> None:
    """The same command, another argument, `--fresh`, `--resume-from`, and through a link. The first run keeps
    its checkpoints, and a launch into another directory is free.
    """
    (tmp_path / "link").symlink_to("out")
    first = runs(*WORDS, name="first")
    with first.held(after=3):
        first.start().until_event("checkpoint_published")
        others = {
            "same": WORDS,
            "other": (*WORDS, "--learning-rate", "0.5"),
            "fresh": ("--fresh", *WORDS, "--seed", "4"),
            "resumed": ("--resume-from", "out/checkpoint-2", *WORDS, "--seed", "5"),
            "linked": (SCRIPT, "--output-dir", "link", *STEPS),
        }
        seconds = [runs(*words, name=name).start() for name, words in others.items()]
        for second in seconds:
            check_refused(first, second)
        elsewhere = runs(SCRIPT, "--output-dir", "elsewhere", *STEPS, name="elsewhere").start()
        elsewhere.until_step(3)
    first.ended()
    elsewhere.ended()
    assert first.status()["recoveries"] == []
    assert (tmp_path / "out" / f"checkpoint-{LAST_STEP}" / "MANIFEST.json").is_file()
    assert not list((tmp_path / "out").glob("replaced-*"))


@pytest.mark.parametrize(
    "second_words",
    [
        pytest.param(WORDS, id="same"),
        pytest.param((*WORDS, "--seed", "4"), id="other", marks=pytest.mark.full),
    ],
)
def test_of_two_launches_in_one_moment_one_trains(runs: Runs, second_words: tuple[str, ...]) -> None:
    """Either of them. When it has been killed, the other takes the directory over."""
    both = [runs(*words, name=name) for name, words in (("first", WORDS), ("second", second_words))]
    with both[0].held(after=3):
        for one in both:
            one.start()
        codes = {}
        while not codes:
            for one in both:
                if (code := one.process.poll()) is not None:
                    codes[one.directory.name] = code
        (winner,) = [one for one in both if one.directory.name not in codes]
        (loser,) = [one for one in both if one is not winner]
        winner.until_step(3)
        check_refused(winner, loser)
        winner.process.kill()
        winner.wait()
    again = runs("--fresh", *second_words, name="third").start().ended()
    assert f"Finished at step {LAST_STEP}" in again.printed()
