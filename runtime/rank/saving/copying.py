"""Copy storages into a snapshot buffer, and out of it: CPU memory with several threads, device memory with torch.

One core uses only part of a server's memory bandwidth. Called by `packing.py` and `runtime/rank/resuming/loading.py`; does not
decide the layout.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import torch

from grpo_run.runtime.snapshots.buffer import SnapshotBuffer, SnapshotBufferReader

CHUNK_BYTES = 4 << 20
"""Bytes per `memmove`: under half a millisecond, so that threads finish together."""
MAX_THREADS = 8
"""Chosen, not measured: a few cores use most of the bandwidth of a memory controller."""


class Copy(NamedTuple):
    """Copy `size_bytes` of a storage, from byte `start` on, to `offset` in the buffer."""

    storage: torch.UntypedStorage
    start: int
    offset: int
    size_bytes: int


def copy_threads(local_ranks: int) -> int:
    """Return how many threads one rank uses, given that all ranks of a node copy at the same time."""
    return max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // local_ranks))


def copy_all(buffer: SnapshotBuffer, copies: Iterable[Copy], *, threads: int) -> None:
    """Make every copy, and return when all are done. Other Python threads run meanwhile.

    Args:
        copies: to offsets that were allocated in `buffer`.
        threads: maximum number of threads.
    """
    from_cpu = []
    for copy in copies:
        if copy.size_bytes == 0:
            continue
        if copy.storage.device.type == "cpu":
            from_cpu.append(copy)
        else:
            _copy_from_device(buffer, copy)
    _move_all(list(_chunks(buffer, from_cpu)), threads=threads)


def copy_out(buffer: SnapshotBufferReader, offset: int, target: torch.Tensor, *, threads: int) -> None:
    """Fill a contiguous CPU tensor with the bytes of the buffer from `offset` on. Other Python threads run meanwhile.

    Raises:
        CheckpointError: the bytes are outside the buffer.
    """
    size_bytes = target.numel() * target.element_size()
    if size_bytes:
        source = buffer.address(offset, size_bytes)
        _move_all(list(_split(target.data_ptr(), source, size_bytes)), threads=threads)


def _move_all(chunks: list[tuple[int, int, int]], *, threads: int) -> None:
    """Make the copies of `_chunks`."""
    remaining = iter(chunks)  # shared: each thread takes the next chunk
    helpers = min(threads, len(chunks)) - 1
    if helpers < 1:
        _move(remaining)
        return
    # memmove through ctypes releases the GIL; torch's own threads belong to the model
    with ThreadPoolExecutor(helpers, thread_name_prefix="grpo-run-copy") as pool:
        futures = []
        with suppress(RuntimeError):  # no thread can be started: this thread copies the rest
            for _ in range(helpers):
                futures.append(pool.submit(_move, remaining))
        _move(remaining)
        for future in futures:
            future.result()


def _move(chunks: Iterator[tuple[int, int, int]]) -> None:
    for target, source, size_bytes in chunks:
        ctypes.memmove(target, source, size_bytes)


def _chunks(buffer: SnapshotBuffer, copies: Iterable[Copy]) -> Iterator[tuple[int, int, int]]:
    """Yield target address, source address and size of each chunk."""
    for copy in copies:
        assert copy.start + copy.size_bytes <= copy.storage.nbytes(), "the copy reads beyond its storage"
        target = buffer.address(copy.offset, copy.size_bytes)
        source = copy.storage.data_ptr() + copy.start
        yield from _split(target, source, copy.size_bytes)


def _split(target: int, source: int, size_bytes: int) -> Iterator[tuple[int, int, int]]:
    for done in range(0, size_bytes, CHUNK_BYTES):
        yield target + done, source + done, min(CHUNK_BYTES, size_bytes - done)


def _copy_from_device(buffer: SnapshotBuffer, copy: Copy) -> None:
    with buffer.view(copy.offset, copy.size_bytes) as view:
        source = torch.empty(0, dtype=torch.uint8, device=copy.storage.device)
        source.set_(copy.storage, copy.start, (copy.size_bytes,), (1,))
        target = torch.frombuffer(view, dtype=torch.uint8)
        target.copy_(source)
        del target  # it references the view
