"""The run directory: where a run keeps its journal, board, logs and incidents, and who may write there.

    runs/<run-id>/            mode 0700
      run.json                what was asked for: command, world, versions
      journal.jsonl  board.mmap  lock
      attempts/000/rank0.log  what the ranks printed, a file a rank
      incidents/0001-signal/  verdict.json and evidence

Used by the supervisor (owner, holds the lock) and by the commands that look at a run (readers).
Checkpoints are not here: they stay in the script's `output_dir`.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import write_json

DEFAULT_ROOT = Path("runs")
LOCK_SECONDS = 0.2


def default_run_id(target: str, command: Sequence[str]) -> str:
    """The script's name and a short digest of the command, so that the same command finds its run again.

    Args:
        target: the script's path or module name.
        command: everything that makes the run what it is; flags that differ by node are left out by the caller.
    """
    name = re.sub(
        r"[^A-Za-z0-9_.-]+", "-", Path(target).stem if "/" in target or target.endswith(".py") else target
    )
    digest = hashlib.sha256("\0".join([os.getcwd(), *command]).encode(errors="surrogateescape")).hexdigest()[
        :6
    ]
    return f"{name.strip('-.') or 'run'}-{digest}"


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Paths of one run, and its lock."""

    path: Path

    @property
    def journal(self) -> Path:
        return self.path / "journal.jsonl"

    @property
    def board(self) -> Path:
        return self.path / "board.mmap"

    @property
    def run_json(self) -> Path:
        return self.path / "run.json"

    @property
    def lock(self) -> Path:
        return self.path / "lock"

    @property
    def incidents(self) -> Path:
        return self.path / "incidents"

    def attempt(self, number: int) -> Path:
        """The directory of one attempt's logs."""
        return self.path / "attempts" / f"{number:03d}"

    def create(self) -> None:
        """Make the directory (0700) and its folders.

        Raises:
            RunDirectoryError: it cannot be made or written.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
            for folder in (self.path / "attempts", self.incidents):
                folder.mkdir(exist_ok=True, mode=0o700)
            probe = self.path / f".probe-{os.getpid()}"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {self.path} cannot be written: {error.strerror or error};"
                " give another with --run-dir"
            ) from error

    def acquire(self) -> int:
        """Become the only supervisor of this run. Returns the locked descriptor; hold it open for life.

        Raises:
            RunDirectoryError: a live supervisor holds it (its pid is named).
        """
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            _lock(descriptor)
        except BlockingIOError:
            owner = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            os.close(descriptor)
            raise RunDirectoryError(
                f"run directory {self.path} is in use by a live supervisor (pid {owner or 'unknown'});"
                " stop it with `grpo-run stop`, or give another --run-id"
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        return descriptor

    def owner(self) -> int | None:
        """The pid of the live supervisor, or None when nobody holds the lock."""
        try:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            text = os.pread(descriptor, 32, 0).decode(errors="replace").strip()
            return int(text) if text.isdigit() else None
        finally:
            os.close(descriptor)
        return None

    def write_run(self, fields: dict[str, Any]) -> None:
        """Write `run.json` by rename."""
        write_json(self.run_json, fields)

    def read_run(self) -> dict[str, Any]:
        """`run.json`.

        Raises:
            RunDirectoryError: it is missing or not JSON.
        """
        try:
            value = json.loads(self.run_json.read_text())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.path} is not a run directory: run.json: {error}") from error
        if not isinstance(value, dict):
            raise RunDirectoryError(f"{self.run_json} is not a JSON object")
        return value


def _lock(descriptor: int) -> None:
    """Take the lock, waiting out whoever only looks who holds it."""
    deadline = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            return fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.01)


def find_run(path: str | None, root: Path = DEFAULT_ROOT) -> RunDirectory:
    """The run a command means: the directory given, a run id under `root`, or the newest run there.

    Raises:
        RunDirectoryError: there is none.
    """
    if path is not None:
        for candidate in (Path(path), root / path):
            if (candidate / "run.json").is_file():
                return RunDirectory(path=candidate)
        raise RunDirectoryError(f"{path} is not a run directory (no run.json in it, nor under {root}/)")
    runs = sorted(root.glob("*/run.json"), key=lambda file: file.stat().st_mtime)
    if not runs:
        raise RunDirectoryError(f"no run under {root}/; name a run directory")
    return RunDirectory(path=runs[-1].parent)
