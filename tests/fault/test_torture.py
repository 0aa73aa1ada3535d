"""SIGKILL at every system call of saving and draining: what a run would resume from is always there, whole, and the newest.

A rank that takes a snapshot, or a drainer that makes one durable, is killed before, after and in the midst of each call
that changes a file, torch's and the kernel's own among them. `test_torture_runs.py` kills whole runs at random times.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.syscalls import Fall, Stop, unsupported
from support.torture import (
    OUR_RUN,
    Save,
    Yard,
    contents,
    copy,
    intact,
    litter,
    newest,
    resume,
    settle,
)

from grpo_run.runtime.checkpoints.manifest import LOCK
from grpo_run.runtime.staging.area import StagingArea

OLDER, STEP, NEXT = 4, 6, 8
MOST_CALLS = 500
"""A drain takes some seventy; one that takes as many as this would never be killed at its end."""


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    """A folder in memory: what a SIGKILL leaves does not depend on the disk, and syncing one a thousand times takes long."""
    reason = unsupported()
    if reason is not None:
        pytest.skip(reason)
    root = Path("/dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="grpo-run-torture-", dir=root if root.is_dir() else None))
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def yard(memory: Path) -> Iterator[Yard]:
    """One process that forks them all."""
    made = Yard(memory / "yard")
    yield made
    made.close()


def every_call(mode: str, trial: Callable[[Stop], Fall]) -> int:
    """Kill at the first call, at the second, and so on until a trial gets through; how many were killed."""
    for number in range(1, MOST_CALLS):
        if trial(Stop(number=number, mode=mode)).at is None:
            assert number > 3, "hardly anything was killed"
            return number - 1
    raise AssertionError(f"{MOST_CALLS} calls and no end")


def row(mode: str, what: str, killed: int) -> None:
    """For `docs/campaigns.md`."""
    where = "half-way through each write" if mode == "half" else f"{mode} each call"
    print(
        f"\n| SIGKILL {where} of {what} | {killed} | newest intact {killed} of {killed}, none half-written |"
    )


# ---- draining ----


@dataclass(frozen=True, kw_only=True)
class Scene:
    """What is in the output directory beside an older checkpoint when a snapshot of step 6 is drained.

    `limit` is the script's `save_total_limit`. `before` are names there, `after` those once it is durable.
    """

    same_step: str | None = None
    limit: int | None = None
    before: frozenset[str]
    after: frozenset[str]


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
}


@dataclass(frozen=True, kw_only=True)
class Prepared:
    """A folder to be copied for each trial, what the older checkpoint holds, and what the new one is to hold."""

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


def prepare(yard: Yard, memory: Path, scene: Scene) -> Prepared:
    """A real save of each checkpoint; all drained but the last."""
    trial = memory / "trial"
    shutil.rmtree(trial, ignore_errors=True)
    (trial / "out").mkdir(parents=True)
    made = {}
    saves = [(OLDER, OUR_RUN, 1.0), *([(STEP, scene.same_step, 2.0)] if scene.same_step else [])]
    for step, run_id, value in saves:
        yard.save(
            Save(staging=trial / "staging", output=trial / "out", step=step, value=value, run_id=run_id)
        )
        settle(trial / "staging")
        made[step] = contents(trial / "out" / f"checkpoint-{step}")
    yard.save(Save(staging=trial / "staging", output=trial / "out", step=STEP, value=3.0, limit=scene.limit))
    found = newest(trial / "staging")
    assert found is not None
    template = copy(trial, memory / "template")
    settle(trial / "staging")
    new = contents(trial / "out" / f"checkpoint-{STEP}")
    assert new not in made.values(), "weights of two saves are to differ"
    return Prepared(
        template=template, trial=trial, slot=found[1].index, older=made[OLDER], same_step=made.get(STEP), new=new
    )  # fmt: skip


def judge_drain(scene: Scene, prepared: Prepared, fall: Fall) -> None:
    """What must hold however a drain ended."""
    output, where = prepared.output, str(fall)
    there = intact(output)  # nothing half-written has a checkpoint's name
    published = there.get(f"checkpoint-{STEP}") == prepared.new
    found = newest(prepared.staging)
    assert found is not None, where
    assert (found[0].step, found[1].index) == (STEP, prepared.slot), where
    if found[1].drained or fall.at is None:
        assert published, where

    chosen = resume(output)
    assert chosen is not None, f"nothing to resume from: {where}"
    ours_was_there = scene.same_step == OUR_RUN
    expected = STEP if published or ours_was_there else OLDER
    assert chosen.name == f"checkpoint-{expected}", where
    allowed = {OLDER: prepared.older, STEP: prepared.new if published else prepared.same_step}[expected]
    assert contents(chosen) == allowed, where

    settle(prepared.staging)  # as the supervisor does before the next attempt
    chosen = resume(output)
    assert chosen == output / f"checkpoint-{STEP}", where
    assert contents(chosen) == prepared.new, where
    names = {path.name for path in output.iterdir()}
    # killed between publishing and rotating, an older one stays until the next checkpoint is published
    assert scene.after <= names <= scene.after | (scene.before if found[1].drained else set()), where
    left = litter(output) - {"replaced-checkpoint-6"}
    assert left <= ({f"checkpoint-{STEP}/{LOCK}"} if found[1].drained else set()), where
    if scene.same_step == "run-0":
        assert contents(output / "replaced-checkpoint-6") == prepared.same_step, where


@pytest.mark.parametrize(
    ("scene", "mode"),
    [
        pytest.param("rotating", "before"),
        pytest.param("rotating", "half"),
        pytest.param("again", "before"),
        pytest.param("again", "half", marks=pytest.mark.full),
        pytest.param("over-another-run", "before", marks=pytest.mark.full),
        *(pytest.param(scene, "after", marks=pytest.mark.full) for scene in SCENES),
    ],
)
def test_a_drainer_killed_at_any_call_leaves_the_newest_checkpoint_intact(
    yard: Yard, memory: Path, scene: str, mode: str
) -> None:
    """Never none, never a half-written one under a checkpoint's name, and draining again leaves nothing behind."""
    prepared = prepare(yard, memory, SCENES[scene])

    def trial(stop: Stop) -> Fall:
        copy(prepared.template, prepared.trial)
        fall = yard.drain(prepared.staging, prepared.slot, stop, below=[prepared.trial])
        judge_drain(SCENES[scene], prepared, fall)
        return fall

    row(mode, f"a drain ({scene})", every_call(mode, trial))


# ---- saving ----


@pytest.mark.parametrize(
    ("slots", "ranks", "victim", "mode"),
    [
        pytest.param("full", 1, 0, "before", marks=pytest.mark.full),
        pytest.param("full", 1, 0, "half"),
        pytest.param("full", 2, 1, "before"),
        pytest.param("full", 2, 0, "before", marks=pytest.mark.full),
        pytest.param("full", 2, 0, "after", marks=pytest.mark.full),
        pytest.param("full", 2, 1, "after", marks=pytest.mark.full),
        pytest.param("empty", 1, 0, "before", marks=pytest.mark.full),
        pytest.param("empty", 1, 0, "after", marks=pytest.mark.full),
        pytest.param("full", 1, 0, "after", marks=pytest.mark.full),
    ],
)
def test_a_rank_killed_at_any_call_of_a_snapshot_leaves_the_last_one_intact(
    yard: Yard, memory: Path, slots: str, ranks: int, victim: int, mode: str
) -> None:
    """The new one counts only when it is whole; else the last one does, and every byte of it is what was written."""
    base = memory / "trial"
    shutil.rmtree(base, ignore_errors=True)
    staging, output = base / "staging", base / "out"
    output.mkdir(parents=True)
    if slots == "full":
        # drained, so the next to be written; superseded; the newest, which is on disk nowhere
        for step, value in ((1, 1.0), (2, 2.0)):
            yard.save(save(base, step, value, ranks, scheduled=step == 1))
            if step == 1:
                settle(staging)
    yard.save(save(base, OLDER, 4.0, ranks))
    template = copy(base, memory / "template")
    settle(staging)
    older = contents(output / f"checkpoint-{OLDER}")
    copy(template, base)
    yard.save(save(base, STEP, 6.0, ranks))
    settle(staging)
    new = contents(output / f"checkpoint-{STEP}")

    def trial(stop: Stop) -> Fall:
        copy(template, base)
        fall = yard.save(save(base, STEP, 6.0, ranks), stop, below=[base], victim=victim)
        where, found = str(fall), newest(staging)
        assert found is not None, where
        assert found[0].step == STEP if fall.at is None else found[0].step in (OLDER, STEP), where
        assert not any(slot.busy for slot in StagingArea(staging).slots), where
        expected = older if found[0].step == OLDER else new
        settle(staging)
        chosen = resume(output, ranks=ranks)
        assert chosen is not None, where
        assert chosen.name == found[0].folder, where
        assert contents(chosen) == expected, where
        assert not litter(output), where
        # and the next attempt takes its own
        yard.save(save(base, NEXT, 8.0, ranks))
        settle(staging)
        assert resume(output, ranks=ranks) == output / f"checkpoint-{NEXT}", where
        intact(output)
        return fall

    row(mode, f"rank {victim} of {ranks} in a snapshot (slots {slots})", every_call(mode, trial))


def save(base: Path, step: int, value: float, ranks: int, *, scheduled: bool = False) -> Save:
    """A snapshot in the trial's folder."""
    return Save(
        staging=base / "staging", output=base / "out", step=step, value=value, world_size=ranks, scheduled=scheduled
    )  # fmt: skip
