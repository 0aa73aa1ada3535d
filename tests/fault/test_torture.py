"""SIGKILL at any system call of saving or draining leaves the newest checkpoint loadable.

A rank that takes a snapshot, or a drain worker that publishes one, is killed before, after and half-way
through each system call that changes a file, including calls by torch. `test_torture_runs.py` kills whole
runs at random moments.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
from support.syscalls import Stop, Trace, unsupported
from support.torture import (
    OUR_RUN,
    Save,
    VictimServer,
    contents,
    copy,
    drain_all,
    newest,
    resume,
    unexpected_files,
    verified_checkpoints,
)

from grpo_run.runtime.checkpoints.manifest import LOCK
from grpo_run.runtime.checkpoints.search import name_of, snapshot_places
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.slot import path_of

OLDER, STEP, NEXT = 4, 6, 8
MOST_CALLS = 500
"""Upper bound on counted calls; a drain makes about 70, a snapshot about 220."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """Create a folder in memory: SIGKILL leaves the same files as on a disk, and thousands of syncs are
    fast.
    """
    reason = unsupported()
    if reason is not None:
        pytest.skip(reason)
    root = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="grpo-run-torture-", dir=root if root.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(memory: Path) -> Iterator[VictimServer]:
    """Start the process that forks every victim."""
    made = VictimServer(memory / "server")
    yield made
    made.close()


def kill_at_calls(mode: str, trial: Callable[[Stop], Trace], *, every: bool) -> int:
    """Kill at every call, or at the first and the last of those in a row that are alike; return the number.

    `torch.save` writes a file by 34 to 64 calls that are alike.
    """
    calls = trial(Stop(number=MOST_CALLS, mode=mode)).calls
    assert len(calls) < MOST_CALLS
    apart = [one != other for one, other in pairwise(calls)]
    ends = zip([True, *apart], [*apart, True], strict=True)
    numbers = [number for number, of_several in enumerate(ends, 1) if every or any(of_several)]
    assert len(numbers) > 3, "too few kills"
    for number in numbers:
        assert trial(Stop(number=number, mode=mode)).at is not None, f"no call {number}"
    return len(numbers)


def row(mode: str, what: str, killed: int) -> None:
    """Print a row for `docs/reference/campaigns.md`."""
    where = "half-way through each write" if mode == "half" else f"{mode} each call"
    print(
        f"\n| SIGKILL {where} of {what} | {killed} | newest checkpoint verified {killed} of {killed}, no"
        " partial checkpoint |"
    )


# ---- draining ----


@dataclass(frozen=True, kw_only=True)
class Scene:
    """Contents of the output directory, besides an older checkpoint, when a snapshot of step 6 is drained.

    `limit` is the script's `save_total_limit`. `before` and `after` are the names before and after
    publishing. What is not `scheduled` is published as a snapshot.
    """

    scheduled: bool = True
    same_step: str | None = None
    limit: int | None = None
    before: frozenset[str]
    after: frozenset[str]

    def path(self, output: Path, step: int) -> Path:
        """Return where the checkpoint or snapshot of a step is published: a snapshot beside `output`, which
        is empty in its scenes.
        """
        directory = output if self.scheduled else snapshot_places(output, OUR_RUN, 1)[1]
        return directory / name_of(directory, step)


SCENES = {
    "rotating": Scene(limit=1, before=frozenset({"checkpoint-4"}), after=frozenset({"checkpoint-6"})),
    "again": Scene(
        same_step=OUR_RUN,
        before=frozenset({"checkpoint-4", "checkpoint-6"}),
        after=frozenset({"checkpoint-4", "checkpoint-6"}),
    ),
    "over-another-run": Scene(
        same_step="run-0",
        before=frozenset({"checkpoint-4", "checkpoint-6"}),
        after=frozenset({"checkpoint-4", "checkpoint-6", "replaced-checkpoint-6"}),
    ),
    "snapshot": Scene(scheduled=False, before=frozenset({"snapshot-4"}), after=frozenset({"snapshot-6"})),
    "snapshot-again": Scene(
        scheduled=False,
        same_step=OUR_RUN,
        before=frozenset({"snapshot-6"}),  # which has superseded the one of step 4
        after=frozenset({"snapshot-6"}),
    ),
}

DRAIN_CAMPAIGN = (
    ("rotating", "before"), ("rotating", "half"), ("again", "before"), ("again", "half"),
    ("snapshot", "before"), ("snapshot", "half"), ("snapshot-again", "before"),
    ("over-another-run", "before"),
    *((scene, "after") for scene in SCENES),
)  # fmt: skip
SAVE_CAMPAIGN = (
    ("full", 1, 0, "before"), ("full", 1, 0, "half"), ("full", 2, 1, "before"), ("full", 2, 0, "before"),
    ("full", 2, 0, "after"), ("full", 2, 1, "after"), ("empty", 1, 0, "before"), ("empty", 1, 0, "after"),
    ("full", 1, 0, "after"),
)  # fmt: skip
"""State of the slots, number of ranks, the rank that is killed, and when."""


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A template folder to copy for each trial, with the digests of the older and of the new checkpoint."""

    template: Path
    trial: Path
    slot: int
    older: dict[str, str]
    same_step: dict[str, str] | None
    new: dict[str, str]

    @property
    def staging(self) -> Path:
        return self.trial / "staging"

    @property
    def output(self) -> Path:
        return self.trial / "out"


def prepare(server: VictimServer, memory: Path, scene: Scene) -> Prepared:
    """Save each checkpoint for real and drain all but the last."""
    trial = memory / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    (trial / "out").mkdir(parents=True)
    made = {}
    saves = [(OLDER, OUR_RUN, 1.0), *([(STEP, scene.same_step, 2.0)] if scene.same_step else [])]
    for step, run_id, value in saves:
        server.save(
            Save(
                staging=trial / "staging", output=trial / "out", step=step, value=value,
                scheduled=scene.scheduled,
                run_id=run_id,
            )
        )  # fmt: skip
        drain_all(trial / "staging")
        made[step] = contents(scene.path(trial / "out", step))
    server.save(
        Save(
            staging=trial / "staging", output=trial / "out", step=STEP, value=3.0, scheduled=scene.scheduled,
            limit=scene.limit,
        )
    )  # fmt: skip
    found = newest(trial / "staging")
    assert found is not None
    template = copy(trial, memory / "template")
    drain_all(trial / "staging")
    new = contents(scene.path(trial / "out", STEP))
    assert new not in made.values(), "the weights of two saves must differ"
    return Prepared(
        template=template, trial=trial, slot=found[1].index, older=made[OLDER], same_step=made.get(STEP),
        new=new
    )  # fmt: skip


def check_drain(scene: Scene, prepared: Prepared, trace: Trace) -> None:
    """Check what must hold however the drain ended."""
    output, where = prepared.output, str(trace)
    there = verified_checkpoints(output)  # no partial checkpoint has a checkpoint's name
    published = there.get(scene.path(output, STEP).name) == prepared.new
    found = newest(prepared.staging)
    assert found is not None, where
    assert (found[0].step, found[1].index) == (STEP, prepared.slot), where
    if found[1].drained or trace.at is None:
        assert published, where

    chosen = resume(output)
    assert chosen is not None, f"nothing to resume from: {where}"
    ours_was_there = scene.same_step == OUR_RUN
    expected = STEP if published or ours_was_there else OLDER
    assert chosen == scene.path(output, expected), where
    allowed = {OLDER: prepared.older, STEP: prepared.new if published else prepared.same_step}[expected]
    assert contents(chosen) == allowed, where

    drain_all(prepared.staging)  # as the supervisor does before the next attempt
    chosen = resume(output)
    assert chosen == scene.path(output, STEP), where
    assert contents(chosen) == prepared.new, where
    kept = {"replaced-checkpoint-6"} & {path.name for path in output.iterdir()}
    names = kept | set(verified_checkpoints(output))
    # killed between publishing and rotation, the older one stays until the next checkpoint is published
    assert scene.after <= names <= scene.after | (scene.before if found[1].drained else set()), where
    left = unexpected_files(output) - kept
    assert left <= ({os.path.relpath(chosen / LOCK, output)} if found[1].drained else set()), where
    if scene.same_step == "run-0":
        assert contents(output / "replaced-checkpoint-6") == prepared.same_step, where


@pytest.mark.parametrize(
    ("scene", "mode", "every"),
    [
        pytest.param("rotating", "half", False),
        pytest.param("again", "before", False),
        *(pytest.param(scene, mode, True, marks=pytest.mark.full) for scene, mode in DRAIN_CAMPAIGN),
    ],
)
def test_drain_worker_killed_at_any_call_leaves_the_newest_checkpoint_loadable(
    server: VictimServer, memory: Path, scene: str, mode: str, every: bool
) -> None:
    """There is always a checkpoint, never a partial one, and draining again leaves no other files."""
    prepared = prepare(server, memory, SCENES[scene])

    def trial(stop: Stop) -> Trace:
        copy(prepared.template, prepared.trial)
        trace = server.drain(prepared.staging, prepared.slot, stop, below=[prepared.trial])
        check_drain(SCENES[scene], prepared, trace)
        return trace

    row(mode, f"a drain ({scene})", kill_at_calls(mode, trial, every=every))


# ---- saving ----


@pytest.mark.parametrize(
    ("slots", "ranks", "victim", "mode", "every"),
    [
        pytest.param("full", 1, 0, "half", False),
        pytest.param("full", 2, 1, "before", False),
        *(pytest.param(*one, True, marks=pytest.mark.full) for one in SAVE_CAMPAIGN),
    ],
)
def test_rank_killed_at_any_call_of_a_snapshot_leaves_the_previous_one_loadable(
    server: VictimServer, memory: Path, slots: str, ranks: int, victim: int, mode: str, every: bool
) -> None:
    """A snapshot counts only when complete; otherwise the previous one does, with every byte verified."""
    base = memory / "trial"
    shutil.rmtree(base, ignore_errors=True)
    staging, output = base / "staging", base / "out"
    inside, beside = snapshot_places(output, OUR_RUN, 1)
    snapshots = inside if slots == "full" else beside
    output.mkdir(parents=True)
    if slots == "full":
        # three slots: drained, superseded, and the newest, which is not on disk
        for step, value in ((1, 1.0), (2, 2.0)):
            server.save(save(base, step, value, ranks, scheduled=step == 1))
            if step == 1:
                drain_all(staging)
    server.save(save(base, OLDER, 4.0, ranks))
    template = copy(base, memory / "template")
    drain_all(staging)
    older = contents(snapshots / f"snapshot-{OLDER}")
    copy(template, base)
    server.save(save(base, STEP, 6.0, ranks))
    drain_all(staging)
    new = contents(snapshots / f"snapshot-{STEP}")

    def trial(stop: Stop) -> Trace:
        copy(template, base)
        trace = server.save(save(base, STEP, 6.0, ranks), stop, below=[base], victim=victim)
        where, found = str(trace), newest(staging)
        assert found is not None, where
        assert found[0].step == STEP if trace.at is None else found[0].step in (OLDER, STEP), where
        assert not any(slot.busy for slot in StagingArea(staging).slots), where
        expected = older if found[0].step == OLDER else new
        found[1].check_complete(found[0])  # it can be loaded from memory
        drain_all(staging)
        chosen = resume(output, ranks=ranks)
        assert chosen == path_of(found[0]), where
        assert contents(chosen) == expected, where
        assert not unexpected_files(output), where
        # the next attempt takes a snapshot of its own
        server.save(save(base, NEXT, 8.0, ranks))
        drain_all(staging)
        assert resume(output, ranks=ranks) == snapshots / f"snapshot-{NEXT}", where
        verified_checkpoints(output)
        return trace

    killed = kill_at_calls(mode, trial, every=every)
    row(mode, f"rank {victim} of {ranks} in a snapshot (slots {slots})", killed)


def save(base: Path, step: int, value: float, ranks: int, *, scheduled: bool = False) -> Save:
    """Describe a snapshot in the trial's folder."""
    return Save(
        staging=base / "staging", output=base / "out", step=step, value=value, world_size=ranks,
        scheduled=scheduled
    )  # fmt: skip
