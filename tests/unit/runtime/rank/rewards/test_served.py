"""What a trainer sees of rewards that failed in a worker."""

from __future__ import annotations

import pytest

from grpo_run.runtime.rank.points import failed
from grpo_run.runtime.rank.rewards.served import seen_by_trainer


@pytest.mark.parametrize("masked", [True, False])
def test_a_failure_is_none_to_a_trainer_that_masks_nothing(masked: bool) -> None:
    """Minus infinity marks it for the masking, and would otherwise reach the loss."""
    lost = failed("timeout")
    assert seen_by_trainer([0.5, lost, None], masked=masked) == [0.5, lost if masked else None, None]
    assert seen_by_trainer(None, masked=masked) is None
