"""Supervisor and drain worker do not leak memory over many checkpoints."""

from __future__ import annotations

import multiprocessing
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.many_drains import drain_many

from grpo_run.runtime.upstream.process_names import hidden_main

pytestmark = pytest.mark.alone

WARM = 200
"""Checkpoints before the first measurement; by then allocators and lazy imports have settled."""
GROWTH_BYTES = 2 << 20
"""Growth allowed after that. 800 leaked `StagedSnapshot` or `Manifest` objects (4 to 8 KiB each in CPython)
take at least 3 MiB, one leaked copy buffer 8 MiB; allocator noise is a few hundred KiB."""


@pytest.fixture
def memory() -> Iterator[Path]:
    """Create a folder in memory, so that the measurement does not depend on the disk."""
    folder = Path(tempfile.mkdtemp(prefix="grpo-run-memory-", dir="/dev/shm"))
    yield folder
    shutil.rmtree(folder)


def check_growth(samples: list[tuple[int, int, int]], what: str, count: int, whose: str) -> None:
    """Print a row of the campaign's table and check that neither process grew after warming up.

    Args:
        samples: checkpoints so far, and resident bytes of `whose` process and of the drain worker.
    """
    settled = [sample for sample in samples if sample[0] >= WARM]
    growth = [settled[-1][place] - settled[0][place] for place in (1, 2)]
    print(
        f"\n| {what}, resident memory from the {WARM}th on | {count} | {whose}"
        f" {growth[0] >> 10:+d} KiB of {settled[-1][1] >> 20} MiB, drain worker {growth[1] >> 10:+d} KiB of"
        f" {settled[-1][2] >> 20} MiB |"
    )
    assert max(growth) < GROWTH_BYTES, samples


@pytest.mark.parametrize(
    "count", [300, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(900)])]
)
def test_draining_leaks_no_memory(count: int, memory: Path) -> None:
    """DrainScheduler and drain worker process real slots and checkpoints without growing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with hidden_main():
        process = context.Process(target=drain_many, args=(memory, count, theirs))
        process.start()
    theirs.close()
    samples: list[tuple[int, int, int]] = []
    try:
        while True:
            assert ours.poll(120), "no checkpoint within 120 s"
            samples.append(ours.recv())
    except EOFError:
        pass
    process.join(30)
    assert process.exitcode == 0
    assert samples[-1][0] == count
    assert len(list((memory / "out").glob("checkpoint-*"))) == 2
    check_growth(samples, f"{count} checkpoints drained", count, "scheduler")
