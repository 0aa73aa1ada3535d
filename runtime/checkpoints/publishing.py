"""Write a checkpoint in a partial directory and publish it by rename.

    .checkpoint-40.partial-1f3a     being written; the writer holds the lock on `.partial.lock` in it
    checkpoint-40                   published: manifest and files were on disk before this name existed
    .checkpoint-40.replaced-1f3a    the directory that had the name before, between two renames
    replaced-checkpoint-40          a directory of that name that another run or the script wrote; kept
    rejected-checkpoint-40          found damaged; kept, with the reason in REJECTED.json

Transformers ignores all names but `checkpoint-40` when it resumes or rotates (it globs `checkpoint-*`).
Called when a checkpoint is saved, rotated or rejected. Does not decide which checkpoints are damaged or
deleted. `fence` is that of the attempt (`fencing.py`) in a run over several hosts, None on one host; there,
what follows a first rename is left to the newer attempt when one has begun.
"""

from __future__ import annotations

import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.manifest import LOCK, MANIFEST, mark_kept, read_manifest
from grpo_run.runtime.checkpoints.search import holds_snapshots, name_of, step_of
from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.files import lock_file, sync_directory, write_json

PARTIAL = re.compile(r"\.((?:checkpoint|snapshot)-[0-9]+)\.partial-[0-9a-f]+")
REPLACING = re.compile(r"\.((?:checkpoint|snapshot)-[0-9]+)\.replaced-[0-9a-f]+")
REPLACED = re.compile(r"replaced-(?:checkpoint|snapshot)-([0-9]+)(\.[0-9]+)?")
REJECTED = re.compile(r"rejected-(?:checkpoint|snapshot)-([0-9]+)(\.[0-9]+)?")
REASON = "REJECTED.json"
UNLOCKED_SECONDS = 3600.0
"""On a file system without locks, a partial directory not written to for this long is abandoned."""
_MAX_NAMES = 100
"""How many names to try before giving up."""
_OUR_NAMES = ("grpo_run", LOCK)
"""A directory without a manifest that contains one of these was written by us."""


@contextmanager
def partial_directory(output_dir: Path, step: int) -> Iterator[Path]:
    """Create a partial directory for the checkpoint of a step and hold its lock while the block runs.

    Call `publish` inside the block. The directory is removed at the end if it was not published.

    Raises:
        OSError: the directory cannot be created.
    """
    make_directory(output_dir)
    path, descriptor = _create_partial(output_dir, step)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)  # does nothing after publishing
        os.close(descriptor)


def make_directory(directory: Path) -> None:
    """Create an output directory or a directory of snapshots; the folder of all snapshots has mode 0700.

    Raises:
        OSError: it cannot be created.
    """
    if holds_snapshots(directory):
        directory.parents[1].mkdir(mode=0o700, parents=True, exist_ok=True)
    directory.mkdir(parents=True, exist_ok=True)


def remove_empty_folders(directory: Path) -> None:
    """Remove a directory of snapshots and the folders above it that have become empty."""
    for folder in (directory, *directory.parents[:2]):
        try:
            folder.rmdir()
        except OSError:
            return  # not empty


def _create_partial(output_dir: Path, step: int) -> tuple[Path, int]:
    for _ in range(_MAX_NAMES):
        path = output_dir / partial_name(name_of(output_dir, step))
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except FileNotFoundError:
            make_directory(output_dir)  # an empty folder of snapshots was removed meanwhile
            continue
        descriptor = None
        try:
            descriptor = _lock(path, create=True, writing=True)
        finally:
            if descriptor is None:
                # a concurrent cleanup holds the lock and removes the directory too
                shutil.rmtree(path, ignore_errors=True)
        if descriptor is not None:
            return path, descriptor
    raise FileExistsError(errno.EEXIST, "no partial checkpoint directory could be created", str(output_dir))


def partial_name(name: str) -> str:
    """Return a new name for a partial directory of a checkpoint or snapshot."""
    return f".{name}.partial-{secrets.token_hex(4)}"


def _lock(path: Path, *, create: bool, writing: bool = False) -> int | None:
    """Lock a partial directory. Return the descriptor, or None if it is locked or does not exist.

    Some file systems have no locks (Lustre mounted without `flock`, NFS without its lock service). There, a
    writer proceeds without a lock, and others treat the directory as locked until `UNLOCKED_SECONDS` after
    its last change.
    """
    try:
        descriptor = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    except FileNotFoundError:
        return None
    try:
        available = lock_file(descriptor)
    except OSError:
        available = writing or not _changed_recently(path)
    if not available:
        os.close(descriptor)
        return None
    return descriptor


def _changed_recently(path: Path) -> bool:
    times = [0.0]
    for folder, _, names in os.walk(path):
        for name in (".", *names):
            with suppress(FileNotFoundError):
                times.append(os.lstat(os.path.join(folder, name)).st_mtime)
    return time.time() - max(times) < UNLOCKED_SECONDS


def publish(partial: Path, final: Path, *, fence: Path | None = None) -> None:
    """Rename a complete partial directory to its final name, replacing an older directory of that name.

    The older directory is renamed first and renamed back if publishing fails. If the process is killed
    between the two renames, `clean_partial_directories` restores it. Afterwards the older directory is
    deleted if the same `train()` call wrote it or if it is a half-written checkpoint of ours; otherwise it is
    kept as `replaced-checkpoint-N`.

    Raises:
        CheckpointError: `partial` has no manifest.
        SupersededError: a newer attempt has begun; no checkpoint was changed, or it restores the older one.
        OSError: the rename failed; the older directory has its name.
    """
    read_manifest(partial)
    replaced: Path | None = final.with_name(f".{final.name}.replaced-{secrets.token_hex(4)}")
    if fence is not None:
        replaced, inside = fencing.place_in(fence, final), fence / partial_name(final.name)
        try:
            os.rename(partial, inside)
        except OSError as error:
            if fencing.lost(error, fence):
                raise fencing.superseded(f"{final.name} is not published") from error
            raise
        partial = inside
    assert replaced is not None
    try:
        os.rename(final, replaced)
    except OSError as error:
        # without its fence, the next rename fails
        if not isinstance(error, FileNotFoundError) and (fence is None or not fencing.lost(error, fence)):
            raise
        replaced = None
    try:
        os.rename(partial, final)
    except OSError as error:
        superseded = fence is not None and fencing.lost(error, partial)
        if replaced is not None:
            with suppress(FileNotFoundError) if superseded else nullcontext():
                os.rename(replaced, final)
        if superseded:
            raise fencing.superseded(f"{final.name} is not published") from error
        if fence is not None:
            shutil.rmtree(partial, ignore_errors=True)
        raise
    sync_directory(final.parent)
    if replaced is not None:
        with suppress(OSError):  # the new checkpoint is published; clean_partial_directories retries
            _delete_or_keep(replaced, final, fence)
    with suppress(OSError):  # a remaining lock file is harmless
        (final / LOCK).unlink()


def _delete_or_keep(replaced: Path, final: Path, fence: Path | None) -> None:
    """Delete a replaced directory if `final` supersedes it, otherwise keep it as `replaced-checkpoint-N`."""
    try:
        older, newer = read_manifest(replaced), read_manifest(final)
        keep = older.train_call_key != newer.train_call_key
        if older.kept and not newer.kept and not keep:
            mark_kept(final, fence=fence)  # the step was done again after a recovery
    except CheckpointError:
        keep = not _is_half_written(replaced)
    if keep:
        _rename_to_free_name(replaced, final.with_name(f"replaced-{final.name}"))
        sync_directory(final.parent)
    else:
        remove_checkpoint(replaced, final.name, fence=fence)


def remove_checkpoint(path: Path, name: str, *, fence: Path | None = None) -> None:
    """Rename a checkpoint to a partial name, then delete it.

    If the process is killed during the deletion, `clean_partial_directories` deletes the rest.

    Args:
        path: the directory.
        name: its name as a checkpoint, `checkpoint-N`.

    Raises:
        OSError: it cannot be renamed; it is unchanged.
    """
    partial = (fence or path.parent) / partial_name(name)
    os.rename(path, partial)
    shutil.rmtree(partial, ignore_errors=True)


def _is_half_written(path: Path) -> bool:
    """Return True if the directory is empty, or we began to write it without a manifest. If unsure, False."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    if MANIFEST in names:
        return False
    return not names or any(name in _OUR_NAMES or name.startswith(f".{MANIFEST}") for name in names)


def _rename_to_free_name(path: Path, wanted: Path) -> Path:
    """Rename to `wanted`, or to `wanted.2`, `.3` … if that name exists. Raises OSError."""
    for number in range(1, _MAX_NAMES + 1):
        target = wanted if number == 1 else wanted.with_name(f"{wanted.name}.{number}")
        if target.exists() or target.is_symlink():
            continue
        os.rename(path, target)
        return target
    raise FileExistsError(errno.EEXIST, f"{_MAX_NAMES} directories of this name exist", str(wanted))


def is_abandoned(path: Path) -> bool:
    """Return True if no process holds the lock of a partial directory."""
    descriptor = _lock(path, create=False)
    if descriptor is None:
        return not (path / LOCK).exists()
    os.close(descriptor)
    return True


def clean_partial_directories(output_dir: Path, *, fence: Path | None = None) -> list[Path]:
    """Delete abandoned partial directories, and restore checkpoints that a crash left renamed.

    Partial directories that are still being written, and replaced directories of the same step, are not
    touched.

    Returns:
        The directories that were deleted or renamed, by their old path.
    """
    try:
        names = sorted(os.listdir(output_dir))
    except OSError:
        return []
    cleaned, being_written = [], set()
    for name in names:
        match = PARTIAL.fullmatch(name)
        if match is None or not (output_dir / name).is_dir():
            continue
        # creates a missing lock file: a writer that has just created the directory then tries another name
        try:
            descriptor = _lock(output_dir / name, create=True)
        except OSError:
            descriptor = None  # another user's directory, or a disk without free space: cannot be cleaned
        if descriptor is None:
            being_written.add(match[1])
            continue
        shutil.rmtree(output_dir / name, ignore_errors=True)
        os.close(descriptor)
        cleaned.append(output_dir / name)
    for name in names:
        match = REPLACING.fullmatch(name)
        if match is None or match[1] in being_written:
            continue
        replaced, final = output_dir / name, output_dir / match[1]
        with suppress(OSError):  # another process may have done the same
            if fence is not None:
                os.rename(replaced, inside := fencing.place_in(fence, final))
            _restore(replaced if fence is None else inside, final, fence)
            cleaned.append(replaced)
    return cleaned


def _restore(replaced: Path, final: Path, fence: Path | None) -> None:
    if final.exists():
        _delete_or_keep(replaced, final, fence)
    else:
        make_directory(final.parent)
        os.rename(replaced, final)
        sync_directory(final.parent)


def begin_attempt(fence: Path, output_dir: Path, run_id: str) -> None:
    """End the older attempts in an output directory, and restore what they have left without its name.

    Raises:
        OSError: see `fencing.begin`.
    """
    fencing.begin(fence, output_dir, run_id)
    for path, final in list(fencing.taken(fence, output_dir)):
        with suppress(OSError):  # it stays in the fence, for the next attempt
            if final is not None:
                _restore(path, final, fence)
            elif path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()


def reject_checkpoint(path: Path, reason: str, *, fence: Path | None = None) -> Path | None:
    """Rename a damaged checkpoint to `rejected-checkpoint-N` and store the reason. Deletes nothing.

    Returns:
        The new path, or None if the directory cannot be renamed (a read-only file system, or a newer attempt
        has begun); callers then skip it.
    """
    assert step_of(path) is not None, path
    source = path
    try:
        if fence is not None:
            os.rename(path, source := fencing.place_in(fence, path))
        rejected = _rename_to_free_name(source, path.with_name(f"rejected-{path.name}"))
    except OSError:
        if source != path:
            with suppress(OSError):  # a newer attempt has begun, and restores it
                os.rename(source, path)
        return None
    with suppress(OSError):  # the disk may be full; the journal records the reason too
        write_json(rejected / REASON, {"reason": reason, "was": str(path), "time": round(time.time(), 3)})
        sync_directory(rejected.parent)
    return rejected
