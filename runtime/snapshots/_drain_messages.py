"""Messages between the supervisor and the drain worker, pickled and sent over a connection. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DrainRequest:
    """Write the snapshot in a slot as a checkpoint.

    Attributes:
        slot: index of the slot.
        last: the run has ended, so that less space has to stay free on the disk.
    """

    slot: int
    last: bool = False


@dataclass(frozen=True, kw_only=True)
class DrainProgress:
    """The current request has written this many bytes so far."""

    written_bytes: int


@dataclass(frozen=True, kw_only=True)
class DrainPublished:
    """The checkpoint is published with its manifest.

    Attributes:
        train_call: ordinal of its `train()` call.
        kept: the user has asked for it.
        best: directory name of the script's best checkpoint so far.
        keeps: how many scheduled checkpoints `save_total_limit` keeps, this one included; None for all.
        removed: older checkpoints that rotation deleted.
    """

    slot: int
    step: int
    train_call: int
    path: str
    scheduled: bool
    kept: bool
    size_bytes: int
    seconds: float
    best: str | None = None
    keeps: int | None = None
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class DrainFailed:
    """The checkpoint was not published, and no partial files are visible.

    Attributes:
        step: None if the slot held no snapshot or was locked.
        full: the disk has no free space.
        broken: the snapshot in memory cannot be read, so a retry cannot succeed.
        superseded: the run has gone on without this host since it was taken, and its steps were done again.
            It counts as written.
        free_bytes: space on the disk, if that was too little; None otherwise, as when a quota or a disk
            that has become read-only refuses the write.
    """

    slot: int
    step: int | None
    reason: str
    full: bool = False
    broken: bool = False
    superseded: bool = False
    free_bytes: int | None = None


DrainReply = DrainProgress | DrainPublished | DrainFailed
