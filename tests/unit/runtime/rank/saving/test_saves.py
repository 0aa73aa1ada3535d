"""What a trainer's saves leave on disk, in memory and in the journal; see the text file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.builders.runtime.save_shell import SaveShell
from support.transcripts import Story, stories

from grpo_run.watchdog.observation import Slot


@stories(__file__, "saves.txt")
def test_saves(
    story: Story, word: str, tmp_path: Path, session: Any, events: Callable[[], list[dict[str, Any]]],
    reading: Callable[[], Slot], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Every story of the file."""
    story.check(SaveShell(tmp_path, session, events, reading, monkeypatch), word)
