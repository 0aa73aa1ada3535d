"""The command prints the sums, exports the lines, and says in one line what it cannot do."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.features.ledger import command, report
from grpo_run.runtime.features.ledger._lines import append, ledger_file, pack
from grpo_run.runtime.history.events import StepCommitted, TrainStarted
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory

HISTORY = History.of(
    [
        TrainStarted(rank=0, step=0, train_call=1, trainer_class="GRPOTrainer"),
        StepCommitted(step=1, train_call=1),
    ]
)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """A run of two ranks with one prompt, whose second file is elsewhere."""
    file = ledger_file(tmp_path, 0)
    file.parent.mkdir()
    for line in (["B", 1, 0, 0, 2, 2, 1], ["R", 0, 0, 1, "aaaaaaaa", pack([3, 4])], ["S", 1, 0, 1]):
        append(file, *line)
    return RunDirectory(path=tmp_path)


def options(*words: str) -> argparse.Namespace:
    """Parse the options of the command."""
    parser = argparse.ArgumentParser()
    command.add_options(parser)
    return parser.parse_args(words)


def test_the_sums_are_printed(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """With what the files lack."""
    assert command.run(run, HISTORY, options()) == 0
    printed = capsys.readouterr().out
    assert "2 prompts: 2 trained once, 0 lost." in printed
    assert "The files of 1 rank are not here" in printed
    assert command.run(run, HISTORY, options("--json")) == 0
    assert json.loads(capsys.readouterr().out)["prompts"]["trained"] == 2


def test_lines_are_exported(run: RunDirectory, tmp_path: Path) -> None:
    """One for each prompt, in the order of the data."""
    file = tmp_path / "lines.jsonl"
    command.run(run, HISTORY, options("--output", str(file)))
    first, second = map(json.loads, file.read_text().splitlines())
    assert (first["prompt"], first["lengths"], first["state"]) == ("aaaaaaaa", [3, 4], "trained")
    assert (second["prompt"], second["position"]) == ("", 1)


def test_a_run_without_a_ledger_is_one_line(tmp_path: Path) -> None:
    """Such as one of a loop."""
    with pytest.raises(RunDirectoryError, match="has no ledger"):
        command.run(RunDirectory(path=tmp_path), HISTORY, options())


def test_a_host_without_rank_0_says_where_the_ledger_is(run: RunDirectory) -> None:
    """Its ranks have written what they have generated, and no steps."""
    ledger_file(run.path, 0).rename(ledger_file(run.path, 1))
    with pytest.raises(RunDirectoryError, match="host of rank 0"):
        command.run(run, HISTORY, options())
    assert "host of rank 0" in "".join(report.lines(run, HISTORY))


def test_steps_that_are_not_here_are_named(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 was on another host for some steps, or the call goes on from another run."""
    for line in (["B", 1, 2, 5, 2, 2, 1], ["R", 5, 0, 6, "bbbbbbbb", pack([3, 4])], ["S", 6, 5, 6]):
        append(ledger_file(run.path, 0), *line)
    command.run(run, HISTORY, options())
    assert "Steps 2 to 5 of call 1 are not in the file of rank 0" in capsys.readouterr().out


def test_another_kind_of_file_is_refused(run: RunDirectory) -> None:
    """Before anything is read."""
    with pytest.raises(UsageError, match=r"must end in \.jsonl or \.parquet"):
        command.run(run, HISTORY, options("--output", "x.csv"))
