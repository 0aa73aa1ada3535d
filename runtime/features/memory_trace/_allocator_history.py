"""Record the history of the CUDA allocator and save snapshots of it, within a bound.

Made by `rank.py`. Recording begins when the script initializes CUDA; where the script records the history
itself, its settings stay. An attempt saves three snapshots at most: at the first alarm, when
memory runs out for the first time, and at the end of the script. The last replaces the first, of which it
shows everything that is still alive.

What fails is a warning: the training goes on.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.memory_trace.events import AllocatorSnapshotSaved
from grpo_run.runtime.files import replace_file
from grpo_run.runtime.upstream.memory_names import CudaAllocator

FOLDER = "memory_trace"
"""In the run directory: one snapshot of each rank, and one more if it has run out of memory."""
MOST_ENTRIES = 50_000
"""Entries of the ring buffer, for each device: dozens of steps of a small model, or a few of a large one."""
MOST_BYTES = 64 << 20
"""Size of a file. An entry with its stacks takes several KB, most of which are shared in the file."""
PROTOCOL = 4
"""Of pickle: the default of the Pythons that PyTorch's viewer was written for."""


def pickled_within(snapshot: dict[str, Any], most_bytes: int) -> tuple[bytes, int]:
    """Return a snapshot as a file's content, with as much of the newest history as fits, and its entries.

    Args:
        snapshot: of the allocator; its history is in `device_traces`, one list for each device, oldest first.
        most_bytes: that the content may have.

    Raises:
        ValueError: it does not fit without any history either.
    """
    traces = snapshot.get("device_traces", [])
    longest = max(map(len, traces), default=0)
    while True:
        newest = [trace[max(0, len(trace) - longest) :] for trace in traces]
        content = pickle.dumps({**snapshot, "device_traces": newest}, protocol=PROTOCOL)
        if len(content) <= most_bytes:
            return content, sum(map(len, newest))
        if longest == 0:
            raise ValueError(f"it is larger than {most_bytes} bytes")
        longest //= 2


class AllocatorHistory:
    """The history of one rank's allocator.

    Args:
        run_directory: gets a folder with mode 0700 when there is a file to save.
        rank: names the files.
        step: returns the last step.
        write: takes the event of each file.
        warn: called with what could not be done, in a sentence.
        allocator: whose history it is.
        most_bytes: of a file.
    """

    def __init__(
        self,
        run_directory: Path,
        rank: int,
        *,
        step: Callable[[], int],
        write: Callable[[Event], object],
        warn: Callable[[str], object],
        allocator: CudaAllocator | None = None,
        most_bytes: int = MOST_BYTES,
    ) -> None:
        self._folder, self._rank = run_directory / FOLDER, rank
        self._step, self._write, self._warn = step, write, warn
        self._allocator, self._most_bytes = allocator or CudaAllocator(), most_bytes
        self._taken: set[str] = set()
        self._begun = self._ended = False

    def await_cuda(self, module: Any) -> None:
        """Record once CUDA is initialized.

        Args:
            module: `torch.cuda`.
        """
        self._allocator.when_ready(self._begin)

    def _begin(self) -> None:
        if self._ended:
            return
        try:
            if not self._allocator.is_recording():
                self._allocator.record(MOST_ENTRIES)
            self._allocator.observe_out_of_memory(self.out_of_memory)
            self._begun = True
        except Exception as error:  # noqa: BLE001 - another allocator, or names of another torch; it would fail CUDA
            self._warn(f"the history of the CUDA allocator cannot be recorded: {_first_line(error)}")

    def end(self) -> None:
        """Save nothing any more; called in a process that was forked from the rank."""
        self._ended = True

    def found(self) -> None:
        """The trace has found something."""
        self._save("finding", f"rank-{self._rank}.pickle")

    def out_of_memory(self) -> None:
        """Memory has run out, in any thread. No later snapshot replaces this one."""
        self._save("out of memory", f"rank-{self._rank}-out-of-memory.pickle")

    def script_ended(self) -> None:
        """The script has run its last line."""
        self._save("end of the script", f"rank-{self._rank}.pickle")

    def _save(self, reason: str, name: str) -> None:
        if not self._begun or self._ended or reason in self._taken:
            return
        self._taken.add(reason)
        try:
            if not self._allocator.is_recording():
                return  # the script has ended it
            content, entries = pickled_within(self._allocator.snapshot(), self._most_bytes)
            self._folder.mkdir(mode=0o700, exist_ok=True)
            replace_file(self._folder / name, content)
        except Exception as error:  # noqa: BLE001 - it would take the place of the one that says that memory has run out
            self._warn(f"no snapshot of the CUDA allocator is saved: {_first_line(error)}")
            return
        self._write(
            AllocatorSnapshotSaved(
                rank=self._rank, step=self._step(), path=f"{FOLDER}/{name}", reason=reason,
                bytes=len(content), entries=entries,
            )
        )  # fmt: skip


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).partition("\n")[0][:200]
