"""Forward and backward passes are recorded as activity, and every hook is removed afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.rank.hooks.train_call import record_model_activity
from grpo_run.watchdog.observation import Slot

Reading = Callable[[], Slot]


class Accelerator:
    """The part of accelerate's `Accelerator` that is used."""

    def __init__(self) -> None:
        self.sync_gradients = True
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def backward(self, loss: Any, **kwargs: Any) -> str:
        """Record the arguments."""
        self.calls.append((loss, kwargs))
        return "done"


class Recorder:
    """Records the models whose backward passes were logged."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.open = 0

    @contextlib.contextmanager
    def backward(self, model: Any) -> Iterator[None]:
        """Count the backward passes in progress."""
        self.models.append(model)
        self.open += 1
        yield
        self.open -= 1


@pytest.fixture
def trainer() -> Any:
    """A trainer with a model of one layer."""
    return SimpleNamespace(
        accelerator=Accelerator(), model=torch.nn.Linear(2, 1), model_wrapped=object(),
        args=SimpleNamespace(torch_compile=False),
    )  # fmt: skip


@pytest.fixture
def recording(slot: SlotWriter) -> Any:
    """A session with a slot and a recorder."""
    return SimpleNamespace(slot=slot, recorder=Recorder())


def test_each_forward_pass_is_counted(trainer: Any, recording: Any, reading: Reading) -> None:
    """Forward passes count as activity, so slow generation is not a hang. The model's output is unchanged."""
    plain = torch.nn.functional.linear(torch.ones(2), trainer.model.weight, trainer.model.bias)
    with record_model_activity(trainer, recording):
        assert reading().last_work_seconds == 0.0
        assert torch.equal(trainer.model(torch.ones(2)), plain)
        first = reading().last_work_seconds
        assert first > 0.0
        trainer.model(torch.ones(2))
        assert reading().last_work_seconds > first
    last = reading().last_work_seconds
    trainer.model(torch.ones(2))
    assert reading().last_work_seconds == last


@pytest.mark.parametrize("how", ["argument", "compiled"])
def test_a_compiled_model_gets_no_hook(trainer: Any, recording: Any, how: str) -> None:
    """A hook would break its graph."""
    if how == "argument":
        trainer.args.torch_compile = True
    else:
        trainer.model._compiled_call_impl = lambda *args: None
    with record_model_activity(trainer, recording):
        assert len(trainer.model._forward_pre_hooks) == 0


def test_a_backward_that_synchronizes_gradients_is_logged(trainer: Any, recording: Any) -> None:
    """With the wrapped model; one that accumulates exchanges none. Arguments and result are unchanged."""
    with record_model_activity(trainer, recording):
        trainer.accelerator.sync_gradients = False
        assert trainer.accelerator.backward("loss") == "done"
        assert recording.recorder.models == []
        trainer.accelerator.sync_gradients = True
        assert trainer.accelerator.backward("loss", retain_graph=True) == "done"
    assert trainer.accelerator.calls == [("loss", {}), ("loss", {"retain_graph": True})]
    assert recording.recorder.models == [trainer.model_wrapped]
    assert recording.recorder.open == 0


@pytest.mark.parametrize("own", [False, True])
def test_the_original_backward_is_restored(trainer: Any, recording: Any, own: bool) -> None:
    """Both the class's method and one that a script set on the object; other hooks are kept."""
    others = trainer.model.register_forward_pre_hook(lambda module, inputs: None)
    if own:
        trainer.accelerator.backward = lambda loss: "own"
    before = dict(trainer.accelerator.__dict__)
    for _ in range(2):  # as in two train() calls of one trainer
        with record_model_activity(trainer, recording):
            pass
    assert trainer.accelerator.__dict__ == before
    assert list(trainer.model._forward_pre_hooks) == [others.id]
