"""Rotation: which checkpoints are deleted after a new one is published."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity
from transformers.trainer_utils import rotate_checkpoints

from grpo_run.runtime.checkpoints import publishing, search
from grpo_run.runtime.checkpoints.manifest import (
    MANIFEST,
    Manifest,
    mark_finished,
    mark_kept,
    read_manifest,
    write_manifest,
)
from grpo_run.runtime.checkpoints.publishing import clean_partial_directories
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.checkpoints.search import directory_of, name_of, snapshot_directories, step_of


def save(
    folder: Path,
    step: int,
    *,
    scheduled: bool = True,
    run_id: str = "run-1",
    ordinal: int = 1,
    finished: bool = False,
    kept: bool = False,
    age: float = 0.0,
) -> Path:
    """Write a complete checkpoint, modified `age` seconds after the first."""
    what = identity(folder, step, run_id=run_id, ordinal=ordinal, scheduled=scheduled)
    path = directory_of(what, folder) / name_of(directory_of(what, folder), step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    write_manifest(path, what)
    if finished:
        mark_finished(path)
    if kept:
        mark_kept(path)
    os.utime(path, (1e9 + age, 1e9 + age))
    return path


def remaining_steps(folder: Path) -> list[int]:
    """Steps of the checkpoints and snapshots in an output directory."""
    snapshots = (path for place in snapshot_directories(folder) for path in place.glob("snapshot-*"))
    paths = (*folder.glob("checkpoint-*"), *snapshots)
    return sorted(step for path in paths if (step := step_of(path)) is not None)


RUN = {"scheduled": False}
"""A snapshot that the run takes for itself."""
USER = {"kept": True}
Saved = tuple[int, dict[str, Any]]


@pytest.mark.parametrize(
    ("saved", "newest", "limit", "best", "remain"),
    [
        # without a limit, as transformers
        *(([(1, {}), (2, {})], (3, {}), limit, None, [1, 2, 3]) for limit in (None, 0, -1)),
        # copies and some file systems give equal modification times: the step decides
        ([(step, {"age": 0}) for step in (9, 10, 8, 11)], (12, {"age": 0}), 3, None, [10, 11, 12]),
        # the clock may have been set back: the newest stays
        ([(1, {"age": 9}), (2, {"age": 8}), (3, {"age": 7})], (4, {"age": 0}), 1, None, [4]),
        # the best stays in addition
        ([(1, {}), (2, {})], (3, {}), 1, "checkpoint-1", [1, 3]),
        # superseded snapshots go without a limit, and count for none: an undisturbed run has none
        ([(1, {}), (2, RUN)], (3, RUN), None, None, [1, 3]),
        ([(1, {}), (2, {}), (3, {})], (4, RUN), 2, None, [1, 2, 3, 4]),
        ([(2, {}), (3, {}), (4, RUN)], (5, {}), 2, None, [3, 5]),
        # snapshots of others, and finished calls, which would be trained again
        ([(1, {"run_id": "run-0", **RUN}), (2, {})], (3, {}), 1, None, [1, 3]),
        ([(1, {"ordinal": 2, **RUN}), (2, {})], (3, {}), 1, None, [1, 3]),
        ([(1, {"finished": True}), (2, {})], (3, {}), 1, None, [1, 3]),
        ([(1, {"finished": True, **RUN}), (2, {})], (3, {}), 1, None, [1, 3]),
        ([(1, {"finished": True, "run_id": "run-0"}), (2, {})], (3, {}), 1, None, [1, 3]),
        # what the user asked for neither goes nor takes the place of another, also as the newest
        ([(1, {}), (2, USER), (3, {})], (4, {}), 2, None, [2, 3, 4]),
        ([(2, USER), (3, {}), (4, {})], (5, USER), 2, None, [2, 3, 4, 5]),
        # before a restart the newest is written first, and scheduled ones after it
        *(([(10, {}), (30, {})], (20, {}), limit, None, [20, 30]) for limit in (1, 2)),
        ([(10, {}), (30, RUN)], (20, {}), 1, None, [20, 30]),
        ([(10, {}), (30, RUN)], (20, {}), 2, None, [10, 20, 30]),
        *(([(10, {}), (30, kind)], (20, {}), None, None, [10, 20, 30]) for kind in (RUN, {})),
    ],
)  # fmt: skip
def test_what_remains(
    tmp_path: Path, saved: list[Saved], newest: Saved, limit: int | None, best: str | None, remain: list[int]
) -> None:
    """After checkpoints were saved in this order, one after another."""
    paths = [save(tmp_path, step, **{"age": age, **of}) for age, (step, of) in enumerate([*saved, newest])]
    before = remaining_steps(tmp_path)
    removed = rotate(tmp_path, newest=paths[-1], limit=limit, best=best)
    assert remaining_steps(tmp_path) == remain
    assert sorted(step_of(path) or 0 for path in removed) == sorted(set(before) - set(remain))


@pytest.mark.parametrize("best", [None, 1, 3, 5, 99])
@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4, 9])
def test_the_limit_keeps_the_same_checkpoints_as_transformers(
    tmp_path: Path, limit: int | None, best: int | None
) -> None:
    """Whether the best checkpoint is old, in the middle, the newest, or deleted."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for step in range(1, 6):
        save(ours, step, age=step * 10.0)
    shutil.copytree(ours, theirs)
    for step in range(1, 6):
        os.utime(theirs / f"checkpoint-{step}", (1e9 + step * 10, 1e9 + step * 10))
    name = f"checkpoint-{best}" if best is not None else None
    removed = rotate(ours, newest=ours / "checkpoint-5", limit=limit, best=name)
    rotate_checkpoints(str(theirs), limit, str(theirs / name) if name else None, use_mtime=True)
    assert remaining_steps(ours) == remaining_steps(theirs)
    assert sorted(path.name for path in removed) == sorted(
        f"checkpoint-{step}" for step in set(range(1, 6)) - set(remaining_steps(ours))
    )


def test_other_files_links_and_names_are_ignored(tmp_path: Path) -> None:
    """A link to a checkpoint elsewhere is not followed."""
    elsewhere = save(tmp_path / "elsewhere", 1)
    out = tmp_path / "out"
    newest = save(out, 5)
    (out / "checkpoint-1").symlink_to(elsewhere)
    (out / "checkpoint-2").write_bytes(b"a file")
    for name in ("checkpoint-x", "rejected-checkpoint-3", ".checkpoint-4.partial-ab", "my-checkpoint-4"):
        (out / name).mkdir()
    before = sorted(os.listdir(out))
    assert rotate(out, newest=newest, limit=1, best=None) == []
    assert sorted(os.listdir(out)) == before
    assert elsewhere.exists()


def test_what_the_run_has_not_published_is_neither_counted_nor_deleted(tmp_path: Path) -> None:
    """Checkpoints of another run, of the script itself, and damaged ones."""
    (tmp_path / "checkpoint-1").mkdir()
    (save(tmp_path, 2) / MANIFEST).write_text("{")
    save(tmp_path, 3, run_id="run-0")
    save(tmp_path, 4)
    rotate(tmp_path, newest=save(tmp_path, 5, age=10.0), limit=2, best=None)
    assert remaining_steps(tmp_path) == [1, 2, 3, 4, 5]
    rotate(tmp_path, newest=save(tmp_path, 6, age=10.0), limit=2, best=None)
    assert remaining_steps(tmp_path) == [1, 2, 3, 5, 6]


def test_a_checkpoint_that_cannot_be_deleted_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as deleted."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)

    def refuse(*paths: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(publishing.os, "rename", refuse)
    assert rotate(tmp_path, newest=newest, limit=1, best=None) == []
    assert remaining_steps(tmp_path) == [1, 2]


def test_a_checkpoint_deleted_by_another_process_is_not_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not reported as deleted."""
    for step in (1, 2):
        save(tmp_path, step, age=step)
    newest = save(tmp_path, 3, age=30.0)
    read = search.read_manifest

    def gone_after(path: Path) -> Manifest:
        manifest = read(path)
        if path.name == "checkpoint-1":
            shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(search, "read_manifest", gone_after)
    assert [path.name for path in rotate(tmp_path, newest=newest, limit=1, best=None)] == ["checkpoint-2"]
    assert remaining_steps(tmp_path) == [3]


def test_a_crash_during_deletion_leaves_no_checkpoint_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rest is deleted by the next cleanup."""
    save(tmp_path, 1)
    newest = save(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(publishing.shutil, "rmtree", lambda path, **options: None)
        rotate(tmp_path, newest=newest, limit=1, best=None)
    assert remaining_steps(tmp_path) == [2]
    assert len(os.listdir(tmp_path)) == 2
    clean_partial_directories(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_a_superseded_snapshot_with_added_files_is_kept(tmp_path: Path) -> None:
    """A script may write into any of its directories."""
    first = save(tmp_path, 1, scheduled=False)
    save(tmp_path, 2, scheduled=False)
    (first / "notes.txt").write_text("the good one")
    rotate(tmp_path, newest=save(tmp_path, 3), limit=None, best=None)
    assert remaining_steps(tmp_path) == [1, 3]


def test_a_step_that_is_done_again_after_a_recovery_stays_kept(tmp_path: Path) -> None:
    """The checkpoint is written again, and nobody asks a second time."""
    save(tmp_path, 2, kept=True)
    with publishing.partial_directory(tmp_path, 2) as partial:
        (partial / "model.safetensors").write_bytes(b"weights")
        write_manifest(partial, identity(tmp_path, 2))
        publishing.publish(partial, tmp_path / "checkpoint-2")
    assert read_manifest(tmp_path / "checkpoint-2").kept
