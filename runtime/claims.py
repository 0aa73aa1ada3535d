"""Which run trains into an output directory: one live run at a time.

    /tmp/grpo-run-claims/3c1f0a9be2d47a65.1000     digest of the directory's real path, and the user's number

A claim names the run and its supervisor. It counts as long as the supervisor lives, also between two attempts
of its ranks, and needs not be given back: the lock of the run directory tells whether the supervisor lives,
and for a run of another user its process does. Claims are read and written under a lock of the folder, so of
two launches in the same moment one is refused. Nothing is written into the output directory.

Called on rank 0, before a `train()` call or a loop touches its directory
(`runtime/rank/step/resume.py`). Not seen: runs on other machines, and in containers with a `/tmp` of their
own; and scripts that use neither a Trainer nor a loop, whose directory is not known.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from grpo_run.runtime.errors import RunDirectoryError, UsageError
from grpo_run.runtime.files import lock_file, replace_file
from grpo_run.runtime.history.reader import RunReader
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.processes.identity import ProcessIdentity
from grpo_run.watchdog.json_values import from_json, to_json

FOLDER = Path("/tmp/grpo-run-claims")
"""Of all users of the machine; a user can replace and remove only files of its own."""
FOLDER_MODE, FILE_MODE = 0o1777, 0o644
LOCK_SECONDS = 10.0
MAX_CLAIM_BYTES = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A run's claim on an output directory.

    Attributes:
        run_id: of the run.
        run_directory: its path.
        output_dir: what it trains into, without symbolic links.
        supervisor: of the run.
    """

    run_id: str
    run_directory: str
    output_dir: str
    supervisor: ProcessIdentity

    @property
    def is_live(self) -> bool:
        """Whether the run's supervisor lives."""
        run = RunDirectory(path=Path(self.run_directory))
        if os.access(run.lock, os.R_OK):
            return run.supervisor() is not None
        return self.supervisor.is_visible and self.supervisor.is_alive  # another user's

    @property
    def sentence(self) -> str:
        """The live run, and what the user can do."""
        run = self.run_directory
        at = ""
        with contextlib.suppress(RunDirectoryError, OSError):  # another user's
            at = f", at step {RunReader(RunDirectory(path=Path(run))).read().history.step}"
        return (
            f"run {self.run_id} trains into {self.output_dir} and is live in {run} (pid"
            f" {self.supervisor.pid}{at}); watch it with `grpo-run status {run}`, stop it with `grpo-run stop"
            f" {run}`, or give this launch another output directory"
        )


def claim(output_dir: str, run: RunDirectory, run_id: str, *, folder: Path = FOLDER) -> str | None:
    """Claim an output directory for a live run.

    Args:
        output_dir: the script's.
        run: the run directory of the run.
        run_id: of the run.
        folder: of all claims.

    Returns:
        why nothing could be claimed, so that a second run would not be noticed; None if it was.

    Raises:
        UsageError: another run is live in it.
    """
    supervisor = run.supervisor()
    if supervisor is None:
        return None  # the supervisor is gone, and the ranks are about to end
    wanted = os.path.realpath(output_dir)
    own = Claim(
        run_id=run_id, run_directory=os.path.realpath(run.path), output_dir=wanted, supervisor=supervisor
    )
    name = hashlib.sha256(os.fsencode(wanted)).hexdigest()[:16]
    try:
        with _locked(folder):
            for other in _claims(folder, f"{name}.*"):
                taken = other.output_dir == wanted and other.run_directory != own.run_directory
                if taken and other.is_live:
                    raise UsageError(other.sentence)
            _remove_dead(folder)
            file = folder / f"{name}.{os.getuid()}"
            replace_file(file, json.dumps(to_json(own)).encode())
            file.chmod(FILE_MODE)  # whatever the umask is: runs of other users read it
    except OSError as error:
        return f"a second run in {output_dir} would not be noticed: {folder}: {error.strerror or error}"
    return None


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with contextlib.suppress(FileExistsError):
        folder.mkdir()
        folder.chmod(FOLDER_MODE)  # whatever the umask is
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        if not lock_file(descriptor, LOCK_SECONDS):
            raise OSError(f"locked for {LOCK_SECONDS:g} s")
        yield
    finally:
        os.close(descriptor)


def _claims(folder: Path, pattern: str) -> Iterator[Claim]:
    for path in sorted(folder.glob(pattern)):
        with contextlib.suppress(OSError, ValueError), open(path, "rb") as file:  # removed, or not ours
            yield from_json(Claim, json.loads(file.read(MAX_CLAIM_BYTES)))


def _remove_dead(folder: Path) -> None:
    """Remove this user's claims of runs that have ended."""
    for path in folder.glob(f"*.{os.getuid()}"):
        with contextlib.suppress(OSError):
            if not any(one.is_live for one in _claims(folder, path.name)):
                path.unlink()
