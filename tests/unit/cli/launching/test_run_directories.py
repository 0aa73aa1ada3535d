"""The same command finds its run again, and no command takes the directory of another run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.builders.refused_commands import error
from support.journal import event

from grpo_run.cli.launching.command import parse
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory


def finished(path: Path, *words: str, code: int = 0) -> None:
    """Record that the run of this command has ended in `path`."""
    run = RunDirectory(path=path)
    run.create()
    run.write_run(parse([*words, "train.py"]).config.as_json())
    journal = Journal(run.journal, path.name)
    journal.write(event("run_started"))
    journal.write(event("run_ended", exit_code=code, sentence=""))


def where(*words: str) -> Path:
    """The run directory of this command."""
    return parse([*words, "train.py"]).config.run_directory


def test_the_same_command_uses_the_same_directory(here: Path) -> None:
    """Finished or not."""
    first = where()
    finished(here / first)
    assert where() == first


@pytest.mark.parametrize("words", [[], ["--run-id", "exp"]])
def test_fresh_starts_the_next_run_of_the_series(here: Path, words: list[str]) -> None:
    """Finished or not; the plain command then finds the newest."""
    first = where(*words)
    finished(here / first, *words)
    second = where("--fresh", *words)
    assert second.name == f"{first.name}-2"
    finished(here / second, *words, code=75)
    assert where(*words) == second
    assert where("--fresh", *words).name == f"{first.name}-3"


@pytest.mark.parametrize("option", ["--run-dir", "--run-id"])
def test_the_directory_of_another_command_is_refused(here: Path, option: str) -> None:
    """Another script, or other arguments; the message shows the recorded command."""
    finished(here / ("mine" if option == "--run-dir" else "runs/mine"), option, "mine")
    for words in (["train.py", "--lr", "2"], ["-m", "json.tool"]):
        assert f"another command (train.py); give another {option}" in error(option, "mine", *words)
    assert parse([option, "mine", "train.py"]).config.run_id == (
        "mine" if option == "--run-id" else where().name
    )


def test_fresh_does_not_leave_a_live_run(here: Path) -> None:
    """Two runs would write into one output directory."""
    finished(here / where(), code=75)
    lock = RunDirectory(path=where()).acquire()
    try:
        assert "is running (pid" in error("--fresh", "train.py")
    finally:
        os.close(lock)


def test_a_run_id_names_that_run_only(here: Path) -> None:
    """`exp-2` may be another run, not a continuation of `exp`."""
    finished(here / "runs" / "exp", "--run-id", "exp")
    finished(here / "runs" / "exp-2", "--run-id", "exp-2", code=75)
    assert where("--run-id", "exp") == Path("runs/exp").resolve()
    assert where("--run-id", "exp", "--fresh") == Path("runs/exp-3").resolve()


def test_fresh_with_the_directory_of_a_run_is_refused(here: Path) -> None:
    """The directory is given, so there is no next one to use."""
    finished(here / "mine")
    assert "--run-dir" in error("--fresh", "--run-dir", "mine", "train.py")


@pytest.mark.usefixtures("here")
def test_fresh_in_a_directory_of_the_users_choice_is_a_run_with_an_id_of_its_own() -> None:
    """Checkpoints in the output directory belong to the id; the plain command then finds it by the
    directory.
    """
    usual = parse(["train.py"]).config
    first, second = (parse(["--fresh", "--run-dir", name, "train.py"]).config for name in ("a", "b"))
    assert len({usual.run_id, first.run_id, second.run_id}) == 3
    assert first.series == second.series == usual.run_id
    run = RunDirectory(path=first.run_directory)
    run.create()
    run.write_run(first.as_json())
    assert parse(["--run-dir", "a", "train.py"]).config.run_id == first.run_id


@pytest.mark.usefixtures("here")
def test_fresh_nodes_in_directories_of_their_own_need_an_id_that_all_of_them_have() -> None:
    """They have not met, so none can choose it."""
    words = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "--fresh"]
    assert "the same on every node" in error(*words, "--run-dir", "node-0", "train.py")
    ids = {
        parse([*words, "--run-dir", name, "--run-id", "again", "train.py"]).config.run_id
        for name in ("a", "b")
    }
    assert ids == {"again"}


@pytest.mark.parametrize(
    "words", [[], ["--run-dir", "mine"], ["--run-dir", "mine", "--run-id", "exp"], ["--run-id", "exp"]]
)
def test_a_run_that_starts_over_has_a_directory_and_an_id_of_its_own(here: Path, words: list[str]) -> None:
    """Each time anew. The plain command then finds the newest, and knows how often."""
    ids, directories = set(), set()
    for number in range(3):
        config = parse([*words, "train.py"], starts_over=number).config
        assert config.starts_over == number
        run = RunDirectory(path=config.run_directory)
        assert not run.run_json.is_file()
        run.create()
        run.write_run(config.as_json())
        ids.add(config.run_id)
        directories.add(config.run_directory)
        found = parse([*words, "train.py"]).config
        assert (found.run_id, found.run_directory, found.starts_over) == (
            config.run_id, config.run_directory, number,
        )  # fmt: skip
    assert len(ids) == len(directories) == 3


@pytest.mark.usefixtures("here")
def test_how_often_a_run_starts_over_is_bounded() -> None:
    """By the restart budget, and only if the user wants it."""
    fresh = ["--on-resume-failure", "fresh"]
    assert not parse(["train.py"]).config.may_start_over
    assert parse([*fresh, "train.py"]).config.may_start_over
    assert parse([*fresh, "--max-restarts", "2", "train.py"], starts_over=1).config.may_start_over
    assert not parse([*fresh, "--max-restarts", "2", "train.py"], starts_over=2).config.may_start_over
    assert "one node only" in error(
        *fresh, "--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:29400", "train.py"
    )
