"""Which checkpoints may go: what `grpo-run checkpoints prune` would delete. Pure; deletes nothing.

Only what was verified by its digests a moment ago is ever given up, and only for newer ones that were too.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from grpo_run.runtime.checkpoints.listing import Entry, State


def superfluous(
    entries: Sequence[Entry], *, keep: int, best: Iterable[str] = (), aside: bool = False
) -> list[Entry]:
    """What can be deleted, oldest first.

    Args:
        entries: of any number of directories, verified.
        keep: newest verified checkpoints to keep, 1 or more, for each directory, run and `train()` call in it.
        best: names of checkpoints that a trainer has written down as its best; they stay.
        aside: rejected and partial directories too (a partial one may still be written: ask its lock first).
    """
    assert keep >= 1, "the last verified checkpoint is never given up"
    groups: dict[tuple[Path, tuple[str, int]], list[Entry]] = defaultdict(list)
    for entry in entries:
        if entry.state is State.published and entry.verified and entry.manifest is not None:
            groups[entry.path.parent, entry.manifest.call_of_run].append(entry)
    stay = set(best)
    going = [
        entry
        for group in groups.values()
        for entry in sorted(group, key=lambda entry: -entry.step)[keep:]
        if entry.path.name not in stay
    ]
    if aside:
        going += [entry for entry in entries if entry.state in (State.partial, State.rejected)]
    return sorted(going, key=lambda entry: (entry.step, str(entry.path)))
