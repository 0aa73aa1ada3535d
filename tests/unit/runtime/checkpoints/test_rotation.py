"""What goes when a new checkpoint is there, and what never does."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity
from transformers.trainer_utils import rotate_checkpoints

from grpo_run.runtime.checkpoints import publishing, rotation
from grpo_run.runtime.checkpoints.manifest import MANIFEST, Manifest, mark_finished, write_manifest
from grpo_run.runtime.checkpoints.publishing import clean_partial_directories
from grpo_run.runtime.checkpoints.rotation import rotate
from grpo_run.runtime.checkpoints.search import step_of


def saved(
    folder: Path,
    step: int,
    *,
    scheduled: bool = True,
    run_id: str = "run-1",
    ordinal: int = 1,
    finished: bool = False,
    age: float = 0.0,
) -> Path:
    """A complete checkpoint, written `age` seconds after the first."""
    path = folder / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(b"weights")
    what = identity(folder, step, run_id=run_id, ordinal=ordinal, scheduled=scheduled)
    write_manifest(path, what)
    if finished:
        mark_finished(path)
    os.utime(path, (1e9 + age, 1e9 + age))
    return path


def left(folder: Path) -> list[int]:
    """Steps of what is there."""
    return sorted(step for path in folder.iterdir() if (step := step_of(path)) is not None)


@pytest.mark.parametrize("limit", [None, 0, -1])
def test_without_a_limit_what_the_script_asked_for_stays(tmp_path: Path, limit: int | None) -> None:
    """All of it, as under transformers."""
    for step in (1, 2):
        saved(tmp_path, step)
    assert rotate(tmp_path, newest=saved(tmp_path, 3), limit=limit, best=None) == []
    assert left(tmp_path) == [1, 2, 3]


@pytest.mark.parametrize("best", [None, 1, 3, 5, 99])
@pytest.mark.parametrize("limit", [None, 1, 2, 3, 4, 9])
def test_the_limit_means_what_it_does_to_transformers(
    tmp_path: Path, limit: int | None, best: int | None
) -> None:
    """The same directories are left, whichever was best: an old one, a middle one, the newest, one that is gone."""
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for step in range(1, 6):
        saved(ours, step, age=step * 10.0)
    shutil.copytree(ours, theirs)
    for step in range(1, 6):
        os.utime(theirs / f"checkpoint-{step}", (1e9 + step * 10, 1e9 + step * 10))
    name = f"checkpoint-{best}" if best is not None else None
    removed = rotate(ours, newest=ours / "checkpoint-5", limit=limit, best=name)
    rotate_checkpoints(str(theirs), limit, str(theirs / name) if name else None, use_mtime=True)
    assert left(ours) == left(theirs)
    assert sorted(path.name for path in removed) == sorted(
        f"checkpoint-{step}" for step in set(range(1, 6)) - set(left(ours))
    )


def test_files_of_one_age_go_by_their_steps(tmp_path: Path) -> None:
    """Copies and some file systems give all the same time."""
    for step in (9, 10, 8, 11):
        saved(tmp_path, step)
    rotate(tmp_path, newest=saved(tmp_path, 12), limit=3, best=None)
    assert left(tmp_path) == [10, 11, 12]


def test_the_newest_stays_however_old_it_looks(tmp_path: Path) -> None:
    """A clock that was set back, or a copy that kept its times."""
    for step in (1, 2, 3):
        saved(tmp_path, step, age=1000.0 * step)
    newest = saved(tmp_path, 4, age=-1000.0)
    rotate(tmp_path, newest=newest, limit=1, best=None)
    assert left(tmp_path) == [4]


def test_superseded_snapshots_go_without_any_limit(tmp_path: Path) -> None:
    """They were taken for a recovery that a newer checkpoint serves better; what the script asked for stays."""
    saved(tmp_path, 1)
    saved(tmp_path, 2, scheduled=False)
    removed = rotate(tmp_path, newest=saved(tmp_path, 3, scheduled=False), limit=None, best=None)
    assert [path.name for path in removed] == ["checkpoint-2"]
    assert left(tmp_path) == [1, 3]


def test_a_snapshot_does_not_count_for_the_limit(tmp_path: Path) -> None:
    """The script gets as many of its own as it asked for."""
    for step in (1, 2, 3):
        saved(tmp_path, step, age=step * 10.0)
    rotate(tmp_path, newest=saved(tmp_path, 4, scheduled=False), limit=2, best=None)
    assert left(tmp_path) == [2, 3, 4]


@pytest.mark.parametrize(
    "other",
    [
        {"run_id": "run-0", "scheduled": False},
        {"ordinal": 2, "scheduled": False},
        {"finished": True},
        {"finished": True, "scheduled": False},
        {"finished": True, "run_id": "run-0"},
    ],
)
def test_what_is_not_ours_to_remove_stays(tmp_path: Path, other: dict[str, Any]) -> None:
    """Another run's or call's snapshots, and the end of a call that has finished: it would be trained again."""
    saved(tmp_path, 1, **other)
    saved(tmp_path, 2, age=10.0)
    rotate(tmp_path, newest=saved(tmp_path, 3, age=20.0), limit=1, best=None)
    assert left(tmp_path) == [1, 3]


@pytest.mark.parametrize("scheduled", [True, False])
def test_the_best_stays(tmp_path: Path, scheduled: bool) -> None:
    """Beside the limit, and when it is a snapshot of ours."""
    saved(tmp_path, 1, scheduled=scheduled)
    saved(tmp_path, 2, age=10.0)
    rotate(tmp_path, newest=saved(tmp_path, 3, age=20.0), limit=1, best="checkpoint-1")
    assert left(tmp_path) == [1, 3]


@pytest.mark.parametrize("scheduled", [True, False])
@pytest.mark.parametrize("limit", [None, 1, 2])
def test_a_later_checkpoint_of_the_call_outlives_an_earlier_one_that_comes_after_it(
    tmp_path: Path, limit: int | None, scheduled: bool
) -> None:
    """Before a restart the newest is made durable first, and what was waiting afterwards."""
    saved(tmp_path, 10)
    saved(tmp_path, 30, scheduled=scheduled, age=50.0)
    rotate(tmp_path, newest=saved(tmp_path, 20, age=60.0), limit=limit, best=None)
    assert {20, 30} <= set(left(tmp_path))
    assert (10 in left(tmp_path)) == (limit is None or (limit == 2 and not scheduled))


def test_what_is_no_checkpoint_is_not_looked_at(tmp_path: Path) -> None:
    """Files, links, other names; a checkpoint elsewhere that a link leads to."""
    elsewhere = saved(tmp_path / "elsewhere", 1)
    out = tmp_path / "out"
    newest = saved(out, 5)
    (out / "checkpoint-1").symlink_to(elsewhere)
    (out / "checkpoint-2").write_bytes(b"a file")
    for name in ("checkpoint-x", "rejected-checkpoint-3", ".checkpoint-4.partial-ab", "my-checkpoint-4"):
        (out / name).mkdir()
    before = sorted(os.listdir(out))
    assert rotate(out, newest=newest, limit=1, best=None) == []
    assert sorted(os.listdir(out)) == before
    assert elsewhere.exists()


def test_the_scripts_own_checkpoints_are_rotated_as_ever(tmp_path: Path) -> None:
    """Without a manifest, or with one that was changed."""
    (tmp_path / "checkpoint-1").mkdir()
    (saved(tmp_path, 2) / MANIFEST).write_text("{")
    rotate(tmp_path, newest=saved(tmp_path, 3, age=10.0), limit=1, best=None)
    assert left(tmp_path) == [3]


def test_what_cannot_be_removed_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The new checkpoint is complete all the same; what is said to be removed is."""
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)

    def refuse(*paths: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(publishing.os, "rename", refuse)
    assert rotate(tmp_path, newest=newest, limit=1, best=None) == []
    assert left(tmp_path) == [1, 2]


def test_one_that_is_gone_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody tidies up at the same time."""
    for step in (1, 2):
        saved(tmp_path, step, age=step)
    newest = saved(tmp_path, 3, age=30.0)
    read = rotation.read_manifest

    def gone_after(path: Path) -> Manifest:
        manifest = read(path)
        if path.name == "checkpoint-1":
            shutil.rmtree(path)
        return manifest

    monkeypatch.setattr(rotation, "read_manifest", gone_after)
    assert [path.name for path in rotate(tmp_path, newest=newest, limit=1, best=None)] == ["checkpoint-2"]
    assert left(tmp_path) == [3]


def test_a_crash_in_the_midst_leaves_nothing_that_looks_like_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name goes first; what is left is cleaned up by the next one who writes here."""
    saved(tmp_path, 1)
    newest = saved(tmp_path, 2)
    with monkeypatch.context() as patch:
        patch.setattr(publishing.shutil, "rmtree", lambda path, **options: None)
        rotate(tmp_path, newest=newest, limit=1, best=None)
    assert left(tmp_path) == [2]
    assert len(os.listdir(tmp_path)) == 2
    clean_partial_directories(tmp_path)
    assert os.listdir(tmp_path) == ["checkpoint-2"]


def test_what_lies_aside_is_never_rotated(tmp_path: Path) -> None:
    """Whatever the limit is."""
    for name in ("replaced-checkpoint-1", "replaced-checkpoint-1.2", "rejected-checkpoint-1"):
        saved(tmp_path, 1).rename(tmp_path / name)
    rotate(tmp_path, newest=saved(tmp_path, 3), limit=1, best=None)
    assert len(os.listdir(tmp_path)) == 4


def test_a_superseded_snapshot_that_the_script_wrote_into_stays(tmp_path: Path) -> None:
    """What was added is not ours to remove."""
    for step in (1, 2):
        saved(tmp_path, step, scheduled=False)
    (tmp_path / "checkpoint-1/notes.txt").write_text("the good one")
    rotate(tmp_path, newest=saved(tmp_path, 3), limit=None, best=None)
    assert left(tmp_path) == [1, 3]
