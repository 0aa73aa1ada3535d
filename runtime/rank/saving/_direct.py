"""Save a checkpoint directly to disk: all ranks write, then rank 0 publishes it with a manifest.

Used where a snapshot is not possible: no memory, or something reads the checkpoint during the save. The
manifest is written last, and older checkpoints are removed only after it. Called by `saver.py`,
which decides.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints import fencing
from grpo_run.runtime.checkpoints.manifest import Identity, remove_manifest, write_manifest
from grpo_run.runtime.checkpoints.publishing import make_directory, publish
from grpo_run.runtime.checkpoints.rotation import rotate, scheduled_to_keep
from grpo_run.runtime.checkpoints.search import (
    directories_of_run,
    directory_of,
    find_checkpoints,
    lies_beside,
    name_of,
    snapshot_places,
)
from grpo_run.runtime.errors import CheckpointError, Superseded, SupersededError
from grpo_run.runtime.history.events import CheckpointFailed, CheckpointPublished
from grpo_run.runtime.rank.saving._reservation import Written
from grpo_run.runtime.rank.saving.contents import CheckpointContents
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.snapshots.headroom import DISK_RESERVE_BYTES
from grpo_run.watchdog.text import size_text

WRITING = "writing"
"""The folder in which ranks write a snapshot before it is published."""


class DirectSaves:
    """The direct saves of one call."""

    def __init__(self, contents: CheckpointContents, session: Session) -> None:
        self._contents = contents
        self._session = session
        self._output = Path(contents.call.output_dir)
        self._fence = session.fence(self._output)
        self._last_bytes: int | None = None
        """Size of the run's newest checkpoint on disk; None before the first. Known on rank 0 only."""
        self._warned_of_space = False
        self.written = Written(session)
        if session.is_main:
            self._warn_if_disk_will_be_full(contents.size_bytes)
            self._last_bytes = self._newest_bytes()

    def _warn_if_disk_will_be_full(self, checkpoint_bytes: int) -> None:
        folder = self._output
        while not folder.exists():
            folder = folder.parent
        free_bytes, limit = _free_bytes(folder), self._contents.limit
        # one more than the limit, because an older one is removed only after the newer is complete
        needed_bytes = checkpoint_bytes * ((limit or 1) + 1)
        if free_bytes < needed_bytes + DISK_RESERVE_BYTES:
            needs = f"save_total_limit={limit} needs" if limit else "two need"
            self._session.warn(
                f"{folder} has {size_text(free_bytes)} free; {size_text(DISK_RESERVE_BYTES)} must stay free,"
                f" and a checkpoint of this model takes about {size_text(checkpoint_bytes)}: {needs}"
                f" {size_text(needed_bytes)}"
            )

    def _newest_bytes(self) -> int | None:
        for found in find_checkpoints(*directories_of_run(self._session.config.run_id, self._output)):
            if found.manifest.run_id == self._session.config.run_id:
                return found.manifest.size_bytes
        return None

    def disk_is_short(self, *, unasked: bool = False) -> bool:
        """Whether the disk has less free space than the last checkpoint took. Not collective.

        Always False on other ranks than 0. The last checkpoint of a call is always tried, because the run was
        made for it.

        Args:
            unasked: nobody has asked for the checkpoint: it is not tried, and is taken to be as large as
                expected before the first one.
        """
        if not self._session.is_main or (self._contents.call_ends and not unasked):
            return False
        needed_bytes = self._needed_bytes if unasked else self._last_bytes
        return needed_bytes is not None and _free_bytes(self._output) < needed_bytes

    @property
    def _needed_bytes(self) -> int:
        return self._last_bytes or self._contents.size_bytes

    def report_short_disk(self, step: int, *, scheduled: bool) -> None:
        """Journal that a checkpoint is not saved for lack of space; warn once until there is space again.

        Args:
            scheduled: the script's own schedule asked for it.
        """
        if not self._session.is_main:
            return
        path, free_bytes = self._output / f"checkpoint-{step}", _free_bytes(self._output)
        reason = (
            f"{size_text(free_bytes)} are free, and a checkpoint takes about {size_text(self._needed_bytes)}."
        )
        self._session.journal.write(
            CheckpointFailed(
                rank=0,
                step=step,
                cause="disk_full",
                reason=reason,
                path=str(path),
                train_call=self._contents.call.ordinal,
                lost=scheduled,
            )
        )
        if not self._warned_of_space:
            what = path if scheduled else f"a snapshot of step {step} in {self._output}"
            self._session.warn(
                f"{what} is not saved: {reason} Training continues, and a fault loses the work since the last"
                " checkpoint."
            )
        self._warned_of_space = True

    def save(self, identity: Identity, write: Callable[[Path], Any], *, began: float) -> Any:
        """Write and publish a checkpoint. Collective: one all-reduce, after all ranks have written.

        Args:
            identity: of the checkpoint; equal on every rank.
            write: saves this rank's part; called with the checkpoint's directory.
            began: `time.perf_counter()` at the start of the save, for the journal.

        Returns:
            What `write` returns.

        Raises:
            Superseded: a newer attempt has begun on other hosts.
        """
        self._warned_of_space = False
        if self._fence is not None:
            return self._save_through(self._fence, identity, write, began)
        path = self._output / identity.folder
        if self._session.is_main:
            remove_manifest(path)
        result = write(path)
        self.written.agree()
        if self._session.is_main:
            manifest = write_manifest(path, identity)
            # the save may have found a better checkpoint
            self._record(identity, path, manifest.size_bytes, self._contents.best(), began)
        return result

    def save_snapshot(self, identity: Identity, write: Callable[[Path], Any], *, began: float) -> None:
        """Write and publish a snapshot in its own folder. Collective: two all-reduces. Arguments as in
        `save`."""
        if self._fence is not None:
            self._save_through(self._fence, identity, write, began)
            return
        places, chosen = snapshot_places(self._output, *identity.train_call_key), 0
        if self._session.is_main:
            chosen = int(lies_beside(self._output))
            make_directory(places[chosen])
            shutil.rmtree(places[chosen] / WRITING, ignore_errors=True)
        # no rank writes before rank 0 has chosen the place and emptied it
        directory = places[self._session.votes.maximum(chosen)]
        writing = directory / WRITING
        write(writing / identity.folder)
        self.written.agree()
        if self._session.is_main:
            manifest = write_manifest(writing / identity.folder, identity)
            path = directory / name_of(directory, identity.step)
            publish(writing / identity.folder, path)
            shutil.rmtree(writing, ignore_errors=True)
            self._record(identity, path, manifest.size_bytes, None, began)

    def _save_through(
        self, fence: Path, identity: Identity, write: Callable[[Path], Any], began: float
    ) -> Any:
        """Write apart from what other attempts write, and publish unless a newer one has begun. Collective:
        two all-reduces."""
        writing = fencing.writing_folder(fence)
        written = writing / identity.folder
        directory = directory_of(identity, self._output)
        path = directory / name_of(directory, identity.step)
        refused, superseded = fencing.superseded(f"{path.name} is not published"), False
        try:
            result = write(written)
        except Exception as error:
            if fence.exists():
                raise
            self._session.warn(str(refused))  # the newer attempt has removed what was written
            raise Superseded from error
        self.written.agree()
        if self._session.is_main:
            try:
                manifest = write_manifest(written, identity)
                make_directory(directory)
                publish(written, path, fence=fence)
            except (SupersededError, CheckpointError, OSError) as error:
                if fence.exists() and not isinstance(error, SupersededError):
                    raise
                self._session.warn(str(refused))
                superseded = True
            else:
                best = self._contents.best() if identity.scheduled else None
                self._record(identity, path, manifest.size_bytes, best, began)
            shutil.rmtree(writing, ignore_errors=True)
        # callbacks of any rank may read what is published, and the ranks of a superseded attempt end together
        try:
            superseded = bool(self._session.votes.maximum(int(superseded)))
        except Exception:
            if not superseded:
                raise
            raise Superseded from None  # the other hosts are gone
        if superseded:
            raise Superseded
        if identity.scheduled:
            self._contents.published(path)
        return result

    def _record(
        self, identity: Identity, path: Path, size_bytes: int, best: str | None, began: float
    ) -> None:
        """Journal a published checkpoint, and remove what it makes unnecessary."""
        self._last_bytes = size_bytes
        self._session.journal.write(
            CheckpointPublished(
                rank=self._session.rank,
                step=identity.step,
                path=str(path),
                verified=True,
                train_call=identity.train_call.ordinal,
                scheduled=identity.scheduled,
                kept=identity.kept,
                size_bytes=size_bytes,
                seconds=time.perf_counter() - began,
                best=best,
                keeps=scheduled_to_keep(self._contents.limit, best=best, newest=path.name),
            )
        )
        self._session.journal.sync()
        rotate(self._output, newest=path, limit=self._contents.limit, best=best, fence=self._fence)


def _free_bytes(folder: Path) -> int:
    """Return the free space; if the file system does not answer, a huge number: the save meets the error."""
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return sys.maxsize
