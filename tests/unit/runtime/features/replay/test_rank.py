"""What a rank records of its steps, and what a replay leaves out."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.replay import rank as replay_rank
from grpo_run.runtime.features.replay.rank import PART
from grpo_run.runtime.features.replay.settings import ReplaySettings
from grpo_run.runtime.history import step_records
from grpo_run.runtime.rank.points import CallPoints, RolloutPoints


class Call:
    """A loop on one rank, with a module and an optimizer."""

    def __init__(self, folder: Path, keep_every: int, replay: ReplaySettings = ReplaySettings()) -> None:  # noqa: B008 - frozen
        self.warned: list[str] = []
        self.steps = folder / "steps"
        votes = SimpleNamespace(collect=lambda: None, gather=lambda values: [values])
        config = SimpleNamespace(keep_every=keep_every, run_directory=folder, of=lambda kind: replay)
        self.session: Any = SimpleNamespace(
            rank=0, votes=votes, config=config, warn_in_journal=self.warned.append
        )
        self.model = torch.nn.Linear(2, 2)
        optimizer = torch.optim.SGD(self.model.parameters(), momentum=0.9)
        self.points = CallPoints(train_call=1, models=[self.model], optimizers=[optimizer], hooks=ExitStack())
        PART.call(self.session, self.points)

    def step(self, number: int, **logged: float) -> None:
        """Take a step."""
        points = self.points
        for begins in points.step_begins:
            begins(number)
        for takes in points.logged:
            takes(logged)
        for steps in (points.step_ends, points.steps_over):
            for one in steps:
                one(number)

    def records(self) -> step_records.Records:
        """Return what was recorded."""
        return step_records.read(self.steps, 0)


def test_a_run_that_keeps_nothing_is_not_touched(tmp_path: Path) -> None:
    """No hook, and no file."""
    call = Call(tmp_path, keep_every=0)
    points, rollouts = call.points, RolloutPoints(facts=None)  # type: ignore[arg-type]
    PART.rollouts(None, call.session, 1, rollouts)
    added = (points.step_begins, points.step_ends, points.steps_over, points.logged, rollouts.rewards)
    assert not any(added)
    assert not call.steps.exists()


def test_every_step_is_recorded_with_every_bit(tmp_path: Path) -> None:
    """A weight that changes in the next step changes its digest only."""
    call = Call(tmp_path, keep_every=4)
    call.step(1, loss=0.1, grad_norm=2.0)
    call.model.bias.data[1] += 1
    call.step(2, loss=float("nan"))
    first, second = (call.records()[1, number] for number in (1, 2))
    assert (first.loss, first.grad_norm, second.loss, second.grad_norm) == (
        (0.1).hex(), (2.0).hex(), "nan", None
    )  # fmt: skip
    assert {name for name, digest in first.tensors().items() if second.tensors()[name] != digest} == {"bias"}


def test_a_replay_records_what_it_has_loaded_and_ends_after_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An alarm of a step that the run has gone on from does not end it before."""
    ended: list[int] = []
    monkeypatch.setattr(replay_rank, "_end", lambda session: ended.append(1))
    call = Call(tmp_path, 0, ReplaySettings(train_call=1, last_step=6))
    call.points.alarm = object()  # type: ignore[assignment]
    call.step(5)
    assert (ended, call.points.alarm) == ([], None)
    call.step(6)
    assert ended == [1]
    assert [(step, one.starts) for (_, step), one in call.records().items()] == [
        (4, True), (5, False), (6, False)
    ]  # fmt: skip


def test_another_call_of_a_replay_does_not_end_it(tmp_path: Path) -> None:
    """Calls before it are restored, or take the same steps."""
    call = Call(tmp_path, 0, ReplaySettings(train_call=2, last_step=1))
    call.step(1)
    assert (1, 1) in call.records()


def test_a_disk_that_cannot_be_written_ends_the_recording_only(tmp_path: Path) -> None:
    """It is said once."""
    call = Call(tmp_path, keep_every=4)
    call.steps.touch()  # a file, where the folder is to be
    call.step(1)
    call.step(2)
    assert len(call.warned) == 1
