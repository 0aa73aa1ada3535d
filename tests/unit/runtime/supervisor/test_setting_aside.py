"""Checkpoints from the onset on are taken out of use; those of other calls and runs, and older ones, stay."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.identities import identity
from support.journal import as_event, as_events
from support.slots import fill, snapshot

from grpo_run.runtime.checkpoints.manifest import write_manifest
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import RolledBack
from grpo_run.runtime.history.history import History
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.drain_scheduler import DrainScheduler
from grpo_run.runtime.supervisor.setting_aside import can_go_back, set_aside


class World:
    """A run whose guard has tripped with an onset at step 30, with checkpoints on disk and in memory."""

    def __init__(self, folder: Path, config: RunConfig) -> None:
        self.out = folder / "out"
        self.staging = StagingArea(folder / "memory")
        self.config = replace(config, snapshot_directory=self.staging.path)
        self.events: list[Event] = []
        self.notified: list[str] = []
        self.reporter: Any = SimpleNamespace(write=self.events.append, notify=self.notified.append)
        self.history = History.of(
            as_events([
                {"event": "run_started", "time": 0.0},
                {
                    "event": "train_started", "train_call": 1, "step": 0, "rank": 0,
                    "trainer_class": "GRPOTrainer",
                    "output_dir": str(self.out),
                },
                {"event": "incident", "cause": "learning_collapse", "step": 33, "train_call": 1,
                "sentence": "It fell."},
                {"event": "action", "action": "restart_from_earlier_checkpoint", "before_step": 30},
            ])
        )  # fmt: skip
        self.drains = DrainScheduler(
            self.staging, write=lambda event: None, warn=self.notified.append, preloaded=False
        )

    def saves(self, step: int, name: str = "", **changes: Any) -> Path:
        """A checkpoint on disk."""
        path = self.out / (name or f"checkpoint-{step}")
        path.mkdir(parents=True)
        (path / "model.safetensors").write_bytes(b"weights")
        write_manifest(path, identity(self.out, step, **changes))
        return path

    def stages(self, slot: int, step: int, **changes: Any) -> None:
        """A snapshot in memory."""
        fill(self.staging.slots[slot], snapshot(self.out, step, **changes))

    def set_aside(self) -> bool:
        """Carry out the rollback."""
        return set_aside(self.history, self.config, self.drains, self.reporter)


@pytest.fixture
def world(tmp_path: Path, make_config: Callable[..., RunConfig]) -> World:
    """The run."""
    return World(tmp_path, make_config())


def test_what_is_from_the_onset_on_is_set_aside(world: World) -> None:
    """On disk renamed, with the reason; in memory discarded."""
    world.saves(20)
    world.saves(30)
    world.saves(32)
    world.saves(31, "checkpoint-31", ordinal=2)
    world.saves(33, "checkpoint-33", run_id="other")
    world.stages(0, 25)
    world.stages(1, 31)
    world.stages(2, 40, ordinal=2)
    assert world.set_aside()
    names = sorted(path.name for path in world.out.iterdir())
    assert names == [
        "checkpoint-20",
        "checkpoint-31",
        "checkpoint-33",
        "rejected-checkpoint-30",
        "rejected-checkpoint-32",
    ]
    assert "It fell." in (world.out / "rejected-checkpoint-30" / "REJECTED.json").read_text()
    assert sorted(staged.step for staged, _ in world.staging.snapshots()) == [25, 40]
    (event,) = world.events
    assert isinstance(event, RolledBack)
    assert (event.step, event.snapshots) == (25, [31])


def test_the_next_attempt_is_expected_to_begin_where_it_does(world: World) -> None:
    """Otherwise its start would be reported as one that repeats saved work."""
    world.saves(20)
    world.saves(30)
    world.history.apply(as_event({"event": "checkpoint_published", "step": 30, "train_call": 1, "path": "p"}))
    world.set_aside()
    (event,) = world.events
    world.history.apply(event)
    (call,) = world.history.calls
    assert call.saved == 20
    assert not world.set_aside()
    assert len(world.events) == 1


def test_a_rollback_that_loses_everything_is_not_possible(world: World) -> None:
    """If nothing is saved, going back to the start loses nothing that is saved."""
    assert can_go_back(world.history, world.config, 1, 30)
    world.saves(30)
    assert not can_go_back(world.history, world.config, 1, 30)
    world.stages(0, 31)
    assert not can_go_back(world.history, world.config, 1, 30)
    world.stages(0, 29)
    assert can_go_back(world.history, world.config, 1, 30)
    assert can_go_back(world.history, world.config, 2, 30)
