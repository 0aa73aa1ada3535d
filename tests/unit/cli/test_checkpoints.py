"""`grpo-run checkpoints`: list, verify, prune."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support import checkpoint_files as made
from support.identities import identity
from support.journal import event

from grpo_run.cli.main import main
from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.checkpoints.publishing import partial_directory, reject_checkpoint
from grpo_run.runtime.checkpoints.search import find_checkpoints
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory

Captured = pytest.CaptureFixture[str]


@pytest.fixture
def out(here: Path) -> Path:
    """An output directory with four checkpoints of one run, in the working directory."""
    for step in (10, 20, 30, 40):
        publish(here / "out", step)
    return here / "out"


def publish(folder: Path, step: int, run_id: str = "night") -> Path:
    """Publish a checkpoint of two ranks."""
    path = made.plain(folder, step)
    write_manifest(path, identity(folder, step, run_id=run_id, world_size=2))
    return path


def flip(path: Path) -> None:
    """Flip one bit of the weights."""
    file = path / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def as_json(capsys: Captured, *words: str) -> tuple[int, dict[str, Any]]:
    """Run a command; return its exit code and its JSON object."""
    code = main(["checkpoints", *words, "--json"])
    value: dict[str, Any] = json.loads(capsys.readouterr().out)
    return code, value


def test_list_prints_one_line_per_checkpoint(out: Path, capsys: Captured) -> None:
    """The newest comes first; a line has name, step, ranks, run and state."""
    made.plain(out, 50)
    assert main(["checkpoints", "list", "out"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[2:]] == [f"checkpoint-{step}" for step in (50, 40, 30, 20, 10)]
    assert "complete" in lines[2]
    assert {"40", "2", "yes", "night", "published"} <= set(lines[3].split())


def test_json_output_has_every_field(out: Path, capsys: Captured) -> None:
    """Standard output holds one JSON object and nothing else."""
    code, value = as_json(capsys, "list", "out")
    assert code == 0
    assert [one["step"] for one in value["checkpoints"]] == [40, 30, 20, 10]
    assert {"path", "step", "state", "when", "size_bytes", "ranks", "scheduled", "run", "verified"} <= set(
        value["checkpoints"][0]
    )


def test_a_run_may_be_named_by_id_or_directory(out: Path, run: RunDirectory, capsys: Captured) -> None:
    """Without a name, the newest run is used; its journal lists its checkpoints."""
    assert main(["checkpoints"]) == 2
    capsys.readouterr()
    assert main(["checkpoints", "list", "night"]) == 2
    assert "published no checkpoint" in capsys.readouterr().err
    journal = Journal(run.journal, "night")
    journal.write(
        event("train_started", rank=0, train_call=1, trainer_class="GRPOTrainer", output_dir=str(out))
    )
    journal.write(event("checkpoint_published", step=40, path=str(out / "checkpoint-40")))
    for words in (["night"], ["runs/night"], []):
        code, value = as_json(capsys, "list", *words)
        assert (code, len(value["checkpoints"])) == (0, 4)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    "words", [["list", "nowhere"], ["list"], ["verify", "."], ["prune", "out", "--keep", "0"]]
)
def test_a_target_without_checkpoints_is_refused(capsys: Captured, words: list[str]) -> None:
    """One line on standard error, nothing on standard output, exit code 2."""
    os.mkdir("out")
    assert main(["checkpoints", *words]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.count("\n") == 1


def test_verify_exits_with_0_if_all_are_good(out: Path, capsys: Captured) -> None:
    """For one checkpoint or a directory; renamed directories are not verified."""
    reject_checkpoint(made.plain(out, 60), "bad")
    assert main(["checkpoints", "verify", "out"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "4 of 4 good"
    assert main(["checkpoints", "verify", "out/checkpoint-20"]) == 0
    assert "verified" in capsys.readouterr().out


def test_verify_names_a_file_with_a_flipped_bit(out: Path, capsys: Captured) -> None:
    """Exit code 1; the other checkpoints are verified too."""
    flip(out / "checkpoint-30")
    assert main(["checkpoints", "verify", "out"]) == 1
    shown = capsys.readouterr().out
    (line,) = [line for line in shown.splitlines() if "damaged" in line]
    assert "checkpoint-30/model.safetensors does not match its digest" in line
    assert "3 of 4 good" in shown
    code, value = as_json(capsys, "verify", "out")
    assert (code, value["bad"]) == (1, 1)


def test_verify_names_the_missing_files_of_an_incomplete_checkpoint(out: Path, capsys: Captured) -> None:
    """Exit code 1."""
    (made.plain(out, 50) / "scheduler.pt").unlink()
    assert main(["checkpoints", "verify", "out"]) == 1
    assert "scheduler.pt is missing" in capsys.readouterr().out


def test_prune_without_yes_deletes_nothing(out: Path, capsys: Captured) -> None:
    """It prints what it would delete."""
    assert main(["checkpoints", "prune", "out"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("would delete") == 2
    assert "--yes" in shown
    assert len(os.listdir(out)) == 4


def test_prune_keeps_the_newest_verified_checkpoints(out: Path, capsys: Captured) -> None:
    """Damaged checkpoints do not count and are not deleted, nor are those without a manifest."""
    flip(out / "checkpoint-40")
    made.plain(out, 5)
    assert main(["checkpoints", "prune", "out", "--keep", "1", "--yes"]) == 0
    assert sorted(os.listdir(out)) == ["checkpoint-30", "checkpoint-40", "checkpoint-5"]
    capsys.readouterr()
    code, value = as_json(capsys, "prune", "out", "--keep", "1", "--yes")
    assert (code, value["deleted"]) == (0, [])


def test_prune_keeps_the_best_checkpoint(out: Path, capsys: Captured) -> None:
    """The one that the newest trainer state names."""
    path = publish_with_best(out, 50, best="out/checkpoint-10")
    assert main(["checkpoints", "prune", "out", "--keep", "1", "--yes"]) == 0
    assert sorted(os.listdir(out)) == ["checkpoint-10", path.name]


def publish_with_best(folder: Path, step: int, best: str) -> Path:
    """Publish a checkpoint whose trainer state names an older one as the best."""
    path = made.plain(folder, step)
    (path / "trainer_state.json").write_text(json.dumps({"global_step": step, "best_model_checkpoint": best}))
    write_manifest(path, identity(folder, step, run_id="night", world_size=2))
    return path


def test_prune_deletes_renamed_directories_only_with_rejected(out: Path, capsys: Captured) -> None:
    """Rejected and abandoned partial ones; another run's replaced checkpoint stays."""
    reject_checkpoint(made.plain(out, 50), "bad")
    os.rename(made.plain(out, 60), out / ".checkpoint-60.partial-00ff")
    os.rename(publish(out, 70, run_id="other"), out / "replaced-checkpoint-70")
    main(["checkpoints", "prune", "out", "--keep", "4", "--yes"])
    assert len(os.listdir(out)) == 7
    with partial_directory(out, 80) as busy:
        assert main(["checkpoints", "prune", "out", "--keep", "4", "--yes", "--rejected"]) == 0
        assert busy.is_dir()
    assert sorted(os.listdir(out)) == [
        *(f"checkpoint-{step}" for step in (10, 20, 30, 40)),
        "replaced-checkpoint-70",
    ]


def test_prune_exits_with_1_if_a_deletion_fails(
    out: Path, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The directory is no longer a checkpoint, because files may be missing."""

    def refuse(path: Path) -> None:
        raise OSError(16, "Device or resource busy")

    monkeypatch.setattr("shutil.rmtree", refuse)
    assert main(["checkpoints", "prune", "out", "--keep", "3", "--yes"]) == 1
    assert "could not delete" in capsys.readouterr().out
    assert [found.manifest.step for found in find_checkpoints(out)] == [40, 30, 20]


def test_prune_refuses_a_single_checkpoint(out: Path, capsys: Captured) -> None:
    """The message names its directory."""
    assert main(["checkpoints", "prune", "out/checkpoint-10"]) == 2
    assert "give its directory" in capsys.readouterr().err
