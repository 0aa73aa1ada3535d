"""A run in the working directory."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from grpo_run.runtime.history.run_directory import RunDirectory


@pytest.fixture
def run(here: Path) -> RunDirectory:
    """The directory of a run, `runs/night`, without a journal and a supervisor."""
    directory = RunDirectory(path=here / "runs" / "night")
    directory.create()
    directory.write_run({"run_id": "night"})
    return directory


@pytest.fixture
def owned(run: RunDirectory) -> Iterator[int]:
    """The same run, locked by this process: the descriptor that holds the lock."""
    lock = run.acquire()
    yield lock
    with contextlib.suppress(OSError):  # a test may have let it go
        os.close(lock)
