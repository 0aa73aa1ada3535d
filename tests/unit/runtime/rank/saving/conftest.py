"""Fixtures: trainers with an installed `Saver`, the snapshots of one rank, and a clock."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.saving import Guarded, Trainer
from support.snapshots import SnapshotTrainer, Time

from grpo_run.runtime.checkpoints.manifest import TrainCall
from grpo_run.runtime.rank.saving import _reservation as reservation
from grpo_run.runtime.rank.saving import _spare_files as spare_files
from grpo_run.runtime.rank.saving import contents
from grpo_run.runtime.rank.saving import snapshots as snapshots_module
from grpo_run.runtime.rank.saving.contents import UPLOAD_VARIABLES
from grpo_run.runtime.rank.saving.snapshots import Snapshots
from grpo_run.runtime.snapshots.area import StagingArea
from grpo_run.runtime.snapshots.headroom import Headroom


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    """A clock that advances when the code sleeps, so that no test waits."""
    made = Time()
    monkeypatch.setattr(reservation, "time", made)
    monkeypatch.setattr(snapshots_module, "time", made)
    return made


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The script's output directory."""
    return tmp_path / "out"


@pytest.fixture
def snapshots(session: Any, tmp_path: Path) -> Snapshots:
    """The snapshots of one rank."""
    return Snapshots(session, StagingArea(tmp_path / "memory"))


@pytest.fixture
def trainer(out: Path) -> SnapshotTrainer:
    """A trainer that writes to `out`."""
    return SnapshotTrainer(out)


@pytest.fixture(autouse=True)
def _fixed_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fix the library versions, and remove upload variables from the environment."""
    monkeypatch.setattr(contents, "_versions", lambda: {"torch": "2.13.0"})
    for name in UPLOAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def call(tmp_path: Path) -> TrainCall:
    """The script's first call."""
    return TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(tmp_path / "out"))


@pytest.fixture
def direct(tmp_path: Path, session: Any, call: TrainCall) -> Guarded:
    """A trainer that saves directly."""
    return Guarded(Trainer(tmp_path / "out"), session, call)


@pytest.fixture
def staged(tmp_path: Path, session: Any, call: TrainCall) -> Guarded:
    """A trainer that saves in memory."""
    return Guarded(
        Trainer(tmp_path / "out"), session, call, Snapshots(session, StagingArea(tmp_path / "memory"))
    )


@pytest.fixture
def lack_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Let no file in memory grow from now on."""
    full = Headroom(name="a full limit", free_bytes=0, total_bytes=1 << 30)
    return lambda: monkeypatch.setattr(spare_files, "least_headroom", lambda folder: full)


@pytest.fixture(params=["direct", "staged"])
def either(request: pytest.FixtureRequest) -> Guarded:
    """A trainer of each kind."""
    return request.getfixturevalue(request.param)  # type: ignore[no-any-return]


@pytest.fixture
def polls(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], Any]]:
    """Actions, one of which runs at each poll instead of a sleep."""
    script: list[Callable[[], Any]] = []

    def sleep(seconds: float) -> None:
        assert script, "the rank polls more often than expected"
        script.pop(0)()

    time = SimpleNamespace(sleep=sleep, monotonic=lambda: 100.0, perf_counter=lambda: 100.0)
    monkeypatch.setattr(reservation, "time", time)
    monkeypatch.setattr(snapshots_module, "time", time)
    return script
