"""Keep an attempt that has lost touch from changing checkpoints after a newer attempt of the run has begun.

    output_dir/_grpo_run/<run-id>/.attempt-3/8c1f02aa     of the attempt that has begun last
    output_dir/_grpo_run/<run-id>/.writing-8c1f02aa       where its ranks write a checkpoint
    output_dir_grpo_run/<run-id>/.attempt-3/8c1f02aa      the same while `output_dir` is empty

In a run over several hosts, whatever gets the name of a checkpoint or loses it is renamed into the innermost
directory and out of it again: the fence. A newer attempt takes everything out of it and removes it before it
looks for what to resume from, so the next rename of the older attempt fails in the file system, whatever
that host still believes. It takes no lock and no clock. It holds on NFS too, where a host may use a directory
for a while after it was renamed, but not after it was removed. The random name is never used again, and no
library writes inside: it would create the directory anew.

Rank 0 calls `prepare` and `begin` (`runtime/rank/step/resume.py`), and `publishing.py` renames. One rank of
each host records the fence for the supervisor and the drain worker of its host. Attempts on one host
have none.
"""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from grpo_run.runtime.checkpoints.search import holds_snapshots, lies_beside, run_folders
from grpo_run.runtime.errors import SupersededError
from grpo_run.runtime.files import write_json

ATTEMPT = re.compile(r"\.attempt-([0-9]+)")
WRITING = ".writing-"
TAKEN = re.compile(r"\.(?:(call-[0-9]+)\.)?((?:checkpoint|snapshot)-[0-9]+)\.replaced-[0-9a-f]+")
"""What has lost its name for a moment, in a fence."""
PROBE = ".grpo-run-probe"
RECORD = "fences.json"
TRIES, PAUSE_SECONDS = 600, 0.1
"""An older attempt may put something into its fence a few times; NFS may show it a moment later."""


def prepare(output_dir: Path, run_id: str) -> Path:
    """Make the fence of a new attempt; those of older ones still count until `begin`.

    Raises:
        OSError: it cannot be made.
    """
    output_dir.mkdir(parents=True, exist_ok=True)
    with suppress(OSError):
        (output_dir / PROBE).rmdir()  # of a process that was killed
    inside, beside = run_folders(output_dir, run_id)
    if lies_beside(output_dir):
        fence = _make(beside, (inside, beside))
        if _reaches(fence, output_dir):
            return fence
        close(fence)
    return _make(inside, (inside, beside))


def _make(folder: Path, folders: tuple[Path, Path]) -> Path:
    for number in range(1 + max((one for one, _ in _attempts(folders)), default=0), TRIES):
        fence = folder / f".attempt-{number}" / secrets.token_hex(4)
        try:
            folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.mkdir(exist_ok=True)
            fence.parent.mkdir()
        except (FileExistsError, FileNotFoundError):
            continue  # an attempt that begins at the same time has made it, or removed an empty folder
        fence.mkdir()
        return fence
    raise FileExistsError(errno.EEXIST, "no directory of an attempt could be made", str(folder))


def _reaches(fence: Path, output_dir: Path) -> bool:
    """Whether a directory can be renamed from the fence into the output directory."""
    source, target = fence / "probe", output_dir / PROBE
    source.mkdir()
    try:
        os.rename(source, target)
    except OSError:  # another file system, or a quota of its own
        source.rmdir()
        return False
    target.rmdir()
    return True


def _attempts(folders: Iterable[Path]) -> list[tuple[int, Path]]:
    return [
        (int(match[1]), folder / name)
        for folder in folders
        for name in _names(folder)
        if (match := ATTEMPT.fullmatch(name)) is not None
    ]


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []  # there is none, or it cannot be read; then it cannot be removed either, which is said


def exists(output_dir: Path, run_id: str) -> bool:
    """Whether an attempt of the run over several hosts has not ended in order."""
    return bool(_attempts(run_folders(output_dir, run_id)))


def begin(fence: Path, output_dir: Path, run_id: str) -> None:
    """End all older attempts: what lies in their fences is moved into this one, and they are removed.

    Call it when all ranks have been heard of after `prepare`: a newer attempt cannot have begun before.

    Raises:
        OSError: a fence cannot be removed; its attempt may go on to publish.
    """
    folders = run_folders(output_dir, run_id)
    own = int(fence.parent.name.rpartition("-")[2])
    for number, attempt in _attempts(folders):
        if (number, attempt.parent == folders[0]) < (own, fence.parents[1] == folders[0]):
            _end(attempt, fence)
    for folder in folders:
        with suppress(OSError):  # not empty
            folder.rmdir()
            folder.parent.rmdir()


def _end(attempt: Path, fence: Path) -> None:
    fences = [attempt / name for name in _names(attempt)]
    _remove(attempt, fence)
    for ended in fences:
        shutil.rmtree(writing_folder(ended), ignore_errors=True)


def _remove(attempt: Path, fence: Path) -> None:
    for _ in range(TRIES):
        for folder in (attempt / name for name in _names(attempt)):
            for name in _names(folder):
                with suppress(FileNotFoundError):  # its attempt has renamed it
                    os.rename(folder / name, fence / name)
            with suppress(OSError):  # something was put into it meanwhile
                folder.rmdir()
        try:
            attempt.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            failure = error
            time.sleep(PAUSE_SECONDS)
        else:
            return
    raise failure


def close(fence: Path) -> None:
    """Remove a fence that nothing lies in, and the folders above it that have become empty."""
    run = fence.parents[1]
    written = [run / name for name in _names(run) if name.startswith(WRITING)]  # no newer attempt's so far
    with suppress(OSError):  # a newer attempt has begun, or a checkpoint lies in it, which the next one needs
        fence.rmdir()
        for folder in written:
            shutil.rmtree(folder, ignore_errors=True)
        for folder in fence.parents[:3]:
            folder.rmdir()


def writing_folder(fence: Path) -> Path:
    """Return where the ranks of an attempt write a checkpoint before it is published."""
    return fence.parents[1] / f"{WRITING}{fence.name}"


def place_in(fence: Path, path: Path) -> Path:
    """Return where a checkpoint lies in a fence while it has lost its name."""
    call = f"{path.parent.name}." if holds_snapshots(path.parent) else ""
    return fence / f".{call}{path.name}.replaced-{secrets.token_hex(4)}"


def taken(fence: Path, output_dir: Path) -> Iterator[tuple[Path, Path | None]]:
    """Yield what lies in a fence, with the name that it had as a checkpoint; None for what can be deleted."""
    for name in _names(fence):
        match = TAKEN.fullmatch(name)
        if match is None:
            yield fence / name, None
        else:
            yield fence / name, (fence.parents[1] / match[1] if match[1] else output_dir) / match[2]


def lost(error: OSError, source: Path) -> bool:
    """Whether renaming out of a fence has failed because a newer attempt has taken the source.

    Args:
        source: what was to be renamed.
    """
    return error.errno == errno.ESTALE or (error.errno == errno.ENOENT and not source.exists())


def superseded(consequence: str) -> SupersededError:
    """Return the error of an attempt that is refused, with what therefore does not happen."""
    return SupersededError(f"a newer attempt of this run has begun on other hosts; {consequence}")


def record(
    folder: Path, output_dir: Path, fence: Path, *, made: bool, refused_before: int | None = None
) -> None:
    """Tell the processes of this host with which fence they change an output directory.

    Args:
        folder: the run directory, or the run's staging area.
        made: by this host, which also removes it at the end.
        refused_before: what earlier attempts than this have left in the memory of this host is not published;
            None if that has not changed.
    """
    known = _recorded(folder)
    key = os.path.realpath(output_dir)
    if refused_before is None:
        refused_before = known[key][2] if key in known else 0
    known[key] = str(fence), made, refused_before
    write_json(folder / RECORD, known, durable=False)


def was_left_out(folder: Path, output_dir: str | Path) -> bool:
    """Whether an attempt has begun without this host since it took part in one. Ask before `begin`.

    An attempt removes the fences of all before it, so that of this host is gone then. While it is there, what
    this host has in memory comes from the newest attempt.
    """
    fence = recorded(folder, output_dir)
    try:
        return fence is not None and not fence.exists()
    except OSError as error:
        return error.errno == errno.ESTALE


def recorded(folder: Path, output_dir: str | Path) -> Path | None:
    """Return the fence of the newest attempt that this host took part in; None if there is none."""
    found = _recorded(folder).get(os.path.realpath(output_dir))
    return Path(found[0]) if found is not None else None


def refused_before(folder: Path, output_dir: str | Path) -> int:
    """Return the attempt from which on what lies in the memory of this host may be published."""
    found = _recorded(folder).get(os.path.realpath(output_dir))
    return found[2] if found is not None else 0


def close_recorded(folder: Path, staging: Path | None) -> None:
    """Forget the fences when the run has ended on this host, and remove those that it has made.

    Args:
        folder: the run directory.
        staging: the run's staging area. If it still exists, a snapshot is only in memory, and is written with
            the fence later.
    """
    if staging is not None and (staging / RECORD).exists():
        return
    for fence, made, _ in _recorded(folder).values():
        if made:
            close(Path(fence))
    (folder / RECORD).unlink(missing_ok=True)


def _recorded(folder: Path) -> dict[str, tuple[str, bool, int]]:
    try:
        known: dict[str, tuple[str, bool, int]] = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        return {}
    return known
