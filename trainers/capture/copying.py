"""Copies storages into an arena: what main memory holds by several threads, what a device holds by torch.

One core of a server moves a fraction of what its memory can. Called by `packing.py`; does not decide what goes where.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from grpo_run.runtime.staging.buffer import SnapshotBuffer

PIECE_BYTES = 4 << 20
"""Moved at a time: less than half a millisecond, so that all threads end together and a signal is heard."""
THREADS = 8
"""At most; chosen, not measured: a few cores draw most of what a memory controller gives."""


class Copy(NamedTuple):
    """`size_bytes` of a storage from `start` on, to be put at `offset` of an arena."""

    storage: torch.UntypedStorage
    start: int
    offset: int
    size_bytes: int


def share_of_threads(local_ranks: int) -> int:
    """How many threads a rank copies with, as all ranks of a node copy at once."""
    return max(1, min(THREADS, len(os.sched_getaffinity(0)) // local_ranks))


def copy_all(arena: SnapshotBuffer, copies: Iterable[Copy], *, threads: int) -> None:
    """Make every copy; returns when all are made. Other threads run meanwhile.

    Args:
        copies: into records that were allocated in `arena`.
        threads: how many at once.
    """
    on_processor = []
    for copy in copies:
        if copy.size_bytes == 0:
            continue
        if copy.storage.device.type == "cpu":
            on_processor.append(copy)
        else:
            _from_device(arena, copy)
    pieces = list(_pieces(arena, on_processor))
    left = iter(pieces)  # one iterator: each thread takes the next piece that no other has
    helpers = min(threads, len(pieces)) - 1
    if helpers < 1:
        _move(left)
        return
    # `memmove` lets go of the interpreter; torch's own threads are counted for the whole process, and are the model's
    with ThreadPoolExecutor(helpers, thread_name_prefix="grpo-run-copy") as pool:
        moved = []
        with suppress(RuntimeError):  # no more threads to be had: this one copies what is left
            for _ in range(helpers):
                moved.append(pool.submit(_move, left))
        _move(left)
        for future in moved:
            future.result()


def _move(pieces: Iterator[tuple[int, int, int]]) -> None:
    for target, source, size_bytes in pieces:
        ctypes.memmove(target, source, size_bytes)


def _pieces(arena: SnapshotBuffer, copies: Iterable[Copy]) -> Iterator[tuple[int, int, int]]:
    """Target address, source address and size of what is moved at a time."""
    for copy in copies:
        assert copy.start + copy.size_bytes <= copy.storage.nbytes(), "a copy from beyond a storage"
        target = arena.address(copy.offset, copy.size_bytes)
        source = copy.storage.data_ptr() + copy.start
        for done in range(0, copy.size_bytes, PIECE_BYTES):
            yield target + done, source + done, min(PIECE_BYTES, copy.size_bytes - done)


def _from_device(arena: SnapshotBuffer, copy: Copy) -> None:
    with arena.view(copy.offset, copy.size_bytes) as view:
        source = torch.empty(0, dtype=torch.uint8, device=copy.storage.device)
        source.set_(copy.storage, copy.start, (copy.size_bytes,), (1,))
        target = torch.frombuffer(view, dtype=torch.uint8)
        target.copy_(source)
        del target  # it holds the view
