"""Directories of checkpoints: how they get their name, what is found in them, and what is deleted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.builders.runtime.checkpoint_shell import CheckpointShell
from support.transcripts import Story, stories

from grpo_run.runtime.checkpoints.search import directories_of_run, lies_beside


@stories(__file__, "publishing.txt", "rotation.txt", "search.txt", "completeness.txt")
def test_checkpoints(story: Story, word: str, tmp_path: Path) -> None:
    """Every story of these files."""
    story.check(CheckpointShell(tmp_path), word)


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
