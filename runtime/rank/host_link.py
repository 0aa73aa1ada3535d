"""Parts of snapshots between hosts: a Gloo group of the first ranks of all hosts, used for nothing else.

A part is sent as its record and then file by file: bytes in chunks, and a digest of what was read. The
receiver writes into its slot, compares the digests, and records the part when all of it has come, so half a
part never counts. It answers whether it has taken the part. Both sides always finish the exchange: a file
that cannot be read or written is a part that is refused, and only a lost host is an error. Called by
`runtime/rank/saving/copies.py` while ranks train, and by `runtime/rank/resuming/hosts.py`, never at the same
time. Decides nothing about what is sent.
"""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from blake3 import blake3
from torch.distributed.distributed_c10d import PrefixStore

from grpo_run.runtime.checkpoints.digests import FileEntry
from grpo_run.runtime.errors import NoHeadroomError
from grpo_run.runtime.rank.gloo_transport import attempt_store
from grpo_run.runtime.rank.session import CONNECT_SECONDS, Session
from grpo_run.runtime.snapshots.headroom import least_headroom
from grpo_run.runtime.snapshots.parts import Parts, read_parts, record_parts
from grpo_run.runtime.snapshots.slot import StagedSnapshot, StagingSlot
from grpo_run.runtime.upstream import process_names

CHUNK_BYTES = 8 << 20
NO_DIGEST = bytes(32)
"""Of a file that could not be read."""
TAKEN, NOTHING = b"taken", b"null"


class HostLink:
    """The connections of one host's first rank to those of the others, made when they are first used.

    Every method is called by the first ranks of all hosts that it concerns, in one order.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._connected: Any = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    @property
    def _group(self) -> Any:
        if self._connected is None:
            name, session = "grpo_run/hosts", self._session
            self._buffer = torch.empty(CHUNK_BYTES, dtype=torch.uint8)
            self._connected = process_names.named_gloo_group(
                PrefixStore(name, attempt_store(CONNECT_SECONDS)),
                session.host,
                session.hosts,
                name=name,
                timeout_seconds=session.config.timeouts.vote_seconds,
            )
        return self._connected

    def exchange(self, content: bytes) -> list[bytes]:
        """Return what every host has given, by its number."""
        lengths = [int(row) for row in self._gather(torch.tensor([len(content)]))]
        padded = torch.frombuffer(bytearray(content.ljust(max(lengths), b" ")), dtype=torch.uint8)
        rows = self._gather(padded)
        return [bytes(row.tolist())[:length] for row, length in zip(rows, lengths, strict=True)]

    def _gather(self, own: torch.Tensor) -> list[torch.Tensor]:
        rows = [torch.empty_like(own) for _ in range(self._session.hosts)]
        self._group.allgather([rows], [own]).wait()
        return rows

    # ---- sending ----

    def send(self, target: int, slot: StagingSlot, part: int) -> bool:
        """Send a part that is in a slot; return whether the other host has taken it.

        Raises:
            RuntimeError: the other host is lost.
        """
        parts = read_parts(slot)
        if parts is None or part not in parts.files:
            self._send_bytes(target, NOTHING)
            return False
        files = parts.files[part]
        offer = parts.model_copy(update={"files": {part: files}})
        self._send_bytes(target, offer.model_dump_json().encode())
        sent = {name: self._send_file(target, slot, parts.staged, name) for name in files}
        taken = self._receive_bytes(target) == TAKEN
        if taken and sent != files:
            with contextlib.suppress(OSError):  # then what is at rest is not verified when it is sent again
                record_parts(slot, parts.with_part(part, sent))
        return taken

    def _send_file(self, target: int, slot: StagingSlot, staged: StagedSnapshot, name: str) -> FileEntry:
        hasher, size_bytes = blake3(), 0
        source: BinaryIO | None = None
        with contextlib.ExitStack() as opened:
            with contextlib.suppress(OSError):
                source = opened.enter_context(open(slot.files / staged.folder / name, "rb", buffering=0))
                size_bytes = source.seek(0, io.SEEK_END)
                source.seek(0)
            self._send(target, torch.tensor([size_bytes]))
            for chunk in self._chunks(size_bytes):
                try:
                    if source is not None and source.readinto(chunk.numpy().data) != len(chunk):  # type: ignore[attr-defined]
                        source = None
                except OSError:
                    source = None
                hasher.update(chunk.numpy().data)
                self._send(target, chunk)
        digest = hasher.digest() if source is not None else NO_DIGEST
        self._send(target, torch.frombuffer(bytearray(digest), dtype=torch.uint8))
        return FileEntry(size=size_bytes, blake3=digest.hex())

    def _chunks(self, size_bytes: int) -> Iterator[torch.Tensor]:
        for start in range(0, size_bytes, CHUNK_BYTES):
            yield self._buffer[: min(CHUNK_BYTES, size_bytes - start)]

    def _send(self, target: int, tensor: torch.Tensor) -> None:
        self._group.send([tensor], target, 0).wait()

    def _send_bytes(self, target: int, content: bytes) -> None:
        self._send(target, torch.tensor([len(content)]))
        self._send(target, torch.frombuffer(bytearray(content), dtype=torch.uint8))

    # ---- receiving ----

    def receive(self, source: int, slot: StagingSlot, *, replace: bool = False) -> bool:
        """Receive a part into a slot, and record it when it is complete; return whether it is.

        Args:
            replace: discard another snapshot in the slot; else its parts are refused.

        Raises:
            RuntimeError: the other host is lost.
        """
        content = self._receive_bytes(source)
        if content == NOTHING:
            return False
        offer = Parts.model_validate_json(content)
        ((part, files),) = offer.files.items()
        present = self._prepare(slot, offer, replace=replace)
        received = dict[str, FileEntry]()
        for name, entry in files.items():
            path = slot.files / offer.staged.folder / name if present is not None else None
            if present is not None and any(name in known for known in present.files.values()):
                path = None  # every host has written it, and its own is as good
            found = self._receive_file(source, path)
            if found is not None and entry.blake3 in ("", found.blake3):
                received[name] = found
        taken = False
        if present is not None and len(received) == len(files):
            if part == 0:  # what rank 0 says of the snapshot holds for all hosts
                present = present.model_copy(update={"staged": offer.staged})
            with contextlib.suppress(OSError):
                record_parts(slot, present.with_part(part, received))
                taken = True
        self._send_bytes(source, TAKEN if taken else NOTHING)
        return taken

    def _prepare(self, slot: StagingSlot, offer: Parts, *, replace: bool) -> Parts | None:
        """Return what the slot has of the snapshot that is offered; None if it cannot take more of it."""
        present = read_parts(slot)
        if present is not None and present.staged.order == offer.staged.order:
            return present
        if not replace:
            return None
        try:
            slot.begin_snapshot()
            slot.prepare_snapshot(offer.staged)
        except OSError:
            return None
        return Parts(staged=offer.staged, hosts=offer.hosts)

    def _receive_file(self, source: int, path: Path | None) -> FileEntry | None:
        """Receive a file; return None if it was not read, has changed on its way, or cannot be written.

        Args:
            path: where it is written; None to digest it only.
        """
        hasher, failed = blake3(), False
        size_bytes = self._receive_number(source)
        with contextlib.ExitStack() as opened:
            file: BinaryIO = io.BytesIO()
            try:
                file = opened.enter_context(_create(path, size_bytes))
            except (OSError, NoHeadroomError):
                failed = True
            for chunk in self._chunks(size_bytes):
                self._group.recv([chunk], source, 0).wait()
                hasher.update(chunk.numpy().data)
                try:
                    failed = failed or file.write(chunk.numpy().data) != len(chunk)
                except OSError:
                    failed = True
        digest = self._receive(source, len(NO_DIGEST))
        if failed or digest != hasher.digest():
            return None
        return FileEntry(size=size_bytes, blake3=digest.hex())

    def _receive_number(self, source: int) -> int:
        number = torch.empty(1, dtype=torch.int64)
        self._group.recv([number], source, 0).wait()
        return int(number)

    def _receive_bytes(self, source: int) -> bytes:
        return self._receive(source, self._receive_number(source))

    def _receive(self, source: int, size_bytes: int) -> bytes:
        received = torch.empty(size_bytes, dtype=torch.uint8)
        self._group.recv([received], source, 0).wait()
        return received.numpy().tobytes()


def _create(path: Path | None, size_bytes: int) -> BinaryIO:
    """Open a new file of a slot for writing; without a path, one that keeps nothing.

    Raises:
        OSError, NoHeadroomError: there is no memory for so much.
    """
    if path is None:
        return open(os.devnull, "wb", buffering=0)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    headroom = least_headroom(path.parent)
    if size_bytes > headroom.usable_bytes:
        raise NoHeadroomError(headroom.sentence)
    return open(path, "wb", buffering=0)
