"""A checkpoint's directory while it is written, and the rename that makes it a checkpoint.

    .checkpoint-40.partial-1f3a     being written; `.partial.lock` in it is locked for as long as somebody does
    checkpoint-40                   published: its manifest and every byte were on disk before this name was
    .checkpoint-40.replaced-1f3a    the one that had the name before, for the length of two renames
    replaced-checkpoint-40          whatever had the name and was not this call's, such as the script's own; kept
    rejected-checkpoint-40          found bad; kept, with the reason in REJECTED.json

None of the other names is one that transformers takes for a checkpoint or counts when it rotates (it globs
`checkpoint-*`). Called by who saves or rotates, and by the guard for `reject`. Does not decide what is bad or kept.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from grpo_run.runtime.checkpoints.manifest import LOCK, MANIFEST, NAME, read_manifest, sync_directory
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import write_json

PARTIAL = re.compile(r"\.(checkpoint-[0-9]+)\.partial-[0-9a-f]+")
REPLACING = re.compile(r"\.(checkpoint-[0-9]+)\.replaced-[0-9a-f]+")
REPLACED = re.compile(r"replaced-checkpoint-([0-9]+)(\.[0-9]+)?")
REJECTED = re.compile(r"rejected-checkpoint-([0-9]+)(\.[0-9]+)?")
REASON = "REJECTED.json"
_TRIES = 100
UNLOCKED_SECONDS = 3600.0
"""Where the file system has no locks, a partial directory nobody has written to for as long is abandoned."""
_OURS = ("grpo_run", LOCK)
"""In a directory without a manifest, what tells that we began it."""


@contextmanager
def partial_directory(output_dir: Path, step: int) -> Iterator[Path]:
    """A new hidden directory to write `checkpoint-<step>` into, locked while the block runs.

    Publish it inside the block. What was not published by its end is removed.

    Raises:
        OSError: the directory cannot be made.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    path, descriptor = _make(output_dir, step)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # nothing there when it was published
        os.close(descriptor)


def _make(output_dir: Path, step: int) -> tuple[Path, int]:
    for _ in range(_TRIES):
        path = output_dir / f".checkpoint-{step}.partial-{secrets.token_hex(4)}"
        try:
            path.mkdir()
        except FileExistsError:
            continue
        descriptor = None
        try:
            descriptor = _locked(path, create=True, writing=True)
        finally:
            if descriptor is None:
                shutil.rmtree(path, ignore_errors=True)  # who cleans up has its lock, and removes it as well
        if descriptor is not None:
            return path, descriptor
    raise FileExistsError(
        errno.EEXIST, "no directory to write a checkpoint into could be made", str(output_dir)
    )


def _locked(path: Path, *, create: bool, writing: bool = False) -> int | None:
    """The lock of a partial directory, or None when somebody else has it, or it is gone.

    A file system may have no locks (Lustre mounted without `flock`, NFS without its lock service): who writes goes
    on without, and to anybody else the directory is somebody's as long as it changes.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    except OSError:
        if not writing and _written_lately(path):
            os.close(descriptor)
            return None
    return descriptor


def _written_lately(path: Path) -> bool:
    times = [0.0]
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(FileNotFoundError):
                times.append(os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - max(times) < UNLOCKED_SECONDS


def publish(partial: Path, final: Path) -> None:
    """Give a written directory, its manifest included, its name.

    An older directory of that name is moved out of the way first and is put back when the rename fails; a crash
    between the two leaves both on disk, and `clean_partials` puts the older one back. Then one of the same call, or
    one that we left half written, is removed; anything else, another run's or the script's own, is kept under
    `replaced-checkpoint-N`.

    Raises:
        CheckpointError: `partial` has no manifest.
        OSError: the rename failed; the older one is where it was.
    """
    read_manifest(partial)
    aside: Path | None = final.with_name(f".{final.name}.replaced-{secrets.token_hex(4)}")
    assert aside is not None
    try:
        os.rename(final, aside)
    except FileNotFoundError:
        aside = None
    try:
        os.rename(partial, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    sync_directory(final.parent)
    if aside is not None:
        with suppress(OSError):  # the new one is there; `clean_partials` tries again
            _dispose(aside, final)
    with suppress(OSError):  # in the way of nobody
        (final / LOCK).unlink()


def _dispose(aside: Path, final: Path) -> None:
    """Remove what a published checkpoint has replaced when it is the same call's, or ours and half written."""
    try:
        keep = read_manifest(aside).call_of_run != read_manifest(final).call_of_run
    except CheckpointError:
        keep = not _half_written(aside)
    if keep:
        _rename_to_free(aside, final.with_name(f"replaced-{final.name}"))
        sync_directory(final.parent)
    else:
        remove(aside, final.name)


def remove(path: Path, name: str) -> None:
    """Remove a checkpoint, its name first: half removed, it could not be told from somebody's own any more.

    Args:
        path: where it lies.
        name: `checkpoint-N`, which it is or was. What a crash leaves of it, `clean_partials` takes for a partial one.

    Raises:
        OSError: it could not be renamed, and is as it was.
    """
    doomed = path.with_name(f".{name}.partial-{secrets.token_hex(4)}")
    os.rename(path, doomed)
    shutil.rmtree(doomed, ignore_errors=True)


def _half_written(path: Path) -> bool:
    """Nothing is in it, or we had begun it and it never became a checkpoint. In doubt it is somebody's."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    if MANIFEST in names:
        return False
    return not names or any(name in _OURS or name.startswith(f".{MANIFEST}") for name in names)


def _rename_to_free(path: Path, wanted: Path) -> Path:
    """Rename to `wanted`, or `wanted.2`, `.3` … when it is taken. Raises OSError."""
    for number in range(1, _TRIES + 1):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}.{number}")
        if target.exists() or target.is_symlink():
            continue
        os.rename(path, target)
        return target
    raise FileExistsError(f"{wanted} and {_TRIES - 1} names after it are taken")


def is_abandoned(path: Path) -> bool:
    """Nobody holds the lock of a partial directory, so nobody writes it any more."""
    descriptor = _locked(path, create=False)
    if descriptor is None:
        return not (path / LOCK).exists()
    os.close(descriptor)
    return True


def clean_partials(output_dir: Path) -> list[Path]:
    """Remove what died half written, and put back what a crash left without its name.

    Leaves alone every partial directory whose lock somebody holds, and everything of the same step.

    Returns:
        what was removed or renamed, by its old name.
    """
    try:
        names = sorted(os.listdir(output_dir))
    except OSError:
        return []
    done, busy = [], set()
    for name in names:
        match = PARTIAL.fullmatch(name)
        if match is None or not (output_dir / name).is_dir():
            continue
        # made when it is not there: who had just made the directory finds it taken, and makes another
        try:
            descriptor = _locked(output_dir / name, create=True)
        except OSError:
            descriptor = None  # another user's, or a disk that takes nothing: not ours to remove
        if descriptor is None:
            busy.add(match[1])
            continue
        shutil.rmtree(output_dir / name, ignore_errors=True)
        os.close(descriptor)
        done.append(output_dir / name)
    for name in names:
        match = REPLACING.fullmatch(name)
        if match is None or match[1] in busy:
            continue
        aside, final = output_dir / name, output_dir / match[1]
        with suppress(OSError):  # another process has just done the same
            if final.exists():
                _dispose(aside, final)
            else:
                os.rename(aside, final)
                sync_directory(output_dir)
            done.append(aside)
    return done


def reject(path: Path, reason: str) -> Path | None:
    """Rename a bad checkpoint so that nobody takes it for one, and leave the reason in it. Deletes nothing.

    Returns:
        where it lies now; None when it could not be renamed (a read-only file system), which is no error: who
        asked passes it over.
    """
    assert NAME.fullmatch(path.name), path
    try:
        moved = _rename_to_free(path, path.with_name(f"rejected-{path.name}"))
    except OSError:
        return None
    with suppress(OSError):  # a full disk: the journal has the reason too
        write_json(moved / REASON, {"reason": reason, "was": str(path), "time": round(time.time(), 3)})
        sync_directory(moved.parent)
    return moved
