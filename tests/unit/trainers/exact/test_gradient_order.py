"""DDP lays its buckets out as in the run that was never hurt, before a resumed run's first step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo_run.runtime.errors import CheckpointError
from grpo_run.trainers.exact.gradient_order import GradientOrder, concerned


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Crossed(torch.nn.Module):
    """Uses its layers in another order than it names them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last, self.first, self.middle = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


def model(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Crossed(), **options)


def step(trained: Any) -> None:
    trained(torch.ones(2, 4)).sum().backward()


def layout(trained: Any) -> str:
    """What DDP says of its buckets after some steps; it gathers that over several."""
    for _ in range(3):
        step(trained)
    trained(torch.ones(2, 4))
    return str(trained._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])


def test_the_order_is_the_one_of_the_first_synchronised_pass() -> None:
    """Accumulating passes come before it and do not count."""
    trained = model()
    order = GradientOrder(trained)
    order.record()
    with trained.no_sync():
        step(trained)
    assert order.order is None
    step(trained)
    assert order.order == [0, 2, 1]
    step(trained)
    assert order.order == [0, 2, 1]


def test_a_replayed_order_lays_the_buckets_out_before_the_first_step() -> None:
    """As the undisturbed model has them from its second step on; nothing is left in gradients or weights."""
    undisturbed, resumed = model(), model()
    weights = [parameter.clone() for parameter in resumed.parameters()]
    order = GradientOrder(resumed)
    order.replay([0, 2, 1])
    assert all(parameter.grad is None for parameter in resumed.parameters())
    assert all(map(torch.equal, weights, resumed.parameters()))
    assert order.order == [0, 2, 1]
    for one, at_once in ((resumed, True), (undisturbed, False)):
        one(torch.ones(2, 4))  # the first step's
        assert one._has_rebuilt_buckets is at_once
    assert layout(resumed) == layout(undisturbed) == "0 2 1"


@pytest.mark.parametrize("order", [[], [0, 1], [0, 1, 1], [0, 1, 3]])
def test_the_order_of_another_model_is_refused(order: list[int]) -> None:
    """Before anything is sent."""
    with pytest.raises(CheckpointError, match="the model has 3"):
        GradientOrder(model()).replay(order)


def test_hooks_are_taken_off() -> None:
    """When the order is known, and when the call ends before."""
    for early in (True, False):
        trained = model()
        order = GradientOrder(trained)
        order.record()
        order.close() if early else step(trained)
        assert not any(parameter._post_accumulate_grad_hooks for parameter in trained.parameters())


@pytest.mark.parametrize(
    ("options", "world_size", "expected"),
    [
        ({}, 3, True),
        ({}, 2, False),
        ({"find_unused_parameters": True}, 8, False),
        ({"static_graph": True}, 8, False),
    ],
)
def test_only_models_whose_layout_changes_are_concerned(
    options: dict[str, bool], world_size: int, expected: bool
) -> None:
    """Two addends have one order."""
    assert concerned(model(**options), world_size) is expected
    assert not concerned(Crossed(), 8)
