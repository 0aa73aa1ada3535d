"""`grpo-run status`: the verdict first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.record.journal import Journal
from grpo_run.runtime.record.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """A run that gave up in step 8."""
    directory = RunDirectory(path=here / "runs" / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    journal = Journal(directory.journal, "night")
    journal.write("run_started")
    journal.attempt = 0
    journal.write("attempt_started")
    journal.write("train_started", rank=0, step=0, train_call=1, target_steps=10)
    journal.write("step_committed", step=7, train_call=1)
    journal.write(
        "incident", step=7, cause="signal", culprit=1, signature="s", incident="incidents/0001-signal"
    )
    journal.write("action", action="stop")
    journal.close()
    return directory


def end(run: RunDirectory, sentence: str) -> None:
    """It gave up, with these words."""
    journal = Journal(run.journal, "night")
    journal.write("run_ended", exit_code=93, sentence=sentence)
    journal.close()


def test_the_verdict_comes_first(run: RunDirectory, capsys: Captured) -> None:
    """In the first line, then the facts."""
    end(run, "Rank 1 was killed by SIGKILL in step 8.")
    assert main(["status", "night"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].strip() == "Rank 1 was killed by SIGKILL in step 8."
    assert "7 of 10" in "\n".join(lines[1:])


def test_a_long_verdict_is_one_line(run: RunDirectory, capsys: Captured) -> None:
    """In a file or a pipe nothing is folded: a script may take the first line."""
    sentence = "Rank 1 raised ValueError in step 8 (phase reward): " + "a long story " * 12 + "ends."
    end(run, sentence)
    main(["status", "night"])
    assert capsys.readouterr().out.splitlines()[0].strip() == sentence


@pytest.mark.parametrize("words", ["unbalanced [/INST] in the answer", "KeyError: [rank1] [bold]x[/bold]"])
def test_brackets_in_a_verdict_are_text(run: RunDirectory, capsys: Captured, words: str) -> None:
    """Chat templates and tensors are full of them; nothing is swallowed, nothing raises."""
    end(run, words)
    assert main(["status", "night"]) == 0
    assert capsys.readouterr().out.splitlines()[0].strip() == words


def test_the_object_is_json_and_nothing_else(run: RunDirectory, capsys: Captured) -> None:
    """For programs."""
    end(run, "Gave up.")
    assert main(["status", "--json"]) == 0
    shown = capsys.readouterr()
    value = json.loads(shown.out)
    assert (value["run_id"], value["step"], value["exit_code"], value["sentence"]) == (
        "night",
        7,
        93,
        "Gave up.",
    )
    assert shown.err == ""


def test_a_vanished_supervisor_is_unknown(run: RunDirectory, capsys: Captured) -> None:
    """Not running, whatever the journal's last line says."""
    main(["status", "--json"])
    assert json.loads(capsys.readouterr().out)["state"] == "unknown"
    main(["status"])
    assert capsys.readouterr().out.startswith("Unknown")


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("words", [[], ["no-such-run"], ["--json"]])
def test_no_run_is_one_line_and_2(capsys: Captured, words: list[str]) -> None:
    """Nothing on standard output."""
    assert main(["status", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("grpo-run: ")
    assert shown.err.count("\n") == 1
