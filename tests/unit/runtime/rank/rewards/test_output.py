"""What a reward function may return: one number or None for each completion."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from grpo_run.runtime.rank.rewards._worker import OutputError, checked


@pytest.mark.parametrize(
    "output",
    [
        [0.5, 1, True, None], (0.5, 1, 1, None), (value for value in [0.5, 1, 1, None]),
    ],
)  # fmt: skip
def test_numbers_and_none_are_returned_as_they_are(output: Any) -> None:
    assert checked(output, 4) == [0.5, 1, 1, None]


@pytest.mark.parametrize("make", [np.array, torch.tensor])
def test_tensors_and_arrays_are_lists_of_floats(make: Any) -> None:
    values = checked(make([0.1, 0.25], dtype=(np if make is np.array else torch).float32), 2)
    assert [type(value) for value in values] == [float, float]
    assert np.float32(values[0]) == np.float32(0.1)


def test_nan_is_a_number_here() -> None:
    assert math.isnan(checked([float("nan")], 1)[0])


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (None, "returned None instead of a list of 2 rewards"),
        (1.0, "returned a float instead of a list of 2 rewards"),
        ("ab", "returned a str instead of a list of 2 rewards"),
        ([1.0], "returned 1 rewards, but 2 were expected, one per completion"),
        ([1.0, "2"], "returned a str as reward 1, which is not a number"),
        ([[1.0], 2.0], "returned a list as reward 0, which is not a number"),
    ],
)
def test_anything_else_is_named(output: Any, message: str) -> None:
    with pytest.raises(OutputError, match=f"^{message}$"):
        checked(output, 2)
