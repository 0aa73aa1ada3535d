"""`grpo-run` whose supervisor fails on request, so that tests see what becomes of the ranks.

TEST_FAILURE='poll' python -P tests/support/failing_launch.py launch …

    poll         an exception in the hang detector once a file `fail` exists
    start        an exception while the second attempt is prepared
    thread       an exception in the thread that follows the ranks' output
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path


def fail_in_poll() -> None:
    """Let the detector raise once."""
    from grpo_run.runtime.supervisor.detection.detector import HangDetector

    scan = HangDetector.scan

    def failing(self: HangDetector, slots: object) -> object:
        if Path("fail").exists():
            raise KeyError("a rank that is not there")
        return scan(self, slots)  # type: ignore[arg-type]

    HangDetector.scan = failing  # type: ignore[method-assign, assignment]


def fail_in_start() -> None:
    """Let the preparation of the second attempt raise."""
    from grpo_run.runtime.supervisor.attempt import Attempt

    make_files = Attempt.make_files

    def failing(self: Attempt, notify: object) -> None:
        if self.number == 1:
            raise PermissionError(13, "Permission denied")
        make_files(self, notify)  # type: ignore[arg-type]

    Attempt.make_files = failing  # type: ignore[method-assign, assignment]


def fail_in_thread() -> None:
    """Let the thread that follows output raise."""
    from grpo_run.runtime.processes.output import FileFollower

    read = FileFollower.read

    def failing(self: FileFollower) -> bytes:
        if threading.current_thread() is not threading.main_thread():
            raise MemoryError
        return read(self)

    FileFollower.read = failing  # type: ignore[method-assign]


if __name__ == "__main__":
    from grpo_run.cli.main import main

    {"poll": fail_in_poll, "start": fail_in_start, "thread": fail_in_thread}[os.environ["TEST_FAILURE"]]()
    sys.exit(main())
