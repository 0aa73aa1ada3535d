"""What may be freed: a table of areas, checkpoints and runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from grpo_run.runtime.catalog import RunEntry
from grpo_run.runtime.checkpoints.listing import CheckpointEntry, CheckpointState
from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.history.status import RunStatus
from grpo_run.runtime.leftovers import checkpoints, memory, old_runs
from grpo_run.runtime.snapshots.leftovers import AreaEntry
from grpo_run.runtime.snapshots.ownership import AreaOwner

AREA = Path("/dev/shm/grpo-run-0/0123456789abcdef")
DAY = 86_400.0


def run(state: str, *, live: bool = False, age_days: float = 0.0, memory_bytes: int = 0) -> RunEntry:
    """A run that uses `AREA`."""
    status = RunStatus(
        run_id="night", state=state, sentence="", history=History(), slots=(),
        supervisor_pid=1 if live else None
    )  # fmt: skip
    return RunEntry(
        directory=RunDirectory(path=Path("runs/night")), status=status, problem=None,
        last_time=1e9 - age_days * DAY,
        size_bytes=7, memory_bytes=memory_bytes, areas=(AREA,),
    )  # fmt: skip


def area(
    *, made_here: bool = True, locked: bool = False, kept: str | None = "its run can be resumed from it"
) -> AreaEntry:
    """An area of that run."""
    owner = AreaOwner(run_id="night", run_directory="/x/runs/night", mount_namespace="n")
    return AreaEntry(
        path=AREA, owner=owner, made_here=made_here, locked=locked, size_bytes=9, modified_at=0.0,
        kept_because=kept
    )  # fmt: skip


@pytest.mark.parametrize(
    ("entry", "runs", "freed"),
    [
        (area(kept=None), [], "freed"),
        (area(), [run("unknown")], "written first"),
        (area(), [run("stopped")], "written first"),
        (area(), [run("running", live=True)], "kept"),
        (area(locked=True, kept="its run is alive"), [run("unknown")], "kept"),
        (area(made_here=False, kept="another container"), [run("unknown")], "kept"),
        (area(), [], "kept"),
    ],
)
def test_memory_is_freed_only_if_no_run_can_miss_it(
    entry: AreaEntry, runs: list[RunEntry], freed: str
) -> None:
    """Deleted runs, and dead ones whose snapshots go to disk first."""
    found, kept = memory([entry], runs)
    assert freed == ("kept" if kept else "written first" if found[0].written_first else "freed")
    assert len(found) + len(kept) == 1


def test_a_run_that_cannot_be_read_counts_as_live() -> None:
    """It cannot be told."""
    unreadable = RunEntry(
        directory=RunDirectory(path=Path("runs/night")), status=None, problem="damaged", last_time=0.0,
        size_bytes=1,
        memory_bytes=0, areas=(AREA,),
    )  # fmt: skip
    found, kept = memory([area()], [unreadable])
    assert (len(found), len(kept)) == (0, 1)
    assert old_runs([unreadable], now=1e9, days=1.0) == []


@pytest.mark.parametrize(
    ("name", "state", "freed"),
    [
        ("checkpoint-40", CheckpointState.published, False),
        ("checkpoint-40", CheckpointState.damaged, False),
        ("rejected-checkpoint-40", CheckpointState.rejected, True),
        ("replaced-checkpoint-40.6", CheckpointState.replaced, True),
        ("replaced-checkpoint-41", CheckpointState.replaced, False),
        (".checkpoint-40.replaced-1f", CheckpointState.replaced, False),
        (".checkpoint-40.partial-1f", CheckpointState.partial, True),
        (".checkpoint-41.partial-1f", CheckpointState.partial, False),
    ],
)
def test_checkpoints_under_other_names_are_freed(name: str, state: CheckpointState, freed: bool) -> None:
    """But none that is being written, or that a live run has lost its name of."""
    entry = CheckpointEntry(path=Path("out") / name, step=40, state=state, size_bytes=1, modified_at=0.0)
    found = checkpoints(
        [entry],
        live_ids={"live"},
        run_of=lambda path: "live" if "41" in path.name else "dead",
        is_abandoned=lambda path: "41" not in path.name,
    )
    assert bool(found) == freed


@pytest.mark.parametrize(
    ("entry", "freed"),
    [
        (run("finished", age_days=31), True),
        (run("failed", age_days=31), True),
        (run("finished", age_days=29), False),
        (run("finished", age_days=31, memory_bytes=1), False),
        (run("stopped", age_days=400), False),
        (run("unknown", age_days=400), False),
        (run("running", live=True, age_days=400), False),
    ],
)
def test_old_runs_that_wait_to_be_resumed_are_kept(entry: RunEntry, freed: bool) -> None:
    """Only runs that have ended are deleted."""
    assert bool(old_runs([entry], now=1e9, days=30.0)) == freed
