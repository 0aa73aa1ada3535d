"""Replay of a timeline in torch's CUDA allocator: how much it reserves for what is allocated.

Called by `prediction.py`. A model of the allocator's rules (512 B rounding, segments of 2 and 20 MiB, best
fit, blocks are split and merged), with unlimited memory, one stream, and nothing returned to the device. With
a limit the allocator frees cached segments and tries again, so the result is an upper bound for what a GPU
needs, not a prediction. Pure.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

from grpo_run.runtime.planning.timeline import AllocationTimeline

ROUNDING = 512
SMALL = 1 << 20
"""Largest request that shares a small segment."""
SMALL_SEGMENT = 2 << 20
LARGE_SEGMENT = 20 << 20
MIN_LARGE = 10 << 20
"""From this size on, a request gets a segment of its own, rounded to 2 MiB."""


@dataclass(kw_only=True)
class _Block:
    start: int
    size: int
    small: bool
    free: bool = True
    before: _Block | None = None
    after: _Block | None = None

    @property
    def key(self) -> tuple[int, int]:
        return self.size, self.start


def rounded(size: int) -> int:
    """Return what the allocator counts for a request."""
    return -(-size // ROUNDING) * ROUNDING


def unused_bytes(timeline: AllocationTimeline) -> int:
    """Return by how much the reserved bytes exceed the highest allocated bytes of a timeline."""
    pools: dict[bool, list[tuple[tuple[int, int], _Block]]] = {True: [], False: []}
    blocks: dict[int, _Block] = {}
    reserved = allocated = highest = 0
    address = 0
    for event in timeline.events:
        if event < 0:
            block = blocks.pop(~event, None)
            if block is not None:
                allocated -= block.size
                _release(block, pools[block.small])
            continue
        size = rounded(timeline.sizes[event])
        if size == 0:
            continue
        small = size <= SMALL
        found = _take(pools[small], size)
        if found is None:
            segment = (
                SMALL_SEGMENT
                if small
                else LARGE_SEGMENT
                if size < MIN_LARGE
                else -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
            )
            found = _Block(start=address, size=segment, small=small)
            address += segment
            reserved += segment
        rest = found.size - size
        if rest >= (ROUNDING if small else SMALL + 1):
            tail = _Block(start=found.start + size, size=rest, small=small, before=found, after=found.after)
            if found.after is not None:
                found.after.before = tail
            found.after, found.size = tail, size
            _put(pools[small], tail)
        found.free = False
        blocks[event] = found
        allocated += found.size
        highest = max(highest, allocated)
    return max(0, reserved - highest)


def _take(pool: list[tuple[tuple[int, int], _Block]], size: int) -> _Block | None:
    index = bisect.bisect_left(pool, (size, -1), key=lambda entry: entry[0])
    return pool.pop(index)[1] if index < len(pool) else None


def _put(pool: list[tuple[tuple[int, int], _Block]], block: _Block) -> None:
    block.free = True
    bisect.insort(pool, (block.key, block), key=lambda entry: entry[0])


def _release(block: _Block, pool: list[tuple[tuple[int, int], _Block]]) -> None:
    after, before = block.after, block.before
    if after is not None and after.free:
        _remove(pool, after)
        block.size += after.size
        block.after = after.after
        if after.after is not None:
            after.after.before = block
    if before is not None and before.free:
        _remove(pool, before)
        before.size += block.size
        before.after = block.after
        if block.after is not None:
            block.after.before = before
        block = before
    _put(pool, block)


def _remove(pool: list[tuple[tuple[int, int], _Block]], block: _Block) -> None:
    index = bisect.bisect_left(pool, block.key, key=lambda entry: entry[0])
    assert pool[index][1] is block
    del pool[index]
