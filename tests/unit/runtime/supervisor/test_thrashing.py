"""What the supervisor does about a rank whose allocator returns its caches in every step."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.memory_cases import facts

from grpo_run.runtime.history.lifecycle import Lifecycle, RunEvent
from grpo_run.runtime.history.reporter import LiveHistory, Reporter
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.launch.config import RunConfig
from grpo_run.runtime.memory.files import write_facts
from grpo_run.runtime.supervisor.faults import FaultHandler
from grpo_run.runtime.supervisor.quarantine import RunQuarantine
from grpo_run.watchdog.memory.retries import Retries
from grpo_run.watchdog.memory.shortage import MemoryPhase


class Scene:
    """A running run whose micro-batches can be halved."""

    def __init__(self, directory: Path) -> None:
        run = RunDirectory(path=directory)
        run.create()
        write_facts(directory, facts())
        live = LiveHistory(run.journal, "run")
        self.said: list[str] = []
        reporter = Reporter(live, str(directory), self.said.append)
        self.lifecycle = Lifecycle()
        self.lifecycle.fire(RunEvent.step_committed)
        self.facts = directory
        config = RunConfig(
            run_id="run", run_directory=directory, target="train.py", module=False, arguments=(), command=()
        )
        self.faults = FaultHandler(
            config, run, lifecycle=self.lifecycle, reporter=reporter, history=live.history,
            quarantine=RunQuarantine(run, live.history, reporter),
        )  # fmt: skip

    def thrashing(self, slowdown: float | None, phase: MemoryPhase = MemoryPhase.backward) -> Any:
        """Poll once while a rank retries in every step."""
        retries = Retries(rank=1, phase=phase, step=30, commits=10, count=40, slowdown=slowdown)
        attempt: Any = SimpleNamespace(retries=SimpleNamespace(found=retries), on_several_nodes=False)
        return self.faults.thrashing(attempt)


@pytest.fixture
def scene(tmp_path: Path) -> Scene:
    """A run of a model without dropout."""
    return Scene(tmp_path / "run")


def test_a_slow_rank_whose_plan_can_be_changed_is_a_fault(scene: Scene) -> None:
    """It is reported as well."""
    finding = scene.thrashing(4.0)
    assert finding is not None
    assert finding.retries.rank == 1
    assert len(scene.said) == 1


@pytest.mark.parametrize("slowdown", [None, 1.0, 2.9])
def test_a_rank_that_is_not_much_slower_is_reported_once_and_left_alone(
    scene: Scene, slowdown: float | None
) -> None:
    """It may go on so for ever."""
    assert [scene.thrashing(slowdown) for _ in range(3)] == [None] * 3
    (said,) = scene.said
    assert said.startswith("GPU memory of rank 1 is nearly exhausted (phase backward): ")


def test_a_slow_rank_that_cannot_be_helped_goes_on(scene: Scene) -> None:
    """Ending it would lose a run that proceeds."""
    assert scene.thrashing(9.0, MemoryPhase.unknown) is None
    write_facts(scene.facts, facts(dropout=True))
    assert scene.thrashing(9.0) is None


def test_a_stop_is_not_interrupted(scene: Scene) -> None:
    """The ranks save and end by themselves."""
    scene.lifecycle.fire(RunEvent.stop_requested)
    assert scene.thrashing(9.0) is None
    assert scene.said == []
