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

    def do(self, action: str) -> None:
        """Do one thing that loops do."""
        if action in ("backward", "overflow"):
            factor = float("inf") if action == "overflow" else 1.0
            (self.model(torch.ones(3)) * factor).sum().backward()
        elif action == "step":
            self.optimizer.step()
        else:
            self.optimizer.zero_grad(set_to_none=action == "zero")


@pytest.fixture
def training() -> Iterator[Training]:
    """A model whose optimizer is observed."""
    made = Training()
    made.steps.install()
    yield made
    made.steps.remove()


def test_a_step_is_seen_before_and_after(training: Training) -> None:
    """The vote is collected before the weights change. A script may step an optimizer that is not in the
    loop's state. The hooks are global, and are removed at the end.
    """
    training.do("backward")
    training.do("step")
    torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
    assert training.order == ["before", "after"] * 2
    training.steps.remove()
    training.do("step")
    assert training.order == ["before", "after"] * 2


def test_steps_of_other_threads_are_not_seen(training: Training) -> None:
    """The vote group is not thread-safe."""
    thread = threading.Thread(target=training.optimizer.step)
    thread.start()
    thread.join()
    assert training.order == []


@pytest.mark.parametrize(
    ("steps", "pending"),
    [
        ([["backward"], ["step"], ["backward"]], [True, False, True]),
        ([["backward", "step"], ["zero", "backward"]], [False, True]),
        ([["backward", "step"], [], []], [False, False, False]),
        ([["overflow"]], [False]),
        ([["backward", "zero in place"]], [False]),
    ],
    ids=["on top of used ones", "other tensors", "used", "refused by a scaler", "zeros"],
)
def test_gradients_that_no_step_has_used_are_pending(
    training: Training, steps: list[list[str]], pending: list[bool]
) -> None:
    """Many loops set gradients to zero at the start of the next step, or leave out a batch without a signal;
    `zero_grad(set_to_none=False)` leaves zeros. A scaler leaves out the optimizer's step on purpose.
    """
    found = []
    for actions in steps:
        for action in actions:
            training.do(action)
        found.append(training.steps.take_pending())
    assert found == pending
