"""Fixtures: a request to resume, a checkpoint writer, and a chooser that records rejections."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.identities import identity
from support.resuming import STARTED_AT, Save, plain

from grpo_run.runtime.checkpoints.manifest import TrainCall, mark_finished, write_manifest
from grpo_run.runtime.rank.resuming import _fit
from grpo_run.runtime.rank.resuming.choice import choose
from grpo_run.runtime.rank.resuming.request import RejectedCheckpoint, ResumeChoice, ResumeRequest


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """The call's `output_dir`."""
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


@pytest.fixture
def save(output: Path) -> Save:
    """Write a complete checkpoint of run-1's first call on two ranks."""

    def make(step: int, *, folder: Path = output, finished: bool = False, **changes: Any) -> Path:
        path = plain(folder, step)
        write_manifest(path, identity(folder, step, **({"world_size": 2} | changes)))
        if finished:
            mark_finished(path)
        return path

    return make


@pytest.fixture
def resume_request(output: Path) -> ResumeRequest:
    """The first call of run-1's first attempt, without a script argument."""
    return ResumeRequest(
        call=TrainCall(ordinal=1, trainer_class="GRPOTrainer", output_dir=str(output)),
        run_id="run-1",
        world_size=2,
        first_attempt=True,
        run_started_at=STARTED_AT,
        script_argument=None,
        resume_from=None,
    )


@pytest.fixture
def rejected() -> list[tuple[str, str]]:
    """Rejected checkpoints as (name, reason)."""
    return []


@pytest.fixture
def ask(rejected: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> Callable[..., ResumeChoice]:
    """Choose, and record rejections in `rejected`; by default every checkpoint can be resharded."""

    def run(
        resume_request: ResumeRequest,
        resharding_problem: Callable[[Path, int], str | None] = lambda folder, ranks: None,
    ) -> ResumeChoice:
        def report(one: RejectedCheckpoint) -> None:
            rejected.append((one.path.name, one.reason))

        monkeypatch.setattr(_fit, "resharding_problem", resharding_problem)
        return choose(resume_request, report)

    return run
