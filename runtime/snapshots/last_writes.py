"""The last writes of a run: what is only in memory when its ranks have ended goes to disk, or is described.

Called at the end of a run (`runtime.supervisor.outcome`) and by a later launch of the same command
(`runtime/launching/`). Waits for room, because nothing else has the model any more. Decides no exit code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.snapshots._drain_messages import DrainFailed
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.snapshots.headroom import FULL_BYTES
from grpo_run.runtime.snapshots.slot import StagedSnapshot, path_of
from grpo_run.watchdog.text import duration_text, size_text

WAIT_SECONDS = 600.0
"""How long a run that has ended waits for room: time for a person or a job to clean up."""
FIRST_RETRY_SECONDS, MAX_RETRY_SECONDS = 1.0, 30.0
"""Between two tries; the time doubles. A quota is met only after much of a checkpoint has been written."""
POLL_SECONDS = 0.1
LIVES = "until the machine or its container restarts"
"""How long a snapshot in memory exists."""


@dataclass(frozen=True, kw_only=True)
class OnlyInMemory:
    """Snapshots that are not on disk after the last try.

    Attributes:
        area: the staging area.
        snapshots: newest first; at least one.
        needed_bytes: of all their checkpoints, about.
        failed: why the last try has failed; None if there was none.
        only_model: the script has no model of its own on disk, so the run's last snapshot is all there is.
    """

    area: Path
    snapshots: tuple[StagedSnapshot, ...]
    needed_bytes: int
    failed: DrainFailed | None
    only_model: bool = False

    @classmethod
    def of(cls, drains: DrainScheduler, *, only_model: bool = False) -> OnlyInMemory | None:
        """Return what is in memory only; None if nothing is."""
        left = drains.unwritten()
        if not left:
            return None
        return cls(
            area=drains.staging.path,
            snapshots=tuple(staged for staged, _ in left),
            needed_bytes=sum(slot.checkpoint_bytes(staged) for staged, slot in left),
            failed=drains.last_failure,
            only_model=only_model,
        )

    @property
    def required(self) -> bool:
        """Whether the script or the user asked for one of them, or no other copy of the model is known."""
        return self.only_model or any(staged.scheduled or staged.kept for staged in self.snapshots)

    @property
    def sentence(self) -> str:
        """What is where, for how long, and what it lacks on disk."""
        paths = [str(path_of(staged)) for staged in reversed(self.snapshots)]
        are, they = ("is", "It exists") if len(paths) == 1 else ("are", "They exist")
        return f"{' and '.join(paths)} {are} only in memory, in {self.area}. {they} {LIVES}. {self.lack}"

    @property
    def lack(self) -> str:
        """Why it is not on disk, with the room that is missing."""
        size, failed, place = size_text(self.needed_bytes), self.failed, self.snapshots[0].output_dir
        if failed is None:
            return f"About {size} have to be written."
        if failed.free_bytes is None:
            return f"About {size} could not be written to {place}: {failed.reason}."
        missing = max(0, self.needed_bytes + FULL_BYTES - failed.free_bytes)
        return (
            f"{place} has {size_text(failed.free_bytes)} free and needs {size_text(missing)} more: about"
            f" {size} to write, and {size_text(FULL_BYTES)} that must stay free."
        )


def write_last(
    drains: DrainScheduler,
    *,
    wait_seconds: float,
    interrupted: Callable[[], bool],
    notify: Callable[[str], None],
    only_model: bool = False,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> OnlyInMemory | None:
    """Write what is in memory to disk. Blocks, as `DrainScheduler.flush`, and until there is room.

    Waits for what the script or the user asked for and for the only copy of the model, and for nothing else.

    Args:
        wait_seconds: for how long at most; 0 for a single try.
        interrupted: ends the wait.
        notify: told what is waited for, once.
        only_model: the script has no model of its own on disk.

    Returns:
        what is still in memory only; None if nothing is.
    """
    drains.flush(newest_only=False)
    deadline = clock() + wait_seconds
    left, pause = OnlyInMemory.of(drains, only_model=only_model), FIRST_RETRY_SECONDS
    if left is not None and left.required and wait_seconds and not interrupted():
        notify(
            f"waiting for room, at most {duration_text(wait_seconds)}; a signal ends the wait. {left.lack}"
        )
    while left is not None and left.required and not interrupted() and clock() < deadline:
        retry_at = min(deadline, clock() + pause)
        while clock() < retry_at and not interrupted():
            sleep(POLL_SECONDS)
        pause = min(2 * pause, MAX_RETRY_SECONDS)
        drains.flush(newest_only=False)
        left = OnlyInMemory.of(drains, only_model=only_model)
    return left
