"""An optimizer step outside `train()` is noticed once, and nothing else is."""

from __future__ import annotations

import functools
import gc
import sys
import weakref
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from grpo_run.runtime.rank.hooks._no_trainer import watch_optimizer_steps
from grpo_run.watchdog.observation import RankState, Slot

Reading = Callable[[], Slot]

Optimizer = torch.optim.Optimizer


@pytest.fixture
def optimizer() -> Optimizer:
    """An optimizer of one parameter with a gradient."""
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.grad = torch.ones(2)
    return torch.optim.SGD([parameter], lr=0.1)


@pytest.fixture(autouse=True)
def _watched(session: Any) -> Iterator[None]:
    """Watch the optimizers of this process for the length of the test."""
    handles: list[Any] = []
    module = SimpleNamespace(
        register_optimizer_step_pre_hook=lambda hook: handles.append(register_optimizer_step_pre_hook(hook))
    )
    watch_optimizer_steps(module, session, lambda: session.slot.state is RankState.training)
    yield
    for handle in handles:
        handle.remove()


def noticed(events: Callable[[], list[dict[str, Any]]]) -> list[str]:
    """The Trainer of each event."""
    return [event["trainer"] for event in events() if event["event"] == "trains_without_trainer"]


def test_the_first_step_is_on_the_board_and_in_the_journal(
    optimizer: Optimizer, reading: Reading, events: Any, session: Any
) -> None:
    """Further steps are only counted."""
    assert not reading().trains_without_trainer
    optimizer.step()
    optimizer.step()
    assert reading().trains_without_trainer
    assert noticed(events) == [""]
    assert session.own_steps == 2


def test_steps_of_a_train_call_are_not_the_script_s(
    optimizer: Optimizer, reading: Reading, events: Any, session: Any
) -> None:
    """Steps before and after it are, each time."""
    optimizer.step()
    session.slot.state, session.slot.train_call = RankState.training, 1
    session.slot.publish()
    optimizer.step()
    assert not reading().trains_without_trainer
    session.slot.state = RankState.between
    session.slot.publish()
    assert not reading().trains_without_trainer
    optimizer.step()
    assert reading().trains_without_trainer
    assert noticed(events) == ["", ""]


def test_a_process_that_was_forked_from_the_rank_says_nothing(
    optimizer: Optimizer, events: Any, session: Any
) -> None:
    """It has no part in the run."""
    session.is_rank = False
    optimizer.step()
    assert noticed(events) == []


@pytest.mark.parametrize(
    ("name", "noticed_as"), [("PPOTrainer", ["PPOTrainer"]), ("Inheriting", ["Trainer"]), ("Idle", [""])]
)
def test_a_trainer_outside_a_guarded_call_is_named(
    name: str, noticed_as: list[str], optimizer: Optimizer, events: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hyperparameter search, or a `train()` of its own: the class whose method runs. A script may use a
    Trainer's class for something else than training.
    """

    def wrapped(method: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(method)
        def call(self: Any) -> None:
            method(self)

        return call

    class Trainer:
        """The class in `transformers.trainer`."""

        def train(self) -> None:
            """Train."""
            optimizer.step()

    class PPOTrainer(Trainer):
        """A class of the script."""

        @wrapped
        def train(self) -> None:
            """Train."""
            optimizer.step()

    class Inheriting(Trainer):
        """A class of the script."""

    class Idle(Trainer):
        """A class that does not train."""

        def train(self) -> None:
            """Do nothing."""

    module: Any = ModuleType("transformers.trainer")
    module.Trainer = Trainer
    monkeypatch.setitem(sys.modules, "transformers.trainer", module)
    {"PPOTrainer": PPOTrainer, "Inheriting": Inheriting, "Idle": Idle}[name]().train()
    optimizer.step()
    assert [one.rpartition(".")[2] for one in noticed(events)] == noticed_as


def test_the_script_s_variables_are_neither_kept_nor_changed(optimizer: Optimizer, events: Any) -> None:
    """A loop runs in one function to the end: what is kept of its first step is kept for the whole run."""

    class Batch:
        """Stands for tensors of the first step."""

    def train() -> tuple[bool, dict[str, Any]]:
        arguments = locals()
        batch = Batch()
        alive = weakref.ref(batch)
        optimizer.step()
        assert noticed(events) == [""]
        del batch
        gc.collect()
        return alive() is None, arguments

    assert train() == (True, {"events": events, "optimizer": optimizer, "Batch": Batch})


def test_a_subclass_with_a_step_of_its_own_is_noticed(events: Any) -> None:
    """Torch wraps it when it is made."""

    class Muon(Optimizer):
        """As scripts write it."""

        def step(self) -> None:  # type: ignore[override]
            """Do nothing."""

    Muon([torch.nn.Parameter(torch.ones(1))], {}).step()
    assert noticed(events) == [""]


@pytest.mark.full
def test_a_compiled_step_compiles(optimizer: Optimizer) -> None:
    """The hook is traced with it."""

    def step() -> None:
        optimizer.step()

    compiled = torch.compile(step, backend="eager")
    compiled()
    compiled()


def test_the_step_with_which_torch_creates_an_optimizer_s_state_is_none_of_training(
    optimizer: Optimizer, events: Any
) -> None:
    """It is taken before a state is loaded, also by Trainers."""
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = torch.nn.Linear(2, 1)
    get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    assert noticed(events) == []
    optimizer.step()
    assert noticed(events) == [""]
