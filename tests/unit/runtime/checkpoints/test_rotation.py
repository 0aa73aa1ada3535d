"""Rotation beside transformers' own, and where a directory cannot be deleted."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from support.builders.runtime.checkpoint_shell import CheckpointShell
from transformers.trainer_utils import rotate_checkpoints

from grpo_run.runtime.checkpoints import publishing, search
from grpo_run.runtime.checkpoints.manifest import Manifest


@pytest.fixture
def shell(tmp_path: Path) -> CheckpointShell:
    """An empty directory."""
    return CheckpointShell(tmp_path)


@pytest.mark.parametrize("best", [None, 1, 3, 5, 99])
@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4, 9])
def test_the_limit_keeps_the_same_checkpoints_as_transformers(
    shell: CheckpointShell, tmp_path: Path, limit: int | None, best: int | None
) -> None:
    """Whether the best checkpoint is old, in the middle, the newest, or deleted."""
    for step in range(1, 6):
        shell.save(str(step), age=str(step * 10))
    theirs = tmp_path / "theirs"
    shutil.copytree(shell.out, theirs)
    name = f"checkpoint-{best}" if best is not None else ""
    shell.rotate("5", str(limit or ""), name)
    rotate_checkpoints(str(theirs), limit, str(theirs / name) if name else None, use_mtime=True)
    assert sorted(os.listdir(shell.out)) == sorted(os.listdir(theirs))


def test_a_checkpoint_that_cannot_be_deleted_is_not_an_error(
    shell: CheckpointShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as deleted."""
    shell.save("1")
    shell.save("2")

    def refuse(*paths: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(publishing.os, "rename", refuse)
    assert shell.rotate("2", limit="1") == "removed none; remain 1 2"


def test_a_checkpoint_deleted_by_another_process_is_not_an_error(
    shell: CheckpointShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as deleted."""
    for step in ("1", "2", "3"):
        shell.save(step, age=step)
    read = search.read_manifest

    def gone_after(path: Path) -> Manifest:
        manifest = read(path)
        if path.name == "checkpoint-1":
            shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(search, "read_manifest", gone_after)
    assert shell.rotate("3", limit="1") == "removed 2; remain 3"


def test_a_crash_during_deletion_leaves_no_checkpoint_name(
    shell: CheckpointShell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is deleted by the next cleanup."""
    shell.save("1")
    shell.save("2")
    with monkeypatch.context() as patch:
        patch.setattr(publishing.shutil, "rmtree", lambda path, **options: None)
        assert shell.rotate("2", limit="1") == "removed 1; remain 2"
    assert len(os.listdir(shell.out)) == 2
    shell.clean()
    assert os.listdir(shell.out) == ["checkpoint-2"]
