"""The hang detector as a whole: what it reads, and when it reports; see the text files beside this one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.detector_shell import DetectorShell
from support.transcripts import Story, stories


@stories(__file__, "deadlocks.txt", "stalls.txt", "waits.txt")
def test_detector(story: Story, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of these files."""
    story.check(DetectorShell(tmp_path, monkeypatch), word)
