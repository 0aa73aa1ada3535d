"""Before its first step, a resumed run has the DDP buckets of an uninterrupted run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo_run.runtime.errors import CheckpointError
from grpo_run.runtime.rank.exact.gradient_order import GradientOrder, needs_gradient_order


@pytest.fixture(autouse=True)
def _one_rank() -> Iterator[None]:
    """Open a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Reordered(torch.nn.Module):
    """A model whose forward pass uses the layers in another order than they are registered."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.last, self.first, self.middle = (torch.nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))  # type: ignore[no-any-return]


def model(**options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Reordered(), **options)


def step(trained: Any) -> None:
    trained(torch.ones(2, 4)).sum().backward()


def bucket_layout(trained: Any) -> str:
    """Return the parameter order of DDP's buckets; DDP reports it after several steps."""
    for _ in range(3):
        step(trained)
    trained(torch.ones(2, 4))
    return str(trained._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"])


def test_the_order_of_the_first_synchronized_backward_pass_is_recorded() -> None:
    """Gradient accumulation passes before it are ignored, as are later passes."""
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


def test_replay_rebuilds_the_buckets_before_the_first_step() -> None:
    """The buckets equal those of an uninterrupted model; gradients and weights are unchanged."""
    uninterrupted, resumed = model(), model()
    weights = [parameter.clone() for parameter in resumed.parameters()]
    order = GradientOrder(resumed)
    order.replay([0, 2, 1])
    assert all(parameter.grad is None for parameter in resumed.parameters())
    assert all(map(torch.equal, weights, resumed.parameters()))
    assert order.order == [0, 2, 1]
    for one, at_once in ((resumed, True), (uninterrupted, False)):
        one(torch.ones(2, 4))  # the forward pass of the first step
        assert one._has_rebuilt_buckets is at_once
    assert bucket_layout(resumed) == bucket_layout(uninterrupted) == "0 2 1"


@pytest.mark.parametrize("order", [[], [0, 1], [0, 1, 1], [0, 1, 3]])
def test_the_order_of_another_model_is_rejected(order: list[int]) -> None:
    """The check comes before any collective."""
    with pytest.raises(CheckpointError, match="the model has 3"):
        GradientOrder(model()).replay(order)


def test_hooks_are_removed() -> None:
    """They are removed when the order is known, and by `close` when the call ends earlier."""
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
def test_the_order_is_needed_only_where_buckets_are_rebuilt(
    options: dict[str, bool], world_size: int, expected: bool
) -> None:
    """Not needed for two ranks, for options that keep the buckets, or for a model without DDP."""
    assert needs_gradient_order(model(**options), world_size) is expected
    assert not needs_gradient_order(Reordered(), 8)
