"""Where one attempt keeps its files: a rank's output, stacks, error and socket.

The supervisor asks for paths by rank; ranks are told them in their settings. Makes the attempt's directory, and
writes nothing into it.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

from grpo_run.runtime.files import NO_SPACE_ERRNOS, SHARED_MEMORY_ROOT
from grpo_run.runtime.record.run_directory import RunDirectory
from grpo_run.watchdog.observation import RankError

MAX_SOCKET_PATH_BYTES = 100
"""`sun_path` of unix(7) has 108, its end included."""
SHORT_DIRECTORY = "/tmp"  # $TMPDIR may be as long as the run's own path


def _elsewhere(name: str) -> Path:
    """A new directory where temporary files go, or in memory when that is full too."""
    prefix = f"grpo-run-{name}-"
    try:
        return Path(tempfile.mkdtemp(prefix=prefix))
    except OSError:
        return Path(tempfile.mkdtemp(prefix=prefix, dir=SHARED_MEMORY_ROOT))


class AttemptFiles:
    """The files of attempt `number` of a run."""

    def __init__(self, run: RunDirectory, number: int) -> None:
        self._folder = run.attempt(number)
        self._short: tempfile.TemporaryDirectory[str] | None = None

    def make(self) -> Path | None:
        """Make the attempt's directory, or on a full disk a temporary one, which is not removed.

        Returns:
            where the latter is.

        Raises:
            OSError: neither can be made.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            # of an attempt of the same number that no journal knows: its errors and sockets are nobody's now
            for stale in (*self._folder.glob("rank*.error.json"), *self._folder.glob("rank*.sock")):
                stale.unlink()
            probe = self._folder / ".room"  # ranks make files in it
            probe.touch(0o600)
            probe.unlink()
        except OSError as error:
            if error.errno not in NO_SPACE_ERRNOS:
                raise
            self._folder = _elsewhere(self._folder.name)
            return self._folder
        return None

    def log(self, rank: int) -> Path:
        """The rank's output."""
        return self._folder / f"rank{rank}.log"

    def stacks(self, rank: int) -> Path:
        """Where the rank's faulthandler writes."""
        return self._folder / f"rank{rank}.stacks"

    def error(self, rank: int) -> Path:
        """Where the rank's bootstrap writes what was raised."""
        return self._folder / f"rank{rank}.error.json"

    def socket(self, rank: int) -> Path:
        """Where the rank's worker server listens; in a directory of its own where the run's path is too long."""
        path = self._folder / f"rank{rank}.sock"
        if len(os.fsencode(path)) <= MAX_SOCKET_PATH_BYTES:
            return path
        if self._short is None:
            self._short = tempfile.TemporaryDirectory(prefix="grpo-run-", dir=SHORT_DIRECTORY)
        return Path(self._short.name) / path.name

    def read_error(self, rank: int) -> RankError | None:
        """What the rank's bootstrap wrote about an exception; None when it had no time to."""
        try:
            value = json.loads(self.error(rank).read_text())
            location = value["location"]
            return RankError(
                type=str(value["type"]),
                message=str(value["message"]),
                traceback=str(value["traceback"]),
                location=(str(location[0]), int(location[1]), str(location[2])) if location else None,
                wall_time=float(value["wall_time"]),
            )
        except (OSError, ValueError, TypeError, LookupError):
            return None  # cut short, or not ours: the exit code has to do
