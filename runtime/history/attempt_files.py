"""The files of one attempt: output, stacks, error and socket of each rank.

The supervisor asks for paths by rank and passes them to the ranks. Creates the directory of the attempt;
writes no files into it.
"""

from __future__ import annotations

import contextlib
import json
import os
import tempfile
from pathlib import Path

from grpo_run.runtime.files import SHARED_MEMORY_ROOT
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.watchdog.evidence.incident_files import read_end
from grpo_run.watchdog.json_values import from_json
from grpo_run.watchdog.observation import RankError

MAX_SOCKET_PATH_BYTES = 100
"""`sun_path` of unix(7) has 108 bytes, including the terminating null byte."""
SHORT_DIRECTORY = "/tmp"
"""Where sockets go if the run's path is too long. Not $TMPDIR, which may be as long."""


class AttemptFiles:
    """Paths of one attempt.

    Args:
        run: the run directory.
    """

    def __init__(self, run: RunDirectory, number: int) -> None:
        self._folder = run.attempt(number)
        self._socket_directory: tempfile.TemporaryDirectory[str] | None = None

    def make(self) -> OSError | None:
        """Create the directory; if the disk refuses it, create a temporary directory instead, which is never
        removed.

        Returns:
            why there is a temporary directory; None if there is none.

        Raises:
            OSError: neither can be created.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # left by an attempt of the same number whose journal was lost
            for stale in (*self._folder.glob("rank*.error.json"), *self._folder.glob("rank*.sock")):
                stale.unlink()
            probe = self._folder / ".probe"
            probe.touch(0o600)
            probe.unlink()
        except OSError as error:
            # full, read-only after errors, or not a directory any more: a recovery needs no more than some
            # directory
            self._folder = _temporary_directory(self._folder.name)
            return error
        return None

    @property
    def folder(self) -> Path:
        """The directory of the attempt."""
        return self._folder

    def log(self, rank: int) -> Path:
        """Return the path of the rank's stdout, and of its stderr unless that has a file of its own."""
        return self._folder / f"rank{rank}.log"

    def errors(self, rank: int) -> Path:
        """Return the path of the rank's stderr where standard output and error of the launcher are apart."""
        return self._folder / f"rank{rank}.err"

    def stderr(self, rank: int) -> Path:
        """Return the file that has the rank's stderr."""
        return self.errors(rank) if self.errors(rank).exists() else self.log(rank)

    def output_end(self, rank: int, size_bytes: int) -> str:
        """Return the last bytes of each file that the rank has printed to; "" if they cannot be read."""
        ends = []
        for path in (self.log(rank), self.errors(rank)):
            with contextlib.suppress(OSError):
                ends.append(read_end(path, size_bytes).decode(errors="replace"))
        return "".join(ends)

    def stacks(self, rank: int) -> Path:
        """Return the path that the rank's faulthandler writes to."""
        return self._folder / f"rank{rank}.stacks"

    def error(self, rank: int) -> Path:
        """Return the path that the rank's bootstrap writes an exception to."""
        return self._folder / f"rank{rank}.error.json"

    def socket(self, rank: int) -> Path:
        """Return the path of the worker server's socket; temporary if the run's path is too long."""
        path = self._folder / f"rank{rank}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        if self._socket_directory is None:
            self._socket_directory = tempfile.TemporaryDirectory(prefix="grpo-run-", dir=SHORT_DIRECTORY)
        return Path(self._socket_directory.name) / path.name

    def close(self) -> None:
        """Remove the temporary directory of the sockets, if there is one.

        No rank of the attempt is running.
        """
        if self._socket_directory is not None:
            self._socket_directory.cleanup()
            self._socket_directory = None

    def read_error(self, rank: int) -> RankError | None:
        """Return the exception that the rank's bootstrap wrote; None if there is none or it is truncated."""
        try:
            return from_json(RankError, json.loads(self.error(rank).read_text()))
        except (OSError, ValueError):
            return None  # the verdict then relies on the exit code


def _temporary_directory(name: str) -> Path:
    """Create a directory where temporary files go, or in shared memory if that is full too."""
    prefix = f"grpo-run-{name}-"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY_ROOT))
