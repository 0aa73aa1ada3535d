"""Records the history of an allocator, and saves snapshots of it.

Made by `attach.py`. Begins once the script has initialized CUDA. Where the script records the history itself, its settings stay, and
snapshots show what it has recorded. What fails is a warning: the training goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from grpo_run.runtime.files import replace_file
from grpo_run.trainers.memory_trace.snapshots.allocator import Allocator
from grpo_run.trainers.memory_trace.snapshots.policy import (
    MOST_BYTES,
    MOST_ENTRIES,
    Reason,
    SnapshotPolicy,
    TooLarge,
    file_name,
    pickled_within,
)


class AllocatorHistory:
    """The history of one rank's allocator.

    Args:
        allocator: whose history it is.
        folder: for the files; made with mode 0700 when there is one to save.
        rank: names the files.
        saved: called with a file's path, the reason, its bytes and the entries of its history.
        warn: called with what could not be done, in a sentence.
        most_bytes: of a file.
    """

    def __init__(
        self,
        allocator: Allocator,
        folder: Path,
        rank: int,
        *,
        saved: Callable[[Path, Reason, int, int], object],
        warn: Callable[[str], object],
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._allocator = allocator
        self._folder = folder
        self._rank = rank
        self._saved = saved
        self._warn = warn
        self._most_bytes = most_bytes
        self._policy = SnapshotPolicy()
        self._begun = False
        self._active = True

    def begin(self) -> None:
        """Record from now on, if the script uses the allocator; call it again until it does."""
        if self._begun or not self._active or not self._allocator.is_ready():
            return
        self._begun = True
        try:
            if not self._allocator.is_recording():
                self._allocator.record(MOST_ENTRIES)
            self._allocator.observe_out_of_memory(self.out_of_memory)
        except (RuntimeError, AttributeError) as error:  # another allocator, or names of another torch
            self._active = False
            self._warn(f"the history of the CUDA allocator cannot be recorded: {_first_line(error)}")

    def end(self) -> None:
        """Save nothing any more; called in a process that was forked from the rank."""
        self._active = False

    def found(self) -> None:
        """The trace has found something."""
        self._save(Reason.finding)

    def out_of_memory(self) -> None:
        """Memory has run out, in any thread."""
        self._save(Reason.out_of_memory)

    def script_ended(self) -> None:
        """The script has run its last line."""
        self._save(Reason.end)

    def _save(self, reason: Reason) -> None:
        if not (self._begun and self._active and self._policy.takes(reason)):
            return
        try:
            if not self._allocator.is_recording():
                return  # the script has ended it
            content, entries = pickled_within(self._allocator.snapshot(), self._most_bytes)
            path = self._folder / file_name(self._rank, reason)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(path, content)
        except TooLarge:
            self._warn(
                f"no snapshot of the CUDA allocator is saved: it is larger than {self._most_bytes} bytes"
            )
        # an exception would take the place of the one that says that memory has run out
        except (OSError, RuntimeError, MemoryError, TypeError, ValueError, AttributeError) as error:
            self._warn(f"no snapshot of the CUDA allocator is saved: {_first_line(error)}")
        else:
            self._saved(path, reason, len(content), entries)


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
