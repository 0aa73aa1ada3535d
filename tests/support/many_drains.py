"""Drain hundreds of snapshots with a DrainScheduler and its worker, and measure the memory of both processes.

`drain_many` runs in a process of its own, so that pytest's memory is not measured.
"""

from __future__ import annotations

import time
from multiprocessing.connection import Connection
from pathlib import Path

import psutil

from grpo_run.runtime.event import event_name
from grpo_run.runtime.snapshots import drain_scheduler
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from support.slots import fill, snapshot

EVERY = 50
"""Checkpoints between two measurements."""


def drain_many(folder: Path, count: int, connection: Connection) -> None:
    """Fill slots, drain them, and send the resident memory of both processes every `EVERY` checkpoints."""
    staging = StagingArea(folder / "staging")
    published: list[str] = []
    drain_scheduler.POLL_SECONDS = 0.0  # no pause between scans
    drains = DrainScheduler(
        staging, write=lambda event: published.append(event_name(event)), warn=print, preloaded=False
    )
    try:
        for number in range(1, count + 1):
            slot = staging.choose_slot()
            assert slot is not None
            fill(slot, snapshot(folder / "out", number, limit=2))
            published.clear()
            while not slot.drained or drains.busy:
                drains.poll()
                time.sleep(0.001)
            assert published == ["checkpoint_published"], published
            if number % EVERY == 0:
                worker = psutil.Process(drains.worker.pid)
                connection.send((number, psutil.Process().memory_info().rss, worker.memory_info().rss))
    finally:
        drains.close()
    connection.close()
