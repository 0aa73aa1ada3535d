"""What commands answer, word by word; see `stories/`."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.command_shell import CommandShell
from support.transcripts import Story, stories

NAMES = sorted(path.name for path in (Path(__file__).parent / "stories").iterdir())


@stories(f"{Path(__file__).parent}/stories/x", *NAMES)
def test_commands(
    story: Story, word: str, here: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every story of the files."""
    story.check(CommandShell(here, monkeypatch, capsys), word)
