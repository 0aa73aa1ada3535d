"""Gradients are pending if a backward pass has added them since the last optimizer step."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from grpo_run.runtime.rank.loops._optimizers import OptimizerSteps


class Training:
    """A model with an optimizer whose steps are observed."""

    def __init__(self) -> None:
        self.model = torch.nn.Linear(3, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.order: list[str] = []
        self.steps = OptimizerSteps(
            [self.optimizer],
            before=lambda: self.order.append("before"),
            after=lambda: self.order.append("after"),
        )

    def backward(self, factor: float = 1.0) -> None:
        """Add gradients."""
        (self.model(torch.ones(3)) * factor).sum().backward()


@pytest.fixture
def training() -> Iterator[Training]:
    """A model whose optimizer is observed."""
    made = Training()
    made.steps.install()
    yield made
    made.steps.remove()


def test_a_step_is_seen_before_and_after(training: Training) -> None:
    """The vote is collected before the weights change."""
    training.backward()
    training.optimizer.step()
    assert training.order == ["before", "after"]


def test_any_optimizer_is_seen(training: Training) -> None:
    """A script may step one that is not in the loop's state."""
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert training.order == ["before", "after"]


def test_steps_of_other_threads_are_not_seen(training: Training) -> None:
    """The vote group is not thread-safe."""
    thread = threading.Thread(target=training.optimizer.step)
    thread.start()
    thread.join()
    assert training.order == []


def test_nothing_is_seen_after_the_end(training: Training) -> None:
    """The hooks are global."""
    training.steps.remove()
    training.optimizer.step()
    assert training.order == []


def test_added_gradients_are_pending(training: Training) -> None:
    """Also on top of those that a step has used."""
    training.backward()
    assert training.steps.take_pending()
    training.optimizer.step()
    assert not training.steps.take_pending()
    training.backward()
    assert training.steps.take_pending()


def test_new_gradients_after_zero_grad_are_pending(training: Training) -> None:
    """They are other tensors."""
    training.backward()
    training.optimizer.step()
    assert not training.steps.take_pending()
    training.optimizer.zero_grad()
    training.backward()
    assert training.steps.take_pending()


def test_used_gradients_are_not_pending(training: Training) -> None:
    """Many loops set them to zero at the start of the next step, or leave out a batch without a signal."""
    training.backward()
    training.optimizer.step()
    assert [training.steps.take_pending() for _ in range(3)] == [False, False, False]


def test_gradients_that_a_scaler_refuses_are_not_pending(training: Training) -> None:
    """The optimizer's step is left out for them on purpose."""
    training.backward(float("inf"))
    assert not training.steps.take_pending()


def test_zero_gradients_are_not_pending(training: Training) -> None:
    """`zero_grad(set_to_none=False)` leaves them."""
    training.backward()
    training.optimizer.zero_grad(set_to_none=False)
    assert not training.steps.take_pending()
