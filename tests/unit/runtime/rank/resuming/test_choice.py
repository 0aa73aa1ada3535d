"""Which checkpoint a call resumes from, and which call of the run it is; see the text files."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.builders.runtime.resume_shell import ResumeShell
from support.transcripts import Story, stories

from grpo_run.runtime.checkpoints import digests
from grpo_run.runtime.checkpoints.digests import FileEntry, digest_file


@stories(__file__, "choices.txt", "calls.txt")
def test_choices(story: Story, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every story of these files."""
    story.check(ResumeShell(tmp_path, monkeypatch), word)


def test_a_read_error_does_not_mark_a_checkpoint_as_corrupt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older checkpoint is chosen; the newer one is not renamed."""
    shell = ResumeShell(tmp_path, monkeypatch)
    shell.save("5")
    shell.save("10")

    def digest(path: Path) -> FileEntry:
        if path.parent.name == "checkpoint-10":
            raise OSError(116, "Stale file handle")
        return digest_file(path)

    monkeypatch.setattr(digests, "digest_file", digest)
    rejected, chosen = shell.ask().splitlines()
    assert rejected.startswith("rejected checkpoint-10: ")
    assert chosen == "OUT/checkpoint-5 (step 5)"
