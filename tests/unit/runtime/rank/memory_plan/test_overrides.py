"""Methods that a script puts in the place of a trainer's own: which of them leave its loss as it is."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.runtime.rank.memory_plan.overrides import passes_on


class Trainer:
    """Stands for a trainer of TRL."""

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return inputs


class Logs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        if len(inputs) > 2:
            raise RuntimeError("CUDA out of memory.")
        loss = super().compute_loss(model, inputs, return_outputs=return_outputs, **more)
        print(float(loss))
        return loss


class ReturnsAtOnce(Trainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        self.calls = 1
        return super().compute_loss(*args, **kwargs)


class UnpacksOutputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss, outputs = Trainer.compute_loss(self, model, inputs, True, **more)
        return (loss, outputs) if return_outputs else loss


class Scales(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        return loss * len(inputs)


class Reassigns(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        loss = loss + inputs.max()
        return loss  # noqa: RET504


class ChangesInPlace(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        loss = super().compute_loss(model, inputs, **more)
        loss.mul_(2)
        return loss


class ChangesInputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        inputs["mask"] = inputs["mask"] * 0
        return super().compute_loss(model, inputs, **more)


class FiltersInputs(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return super().compute_loss(model, sorted(inputs), **more)


class OwnLoss(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return model(inputs).mean()


class AnotherTrainers(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        return self.other.compute_loss(model, inputs, **more)  # type: ignore[attr-defined]


class SometimesOwn(Trainer):
    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any) -> Any:
        if len(inputs) > 4:
            return model(inputs).mean()
        return super().compute_loss(model, inputs, **more)


@pytest.mark.parametrize("trainer", [Logs, ReturnsAtOnce, UnpacksOutputs])
def test_a_method_that_returns_what_the_trainers_own_has_returned_leaves_the_loss(trainer: type) -> None:
    assert passes_on(vars(trainer)["compute_loss"], "compute_loss")


@pytest.mark.parametrize(
    "trainer",
    [Scales, Reassigns, ChangesInPlace, ChangesInputs, FiltersInputs, OwnLoss, AnotherTrainers, SometimesOwn],
)
def test_a_method_that_may_change_the_loss_is_the_scripts_own(trainer: type) -> None:
    assert not passes_on(vars(trainer)["compute_loss"], "compute_loss")


def wrapped(original: Callable[..., Any], factor: int | None) -> Callable[..., Any]:
    """A function for the object, as scripts put one there."""

    def logged(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs)

    @functools.wraps(original)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * factor

    return logged if factor is None else scaled


def test_a_function_on_the_object_is_judged_by_what_it_calls() -> None:
    trainer = Logs()
    assert passes_on(wrapped(trainer.compute_loss, None), "compute_loss")
    assert not passes_on(wrapped(trainer.compute_loss, 2), "compute_loss")
    assert not passes_on(wrapped(trainer.__init__, None), "compute_loss")


def test_a_method_whose_source_cannot_be_read_is_the_scripts_own() -> None:
    namespace: dict[str, Any] = {}
    exec("def compute_loss(self, *args):\n    return super().compute_loss(*args)", namespace)  # noqa: S102
    assert not passes_on(namespace["compute_loss"], "compute_loss")
    assert not passes_on(len, "compute_loss")
