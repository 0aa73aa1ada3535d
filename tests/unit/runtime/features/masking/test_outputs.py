"""What a reward function returned is passed on unchanged if it is valid, and its failures are marked."""

from __future__ import annotations

import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from grpo_run.runtime.features.masking._outputs import LARGEST, check
from grpo_run.runtime.features.masking._selection import RETURNED_NAN
from grpo_run.runtime.features.masking.events import MaskingReason
from grpo_run.runtime.rank.points import Failed, failed


@pytest.mark.parametrize(
    "returned",
    [
        [1.0, None, 0], (0.5, True, -2), np.array([0.1, 0.2, 0.3]), torch.tensor([1.0, 2.0, 3.0]),
        [np.float32(1), torch.tensor(2.0), LARGEST],
    ],
)  # fmt: skip
def test_valid_rewards_are_the_same_object(returned: Any) -> None:
    """TRL gets what the function returned, of whatever type."""
    values, reasons = check(returned, 3)
    assert values is returned
    assert reasons == {}


def test_a_generator_is_read_once() -> None:
    """TRL iterates what it is given, and so it must still be there."""
    values, reasons = check((value for value in (1.0, None)), 2)
    assert (values, reasons) == ([1.0, None], {})


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (math.nan, MaskingReason.nan),
        (torch.tensor(math.nan), MaskingReason.nan),
        (math.inf, MaskingReason.infinite),
        (-math.inf, MaskingReason.infinite),
        (1e39, MaskingReason.infinite),
        (-1e39, MaskingReason.infinite),
        (10**400, MaskingReason.infinite),
        ("0.5", MaskingReason.output),
        ([0.5, 1.0], MaskingReason.output),
        (1j, MaskingReason.output),
        (failed(MaskingReason.timeout), MaskingReason.timeout),
    ],
)
def test_a_fault_is_marked_and_the_others_are_kept(value: Any, reason: MaskingReason) -> None:
    """TRL turns the marks into numbers that survive its gather."""
    values, reasons = check([1.0, value, None], 3)
    assert reasons == {1: reason}
    assert values[0::2] == [1.0, None]
    mark = torch.tensor(values[:2], dtype=torch.float32)[1].item()
    assert mark == (RETURNED_NAN if reason is MaskingReason.nan else -math.inf)


@pytest.mark.parametrize("returned", [None, 1.0, [], [1.0, 2.0], "abc", {"a": 1.0}])
def test_a_wrong_number_of_rewards_fails_them_all(returned: Any) -> None:
    """Also no list at all: nobody knows which sample a reward belongs to."""
    values, reasons = check(returned, 3)
    assert [value.reason for value in values] == [MaskingReason.output] * 3
    assert set(reasons) == {0, 1, 2}


def test_a_failure_keeps_its_reason_between_processes() -> None:
    """A reward function may run in another process."""
    again = pickle.loads(pickle.dumps(failed(MaskingReason.exception)))
    assert isinstance(again, Failed)
    assert again == -math.inf
    assert again.reason is MaskingReason.exception
