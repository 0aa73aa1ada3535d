"""Which run a command is about: one rule for all of them."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from grpo_run.cli.main import main
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.registry import register, registry_folder

Captured = pytest.CaptureFixture[str]
COMMANDS = (
    ["status"], ["logs"], ["report", "--format", "md"], ["stop"], ["save"], ["trace"], ["ledger"],
    ["checkpoints", "list"], ["resume", "--dry-run"],
)  # fmt: skip


def make(path: Path) -> RunDirectory:
    """A run that has not trained."""
    run = RunDirectory(path=path)
    run.create()
    run.write_run({"run_id": path.name, "working_directory": str(path), "typed": ["train.py"]})
    return run


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_lists_the_active_runs(here: Path, command: list[str], capsys: Captured) -> None:
    """With exit code 2."""
    with ExitStack() as held:
        for name in ("one", "two"):
            held.enter_context(make(here / "runs" / name).locked())
        assert main(command) == 2
    said = capsys.readouterr().err
    assert said.startswith("grpo-run: 2 runs are active; name one of ")
    assert "runs/one" in said
    assert "runs/two" in said


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_a_name_may_be_shortened_to_what_is_unique(here: Path, command: list[str], capsys: Captured) -> None:
    """Else those that it begins are listed. A whole id comes first."""
    for name in ("train-1a", "train-1b", "train", "other"):
        make(here / "runs" / name)
    assert main([*command, "train-1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("grpo-run: train-1 begins the ids of 2 runs; name one of ")
    for name in ("oth", "train", "train-1a"):
        main([*command, name])
        assert "is not a run directory" not in (said := capsys.readouterr().err), said
        assert "begins the ids" not in said
    assert main([*command, "thing"]) == 2


def test_where_there_are_no_runs_the_active_one_is_meant(
    here: Path, tmp_path: Path, capsys: Captured
) -> None:
    """It was launched in another directory, which the registry knows."""
    away = make(tmp_path / "elsewhere" / "far")
    register(away.path, registry_folder())
    assert main(["status"]) == 2
    with away.locked():
        assert main(["status"]) == 0
        assert "far" in capsys.readouterr().out
        make(here / "runs" / "near")  # from here on, what is here is meant
        assert main(["status"]) == 0
        assert "near" in capsys.readouterr().out
