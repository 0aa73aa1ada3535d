"""Which words of a command make it another run, and which do not."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.cli.launching.options import build_parser
from grpo_run.runtime.launching._identity import identifying_words
from grpo_run.runtime.launching.request import RunRequest


def identity(words: list[str]) -> list[str]:
    """The words that identify the run of this command."""
    options = build_parser().parse_args(words)
    return identifying_words(
        RunRequest(
            target=options.training_script,
            module=options.module,
            arguments=tuple(options.training_script_args),
        )
    )


def test_no_option_of_ours_or_torchruns_makes_another_run() -> None:
    """A run that is continued with another time limit finds its checkpoints."""
    for action in build_parser()._actions:
        for name in set(action.option_strings) - {"-h", "--help", "-m", "--module"}:
            value = [] if action.nargs == 0 else [next(iter(action.choices or ["1"]))]
            extra = [name, *value]
            assert identity([*extra, "train.py", "--lr", "1"]) == identity(["train.py", "--lr", "1"]), name
            assert identity([*extra, "-m", "jobs.train", "x"]) == ["-m", "jobs.train", "x"], name


@pytest.mark.usefixtures("here")
def test_a_script_is_recognized_by_its_file() -> None:
    """Other spellings of its path and links to it are the same script; another script or a module is not."""
    Path("link.py").symlink_to("train.py")
    same = [["train.py"], ["./train.py"], [str(Path("train.py").resolve())], ["link.py"], ["--", "train.py"]]
    assert [identity(words) for words in same] == [["train.py"]] * len(same)
    assert identity(["other.py"]) != identity(["train.py"]) != identity(["-m", "train"])
    assert identity(identity(["-m", "train", "x"])) == ["-m", "train", "x"]


@pytest.mark.parametrize("own", [["--fresh"], ["--run-dir", "a"], ["--node-rank=3"], ["--metrics-addr", "x"]])
def test_script_arguments_make_another_run(own: list[str]) -> None:
    """This includes arguments that look like options of the display."""
    assert identity(["train.py", *own]) != identity(["train.py"])
    assert identity(["train.py", "--run-dir", "a"]) != identity(["train.py", "--run-dir", "b"])
