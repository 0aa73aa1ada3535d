"""What the records of ranks prove, and who is at fault; see `proofs.txt` and `culprits.txt`."""

from __future__ import annotations

from support.builders.watchdog.deadlock_shell import DeadlockShell
from support.transcripts import Story, stories


@stories(__file__, "proofs.txt", "culprits.txt", "operations.txt")
def test_proofs(story: Story, word: str) -> None:
    """Every story of these files."""
    story.check(DeadlockShell(), word)
