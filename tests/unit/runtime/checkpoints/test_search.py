"""Search for checkpoints in directories."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.manifests import publish, rewrite

from grpo_run.runtime.checkpoints.manifest import MANIFEST, read_manifest, remove_manifest
from grpo_run.runtime.checkpoints.search import (
    directories_of_run,
    find_candidates,
    find_checkpoints,
    lies_beside,
    name_of,
    output_directory_of,
    snapshot_places,
    step_of,
)
from grpo_run.runtime.errors import CheckpointError


def test_a_checkpoint_without_its_manifest_is_not_found(checkpoint: Path, tmp_path: Path) -> None:
    """Removing the manifest twice is not an error."""
    remove_manifest(checkpoint)
    remove_manifest(checkpoint)
    assert list(find_checkpoints(tmp_path)) == []
    with pytest.raises(CheckpointError, match=MANIFEST):
        read_manifest(checkpoint)


@pytest.mark.parametrize(
    "name", ["checkpoint-last", "checkpoint", "tmp-checkpoint-7", "checkpoint-²", "runs"]
)
def test_directories_with_other_names_are_skipped(tmp_path: Path, name: str) -> None:
    """A manifest does not change that."""
    publish(tmp_path / name, step=7)
    publish(tmp_path / "checkpoint-5")
    assert [found.path.name for found in find_checkpoints(tmp_path)] == ["checkpoint-5"]


def test_a_missing_directory_has_no_checkpoints(tmp_path: Path) -> None:
    """The script may not have created it yet."""
    assert list(find_checkpoints(tmp_path / "out")) == []


def test_several_directories_are_searched_as_one(tmp_path: Path) -> None:
    """Newest step first; at equal steps the first directory comes first."""
    for folder, steps in (("a", (5, 20)), ("b", (10, 20))):
        for step in steps:
            publish(tmp_path / folder / f"checkpoint-{step}", step=step)
    found = [found.path.relative_to(tmp_path) for found in find_checkpoints(tmp_path / "a", tmp_path / "b")]
    assert list(map(str, found)) == [
        "a/checkpoint-20",
        "b/checkpoint-20",
        "b/checkpoint-10",
        "a/checkpoint-5",
    ]
    assert next(find_checkpoints(tmp_path / "b", tmp_path / "a")).path.parent.name == "b"


def test_only_a_changed_manifest_makes_a_candidate_corrupt(tmp_path: Path) -> None:
    """A missing manifest or one of another schema does not."""
    for step in (1, 2, 3):
        publish(tmp_path / f"checkpoint-{step}", step=step)
    remove_manifest(tmp_path / "checkpoint-1")
    rewrite(tmp_path / "checkpoint-2", step=9)
    rewrite(tmp_path / "checkpoint-3", schema_version=2)
    found = {one.step: (one.corrupt, one.manifest) for one in find_candidates(tmp_path)}
    assert found == {3: (False, None), 2: (True, None), 1: (False, None)}


def test_snapshots_lie_beside_an_output_directory_until_something_is_in_it(tmp_path: Path) -> None:
    """Both places are found, and belong to the output directory."""
    out = tmp_path / "out"
    assert lies_beside(out), "the script has not created it yet"
    out.mkdir()
    assert lies_beside(out)
    places = snapshot_places(out, "run-1", 2)
    for place in places:
        path = place / name_of(place, 7)
        publish(path, step=7)
        assert (path.name, step_of(path), output_directory_of(path)) == ("snapshot-7", 7, out)
    assert places[1] == tmp_path / "out_grpo_run" / "run-1" / "call-2"
    assert directories_of_run("run-1", out) == [out, *places]
    assert directories_of_run("run-2", out) == [out]
    assert not lies_beside(out)


def test_snapshots_lie_inside_a_volume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is beside the volume of a container does not survive it, also if a link leads there."""
    volume, link = tmp_path / "volume", tmp_path / "link"
    volume.mkdir()
    link.symlink_to(volume)
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == volume)
    assert not lies_beside(volume)
    assert not lies_beside(link)
    assert lies_beside(volume / "out")
    assert not lies_beside(tmp_path / ("o" * 250)), "the name would be too long"
    assert directories_of_run("run-1", tmp_path / ("o" * 250)) == [tmp_path / ("o" * 250)]


def test_checkpoints_under_a_folder_with_a_similar_name_are_no_snapshots(tmp_path: Path) -> None:
    """Snapshots have the directory of their call."""
    path = tmp_path / "my_grpo_run" / "seed-1" / "out" / "checkpoint-7"
    assert (step_of(path), output_directory_of(path)) == (7, path.parent)
