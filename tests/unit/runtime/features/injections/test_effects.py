"""What an injected fault does, and that it does nothing else."""

from __future__ import annotations

import atexit
import time
import types
from collections.abc import Callable

import pytest
import torch
from support.builders.trainers.injections import InjectedRank, Log

from grpo_run.runtime.features.injections import _faults
from grpo_run.runtime.upstream import trainer_names
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings


def test_an_injected_exit_has_code_0(log: Log) -> None:
    """Like a script that calls `sys.exit(0)`."""
    with pytest.raises(SystemExit) as caught:
        InjectedRank(log, "exit@rank1:step2").steps(1, 3)
    assert caught.value.code == 0


def test_a_fault_with_a_length_ends(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lasts the requested number of seconds."""
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    texts = [
        "hang@rank1:step1:seconds=5", "slow@rank1:step1", "hang@rank1:step1:phase=data:seconds=7",
        "hang@rank1:step1:phase=checkpoint:seconds=8", "lock@rank1:step1:seconds=0.001",
    ]  # fmt: skip
    rank = InjectedRank(log, *texts)
    rank.steps(1, 1)
    rank.enter(Phase.checkpoint, 2)
    assert slept == [7.0, 5.0, 1.0, 8.0]
    assert len(log.records) == 5


class _EndSleep(Exception):
    """Ends an endless sleep."""


def test_a_hang_without_a_length_does_not_end(log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps repeatedly."""
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 50:
            raise _EndSleep

    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(_EndSleep):
        InjectedRank(log, "hang@rank1:step1").steps(1, 1)


def test_an_early_return_ends_training_on_this_rank(log: Log) -> None:
    """When the step is over, after what the ranks have agreed on."""
    from transformers import TrainerControl

    rank = InjectedRank(log, "return@rank1:step2")
    trainer = types.SimpleNamespace(control=TrainerControl(), model=None)

    def agree() -> None:
        trainer.control.should_training_stop = False

    setattr(trainer, trainer_names.AFTER_STEP, agree)
    with rank.call(trainer=trainer):
        for step, leaves in ((1, False), (2, True)):
            rank.steps(step, step)
            getattr(trainer, trainer_names.AFTER_STEP)()
            assert trainer.control.should_training_stop is leaves


class Generating:
    """A trainer whose generation marks its phase and calls the model, as TRL's does."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(1, 1)
        self.rank: InjectedRank | None = None
        self.step = 0

    def _generate(self, passes: int) -> str:
        assert self.rank is not None
        self.rank.open_phases = (Phase.forward_backward, Phase.score, Phase.generate)
        self.rank.enter(Phase.generate, self.step)
        for _ in range(passes):
            self.model(torch.ones(1))
        self.rank.open_phases = (Phase.forward_backward,)
        return "done"


def test_generation_is_slow_in_its_step_only(log: Log, slept: list[float]) -> None:
    """Other forward passes keep their speed."""
    trainer = Generating()
    text = "slow-generation@rank1:step2:seconds=0.5"
    trainer.rank = InjectedRank(log, text)
    with trainer.rank.call(trainer=trainer):
        trainer.step = 1
        assert trainer._generate(2) == "done"
        assert slept == []
        trainer.step = 2
        trainer._generate(3)
        assert slept == [0.5] * 3
        trainer.model(torch.ones(1))
        trainer.step = 3
        trainer._generate(2)
        assert slept == [0.5] * 3


def test_the_exit_handler_hangs_at_exit(
    log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]
) -> None:
    """Registering it does not block."""
    handlers: list[Callable[[], None]] = []
    monkeypatch.setattr(atexit, "register", handlers.append)
    InjectedRank(log, "exit-hang@rank1:step2:seconds=4").steps(1, 3)
    assert slept == []
    handlers[0]()
    assert slept == [4.0]


def test_the_random_state_is_unchanged(log: Log, monkeypatch: pytest.MonkeyPatch, slept: list[float]) -> None:
    """A recovered run ends with the weights of a run without faults."""
    monkeypatch.setattr(torch.distributed, "get_backend", lambda: "gloo")
    before = torch.random.get_rng_state()
    _faults._ones(3)
    InjectedRank(log, "slow@rank1:step2", "hang@rank1:step3:seconds=1").steps(1, 4)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_an_endless_sleep_outlasts_every_deadline() -> None:
    """Else the next attempt would grant several times its length to anything in the same phase."""
    assert DeadlineSettings().ceiling_seconds < _faults.ENDLESS_SLEEP_SECONDS
