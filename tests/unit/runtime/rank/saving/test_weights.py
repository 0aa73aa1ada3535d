"""One NaN or infinite weight is detected; large finite weights are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.saving.saver import has_non_finite_weights


def trained(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors as parameters that are trained."""
    return [tensor.requires_grad_() if tensor.is_floating_point() else tensor for tensor in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_non_finite_weight_is_detected(dtype: torch.dtype, value: float) -> None:
    """Holds for any type, alone and among finite weights."""
    bad = torch.ones(1000, dtype=dtype)
    bad[617] = value
    good = torch.ones(10)
    assert has_non_finite_weights(trained(good, bad, good))
    assert has_non_finite_weights(trained(bad))


def test_large_weights_are_finite() -> None:
    """The check does not overflow."""
    assert not has_non_finite_weights(trained(torch.full((4096,), 65504.0, dtype=torch.float16)))
    assert not has_non_finite_weights(trained(torch.full((10,), 3e38), torch.full((10,), -3e38)))


def test_a_model_without_floating_point_weights_is_finite() -> None:
    """Holds for a model without parameters, with empty parameters, and with integers and masks."""
    assert not has_non_finite_weights(trained())
    assert not has_non_finite_weights(trained(torch.empty(0), torch.tensor([1, 2]), torch.tensor([True])))


def test_the_shard_of_this_rank_is_checked() -> None:
    """Under ZeRO-3 the parameter itself is empty, and the shard is in `ds_tensor`."""
    parameter: Any = torch.nn.Parameter(torch.empty(0))
    parameter.ds_tensor = torch.tensor([1.0, float("nan")])
    assert has_non_finite_weights(trained(parameter))


def test_the_check_does_not_change_gradients() -> None:
    """It runs without autograd."""
    parameter = torch.nn.Parameter(torch.ones(10))
    assert not has_non_finite_weights(trained(parameter))
    assert parameter.grad is None
