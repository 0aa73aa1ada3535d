"""A rank at work is seen at work, and everything is given back."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.board.board import SlotWriter
from grpo_run.trainers.hooks.progress import show_work
from grpo_run.watchdog.observation import Slot


class Accelerator:
    """As much of accelerate's as is used."""

    def __init__(self) -> None:
        self.sync_gradients = True
        self.calls: list[tuple[Any, dict[str, Any]]] = []

    def backward(self, loss: Any, **kwargs: Any) -> str:
        """Remembers what it was given."""
        self.calls.append((loss, kwargs))
        return "done"


class Recorder:
    """Notes backwards."""

    def __init__(self) -> None:
        self.models: list[Any] = []
        self.open = 0

    @contextlib.contextmanager
    def backward(self, model: Any) -> Iterator[None]:
        """Counts those open."""
        self.models.append(model)
        self.open += 1
        yield
        self.open -= 1


@pytest.fixture
def trainer() -> Any:
    """A model of one layer, wrapped by something."""
    return SimpleNamespace(
        accelerator=Accelerator(), model=torch.nn.Linear(2, 1), model_wrapped=object(),
        args=SimpleNamespace(torch_compile=False),
    )  # fmt: skip


@pytest.fixture
def shown(slot: SlotWriter) -> Any:
    """A session with a recorder of backwards."""
    return SimpleNamespace(slot=slot, recorder=Recorder())


def test_every_forward_pass_counts(trainer: Any, shown: Any, reading: Callable[[], Slot]) -> None:
    """Generation is forward passes: slow is not hung. The output is what it was."""
    undo = show_work(trainer, shown)
    plain = torch.nn.functional.linear(torch.ones(2), trainer.model.weight, trainer.model.bias)
    assert reading().counted_seconds == 0.0
    assert torch.equal(trainer.model(torch.ones(2)), plain)
    first = reading().counted_seconds
    assert first > 0.0
    trainer.model(torch.ones(2))
    assert reading().counted_seconds > first
    undo()
    last = reading().counted_seconds
    trainer.model(torch.ones(2))
    assert reading().counted_seconds == last


@pytest.mark.parametrize("how", ["argument", "compiled"])
def test_a_compiled_model_is_left_alone(trainer: Any, shown: Any, how: str) -> None:
    """A hook would break its graph."""
    if how == "argument":
        trainer.args.torch_compile = True
    else:
        trainer.model._compiled_call_impl = lambda *args: None
    undo = show_work(trainer, shown)
    assert len(trainer.model._forward_pre_hooks) == 0
    undo()


def test_a_backward_is_noted_and_called_through(trainer: Any, shown: Any) -> None:
    """Of the model as it is wrapped, with whatever it was given, returning what it returned."""
    show_work(trainer, shown)
    assert trainer.accelerator.backward("loss", retain_graph=True) == "done"
    assert trainer.accelerator.calls == [("loss", {"retain_graph": True})]
    assert shown.recorder.models == [trainer.model_wrapped]
    assert shown.recorder.open == 0


def test_a_backward_that_only_accumulates_is_not_noted(trainer: Any, shown: Any) -> None:
    """No gradients are exchanged in it; the next one's are."""
    show_work(trainer, shown)
    trainer.accelerator.sync_gradients = False
    assert trainer.accelerator.backward("loss") == "done"
    assert shown.recorder.models == []
    trainer.accelerator.sync_gradients = True
    trainer.accelerator.backward("loss")
    assert len(shown.recorder.models) == 1


@pytest.mark.parametrize("own", [False, True])
def test_undoing_gives_back_what_was_there(trainer: Any, shown: Any, own: bool) -> None:
    """The class's method, or the one a script had set on the object; hooks of others stay."""
    others = trainer.model.register_forward_pre_hook(lambda module, inputs: None)
    if own:
        trainer.accelerator.backward = lambda loss: "own"
    before = dict(trainer.accelerator.__dict__)
    for _ in range(2):  # a second train() call begins from the same place
        undo = show_work(trainer, shown)
        undo()
    assert trainer.accelerator.__dict__ == before
    assert list(trainer.model._forward_pre_hooks) == [others.id]
