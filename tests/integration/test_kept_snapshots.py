"""Snapshots that a full disk kept in memory are written by the next launch of the same command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.slots import fill, snapshot

from grpo_run.cli import launch as module
from grpo_run.runtime.checkpoints.digests import verify_digests
from grpo_run.runtime.checkpoints.manifest import read_manifest
from grpo_run.runtime.record.history import History
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.runtime.staging.area import StagingArea, staging_path


@pytest.fixture
def kept(tmp_path: Path) -> Iterator[Path]:
    """Create the staging directory of a finished run, with a checkpoint that the script asked for."""
    path = staging_path(tmp_path / "run", "night")
    assert path is not None
    staging = StagingArea(path)
    (tmp_path / "run").mkdir()
    staging.claim(0, tmp_path / "run")
    fill(staging.slots[0], snapshot(tmp_path / "out"))
    yield path
    staging.clear()


def test_next_launch_writes_kept_snapshots(
    kept: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A real drain worker publishes the snapshot, and the staging directory is removed."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    launch = SimpleNamespace(config=SimpleNamespace(snapshot_directory=kept, run_id="night"))
    module.write_staged_checkpoints(launch, run, History(supervisors=1))  # type: ignore[arg-type]
    path = tmp_path / "out" / "checkpoint-5"
    verify_digests(path, read_manifest(path).files)
    assert not kept.exists()
    assert [json.loads(line)["event"] for line in run.journal.read_text().splitlines()] == [
        "checkpoint_published"
    ]
    assert capsys.readouterr().out == ""


def test_snapshots_older_than_the_run_are_not_written(kept: Path, tmp_path: Path) -> None:
    """Snapshots of this machine are discarded when the run finished on another one."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    launch = SimpleNamespace(config=SimpleNamespace(snapshot_directory=kept, run_id="night"))
    module.write_staged_checkpoints(launch, run, History(supervisors=2))  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
    assert not kept.exists()


def test_no_kept_snapshots_start_no_process(tmp_path: Path) -> None:
    """Without snapshots no drain worker is started."""
    run = RunDirectory(path=tmp_path / "run")
    run.create()
    launch = SimpleNamespace(config=SimpleNamespace(snapshot_directory=tmp_path / "none", run_id="night"))
    module.write_staged_checkpoints(launch, run, History(supervisors=1))  # type: ignore[arg-type]
    assert not run.journal.exists()
