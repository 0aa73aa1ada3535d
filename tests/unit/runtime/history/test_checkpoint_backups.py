"""Checkpoints survive a script that clears its output directory when it starts."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support import checkpoint_files
from support.identities import identity
from support.journal import as_events

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest, write_manifest
from grpo_run.runtime.checkpoints.publishing import begin_attempt
from grpo_run.runtime.history import checkpoint_backups
from grpo_run.runtime.history.checkpoint_backups import CheckpointBackups
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory


def publish(output: Path, step: int, run_id: str = "run-1") -> Path:
    """Write a checkpoint with a manifest."""
    path = checkpoint_files.plain(output, step)
    write_manifest(path, identity(output, step, run_id=run_id))
    return path


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The output directory of the run's only call."""
    return tmp_path / "project" / "out"


@pytest.fixture
def checkpoints(tmp_path: Path, output: Path) -> CheckpointBackups:
    """What the supervisor holds."""
    (tmp_path / "run").mkdir()
    started = {
        "event": "train_started", "rank": 0, "train_call": 1, "trainer_class": "GRPOTrainer",
        "output_dir": str(output)
    }  # fmt: skip
    return CheckpointBackups(links_of(tmp_path), "run-1", History.of(as_events([started])).calls, warn=print)


def links_of(folder: Path) -> Path:
    """The folder of links in the run directory."""
    return RunDirectory(path=folder / "run").checkpoint_backups


def put_back(folder: Path, output: Path) -> list[str]:
    """Restore what is missing; return the names."""
    return sorted(checkpoint_backups.put_back(links_of(folder), "run-1", str(output)))


def verify(output: Path, step: int) -> None:
    """Compare the digests of a checkpoint."""
    path = output / f"checkpoint-{step}"
    verify_digests(path, read_manifest(path).files)


@pytest.mark.parametrize("links", ["in the run directory", "beside the output directory"])
def test_a_cleared_directory_gets_its_checkpoints_back(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, monkeypatch: pytest.MonkeyPatch, links: str
) -> None:
    """Also if the run directory is on another file system. Nothing is left afterwards."""
    if links != "in the run directory":
        link = os.link

        def other_file_system(source: Path, target: Path) -> None:
            if (tmp_path / "run") in Path(target).parents:
                raise OSError(18, "Invalid cross-device link")
            link(source, target)

        monkeypatch.setattr(os, "link", other_file_system)
    for step in (2, 4):
        publish(output, step)
    publish(output, 3, run_id="another")
    checkpoints.make()
    shutil.rmtree(output)
    assert put_back(tmp_path, output) == ["checkpoint-2", "checkpoint-4"]
    for step in (2, 4):
        verify(output, step)
    checkpoints.release()
    assert (output / "checkpoint-4" / "model.safetensors").is_file()
    assert list((tmp_path / "run").iterdir()) == []
    assert os.listdir(tmp_path / "project") == ["out"]


@pytest.mark.parametrize(
    ("saved", "afterwards"), [((2, 4), "nothing"), ((2,), "a directory of this name"), ((2,), "a newer one")]
)
def test_what_was_rotated_away_or_replaced_stays_as_it_is(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, saved: tuple[int, ...], afterwards: str
) -> None:
    """A snapshot of the last attempt is written to disk between two starts, which rotates; or the script has
    used a name again.
    """
    for step in saved:
        publish(output, step)
    checkpoints.make()
    shutil.rmtree(output / "checkpoint-2")
    if afterwards == "a directory of this name":
        (output / "checkpoint-2").mkdir()
    if afterwards == "a newer one":
        publish(output, 4)
    before = sorted(output.rglob("*"))
    assert put_back(tmp_path, output) == []
    checkpoints.make()
    assert sorted(output.rglob("*")) == before


def test_without_hard_links_nothing_is_held_or_left(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some file systems have none."""

    def no_links(source: Path, target: Path) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    publish(output, 2)
    checkpoints.make()
    assert put_back(tmp_path, output) == []
    checkpoints.release()
    assert list((tmp_path / "run").iterdir()) == []
    assert os.listdir(tmp_path / "project") == ["out"]


def test_a_start_that_fails_after_it_has_cleared_the_directory_loses_nothing(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, capsys: pytest.CaptureFixture[str]
) -> None:
    """The next start, by the same supervisor or by another one, finds the checkpoint again and says so."""
    publish(output, 2)
    for _ in range(2):
        checkpoints.make()
        shutil.rmtree(output)
    checkpoints.make()
    verify(output, 2)
    assert capsys.readouterr().out.count(f"removed checkpoint-2 in {output}; restored") == 2


@pytest.mark.parametrize("finished", [False, True])
def test_the_end_of_a_run_puts_back_what_its_last_start_has_removed(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, finished: bool
) -> None:
    """Unless the script has run to its end: then it meant it. No links are left."""
    publish(output, 2)
    checkpoints.make()
    shutil.rmtree(output)
    checkpoints.end(finished=finished)
    assert (output / "checkpoint-2" / "model.safetensors").is_file() != finished
    assert list((tmp_path / "run").iterdir()) == []


def test_a_kill_while_a_checkpoint_is_put_back_loses_nothing(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of its files are linked; the next start links all of them."""
    publish(output, 2)
    checkpoints.make()
    shutil.rmtree(output)
    link, made = os.link, []

    def killed(source: Path, target: Path) -> None:
        if len(made) == 2:
            raise KeyboardInterrupt
        link(source, target)
        made.append(target)

    monkeypatch.setattr(os, "link", killed)
    monkeypatch.setattr(shutil, "rmtree", lambda path, ignore_errors: None)  # a kill cleans nothing up
    with pytest.raises(KeyboardInterrupt):
        put_back(tmp_path, output)
    monkeypatch.undo()
    checkpoints.make()
    verify(output, 2)


def test_what_cannot_be_put_back_stays_held(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may have no room for a directory at present."""
    publish(output, 2)
    checkpoints.make()
    shutil.rmtree(output)
    with monkeypatch.context() as full:
        full.setattr(Path, "mkdir", lambda *_, **__: os.open("/proc/self/nothing", os.O_RDONLY))
        checkpoints.make()
        checkpoints.release()
    assert not output.exists()
    checkpoints.end(finished=False)
    verify(output, 2)
    assert list((tmp_path / "run").iterdir()) == []


def test_only_the_first_step_of_an_attempt_looks_at_the_links(
    output: Path, checkpoints: CheckpointBackups, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every committed step asks, and reading manifests costs time."""
    publish(output, 2)
    checkpoints.make()
    looked: list[object] = []
    has_last_copies = checkpoint_backups.has_last_copies
    monkeypatch.setattr(
        checkpoint_backups, "has_last_copies", lambda *given: looked.append(given) or has_last_copies(*given)
    )
    for _ in range(3):
        checkpoints.release()
    assert len(looked) == 1


def test_a_superseded_supervisor_puts_nothing_back(
    tmp_path: Path, output: Path, checkpoints: CheckpointBackups
) -> None:
    """The newer attempt may have removed it on purpose."""
    publish(output, 4)
    fence = fencing.prepare(output, "run-1")
    fencing.record(tmp_path / "run", output, fence, made=True)
    checkpoints.make()
    shutil.rmtree(output / "checkpoint-4")
    begin_attempt(fencing.prepare(output, "run-1"), output, "run-1")
    checkpoints.end(finished=False)
    assert list(output.glob("checkpoint-*")) == []
    fencing.record(tmp_path / "run", output, fencing.prepare(output, "run-1"), made=True)
    checkpoints.end(finished=False)
    assert [path.name for path in output.glob("checkpoint-*")] == ["checkpoint-4"]
