"""The run directory: journal, board, logs and incidents of a run, and the lock of its supervisor.

    runs/<run-id>/            mode 0700
      run.json                configuration: command, world size, versions
      journal.jsonl           events
      supervisor.jsonl        events that are of no rank, as a log of bounded size
      board.mmap              one slot per rank
      host_memory.mmap        the last sample of the host's memory
      hosts.json              the hosts of a run over several, as this one has heard them last
      lock                    held by the supervisor, whose identity it has
      processes.json          the last supervisor, and the token of its ranks
      imports.json            digests of the user's files that the ranks have imported
      fences.json             in a run over several hosts, how this one changes checkpoints
      attempts/000/rank0.log  output, one file per rank, or with rank0.err one for each stream
      attempts/000/output.times  where in these files was written when, every 15 s
      attempts/000/rank0.jsonl  events of a rank, as a log of bounded size
      incidents/0001-signal/  verdict.json and evidence
      checkpoint_backups/     links to checkpoints, while the script starts
      memory_facts.json       what decides how the last `train()` call could use less memory
      ledger/rank0.jsonl      prompts and lengths of what a rank has generated
      completions/rank0.jsonl  the last completions of a rank, with `--log-completions`
      steps/rank0.jsonl       what a rank has computed in each step, with `--keep-every`
      replay/                 what `grpo-run replay` runs, until it has compared

The supervisor owns the directory and holds the lock; commands that display a run only read. Checkpoints are
not here: they stay in the script's `output_dir`.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.files import NO_SPACE_ERRNOS, lock_file, sees_lock, show_lock, write_json
from grpo_run.runtime.memory import files
from grpo_run.runtime.processes.identity import ProcessIdentity, own_identity
from grpo_run.watchdog.json_values import from_json

DEFAULT_ROOT = Path("runs")
LOCK_WAIT_SECONDS = 0.2
"""How long to wait for a launch that was refused and holds the lock for a moment. Commands that only look do
not take it.
"""
ID_DIGITS = 6
MAX_LOCK_BYTES = 4096
WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH


def default_run_id(target: str, command: Sequence[str]) -> str:
    """Return the script's name and a short digest of the command.

    The same command gives the same id, so it finds its run again.

    Args:
        target: path of the script, or name of the module.
        command: words that identify the run. The caller omits flags that differ between nodes.
    """
    name = Path(target).stem if "/" in target or target.endswith(".py") else target
    name = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-.")
    text = "\0".join([os.getcwd(), *command])
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()
    return f"{name or 'run'}-{digest[:ID_DIGITS]}"


class _Inside:
    """A file or folder in the run directory."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, run: RunDirectory, kind: type[RunDirectory]) -> Path:
        return run.path / self.name


@dataclass(frozen=True, kw_only=True)
class RunDirectory:
    """Paths and lock of one run. The beginning of this module says what each path is."""

    path: Path

    journal = _Inside("journal.jsonl")
    log = _Inside("supervisor.jsonl")
    board = _Inside("board.mmap")
    completions = _Inside("completions")
    steps = _Inside("steps")
    replay = _Inside("replay")
    run_json = _Inside("run.json")
    lock = _Inside("lock")
    host_memory = _Inside("host_memory.mmap")
    hosts = _Inside("hosts.json")
    processes = _Inside("processes.json")
    imports = _Inside("imports.json")
    incidents = _Inside("incidents")
    checkpoint_backups = _Inside("checkpoint_backups")

    def own_files(self) -> list[Path]:
        """Return the files and folders in the directory that grpo-run has written, also temporary ones."""
        try:
            return [self.path / name for name in sorted(os.listdir(self.path)) if _OWN_NAME.fullmatch(name)]
        except OSError:
            return []

    def attempt(self, number: int) -> Path:
        """Return the directory of one attempt."""
        return self.path / "attempts" / f"{number:03d}"

    def create(self) -> str | None:
        """Create the directory (mode 0700) and its folders, unless they exist.

        An empty directory that other users can write gets mode 0700.

        Returns:
            what was changed, for the user; None if nothing was.

        Raises:
            RunDirectoryError: it cannot be created or written, or another user could replace files of the
                run.
        """
        changed = None
        try:
            try:
                self.path.mkdir(parents=True, mode=0o700)
            except FileExistsError:
                changed = self._claim()
            for folder in (self.path / "attempts", self.incidents):
                folder.mkdir(exist_ok=True, mode=0o700)
            self._probe()
        except OSError as error:
            raise RunDirectoryError(
                f"run directory {self.path} cannot be written: {error.strerror or error};"
                " choose another with --run-dir"
            ) from error
        return changed

    def _probe(self) -> os.stat_result:
        """Return the status of a new file of mode 0600 in the directory, which is removed again. Raises
        OSError.
        """
        probe = self.path / f".probe-{os.getpid()}"
        descriptor = os.open(probe, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            return os.fstat(descriptor)
        finally:
            os.close(descriptor)
            probe.unlink()

    def _claim(self) -> str | None:
        """Take an existing directory, if only this user can write it. Returns and raises as `create`."""
        directory, own = self.path.stat(), self._probe()
        # compared with a file of ours, because a network file system may give root another number
        present = list(self.path.iterdir())
        for path in (self.path, *(path for path in present if path.name in OWN_NAMES)):
            owner = directory.st_uid if path == self.path else path.lstat().st_uid
            if owner != own.st_uid:
                raise RunDirectoryError(
                    f"run directory {self.path}: {path} belongs to another user ({owner}), who could replace"
                    " files of the run; choose another with --run-dir"
                )
        mode = stat.S_IMODE(directory.st_mode)
        if not mode & WRITABLE_BY_OTHERS or own.st_mode & 0o077:
            return None  # or the file system has no modes
        if present:
            raise RunDirectoryError(
                f"run directory {self.path} can be written by other users (mode {mode:04o}), who could"
                f" replace files of the run; use `chmod 700 {self.path}`, or choose another with --run-dir"
            )
        self.path.chmod(0o700)
        return (
            f"run directory {self.path} could be written by other users (mode {mode:04o}); its mode is"
            " 0700 now"
        )

    def acquire(self) -> int:
        """Become the only supervisor of this run.

        Returns:
            the descriptor that holds the lock; keep it open.

        Raises:
            RunDirectoryError: a live supervisor holds the lock; the message names its process id. Or the
                file system has no locks.
        """
        descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if not lock_file(descriptor, LOCK_WAIT_SECONDS):
            owner = _read_identity(descriptor)
            os.close(descriptor)
            pid = owner.pid if owner is not None else "unknown"
            raise RunDirectoryError(
                f"run directory {self.path} is in use by a live supervisor (pid {pid});"
                " stop it with `grpo-run stop`, or choose another --run-id"
            )
        try:
            show_lock(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise RunDirectoryError(
                f"run directory {self.path} is on a file system without locks ({error.strerror}); choose"
                " another with --run-dir"
            ) from error
        line = f"{json.dumps(vars(own_identity()))}\n".encode()
        os.ftruncate(descriptor, os.pwrite(descriptor, line, 0))
        return descriptor

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep supervisors away during the block. Raises as `acquire`."""
        descriptor = self.acquire()
        try:
            yield
        finally:
            os.close(descriptor)

    def owner(self) -> int | None:
        """Return the process id of the live supervisor; None if no process holds the lock.

        It may be a pid of another container or machine: use `supervisor` for more than a message.
        """
        supervisor = self.supervisor()
        return supervisor.pid if supervisor is not None else None

    def supervisor(self) -> ProcessIdentity | None:
        """Return the live supervisor; None if no process holds the lock. The lock is not taken for it."""
        with contextlib.suppress(OSError), open(self.lock, "rb", buffering=0) as file:
            if sees_lock(file.fileno()):
                return _read_identity(file.fileno())
        return None

    def write_run(self, fields: dict[str, Any]) -> None:
        """Write `run.json` atomically, unless it has this content.

        Raises:
            RunDirectoryError: it cannot be written; the old content is unchanged.
        """
        if self.run_json.is_file() and self.read_run() == fields:
            return
        try:
            write_json(self.run_json, fields)
        except OSError as error:
            reason = "the disk is full" if error.errno in NO_SPACE_ERRNOS else (error.strerror or str(error))
            raise RunDirectoryError(f"{self.run_json} cannot be written: {reason}") from error

    def recorded(self) -> dict[str, Any]:
        """Return the contents of `run.json`; empty if no launch has written it. Raises as `read_run`."""
        return self.read_run() if self.run_json.is_file() else {}

    def read_run(self) -> dict[str, Any]:
        """Return the contents of `run.json`.

        Raises:
            RunDirectoryError: it is missing or is not a JSON object.
        """
        try:
            value = json.loads(self.run_json.read_text())
        except (OSError, ValueError) as error:
            raise RunDirectoryError(f"{self.path} is not a run directory: run.json: {error}") from error
        if not isinstance(value, dict):
            raise RunDirectoryError(f"{self.run_json} is not a JSON object")
        return value


OWN_NAMES = (
    *(inside.name for inside in vars(RunDirectory).values() if isinstance(inside, _Inside)),
    "supervisor.1.jsonl",
    "attempts",
    "report.html",
    "trace.json.gz",
    files.FILE_NAME,
    fencing.RECORD,
    "plan_traces",
    "rollout-server.log",
    "memory_forecast",  # of earlier releases, whose runs are continued, as is the next
    "memory_trace",
    "ledger",
)
"""What grpo-run writes into a run directory. `--run-dir` may name a directory with files of the user."""
_NAMES = "|".join(map(re.escape, OWN_NAMES))
_OWN_NAME = re.compile(rf"{_NAMES}|(?:board|host_memory)\.mmap\.new|\.({_NAMES})\..*|\.probe-[0-9]+")
"""With the temporary names of files that are replaced, which a killed process leaves."""


def supervisor_to_ask(run: RunDirectory) -> ProcessIdentity:
    """Return the live supervisor of a run, which shares memory with this process.

    Raises:
        RunDirectoryError: there is none, or it runs on another machine.
    """
    supervisor = run.supervisor()
    if supervisor is None:
        raise RunDirectoryError(f"no run is active in {run.path}")
    if not supervisor.is_on_this_machine:
        raise RunDirectoryError(
            f"the run in {run.path} is supervised on another machine ({supervisor.host or 'unknown'}, pid"
            f" {supervisor.pid}); use this command there"
        )
    return supervisor


def _read_identity(descriptor: int) -> ProcessIdentity | None:
    """Return the supervisor that a lock file names; None if it names none."""
    try:
        line = os.pread(descriptor, MAX_LOCK_BYTES, 0).partition(b"\n")[0]
        return from_json(ProcessIdentity, json.loads(line))
    except ValueError:
        return None
