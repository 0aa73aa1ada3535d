"""Which completions leave the loss, and when rewards are computed once more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import pytest

from grpo_run.cli.launching.command import parse
from grpo_run.runtime.errors import UsageError


@pytest.mark.parametrize(
    ("words", "ends", "share"),
    [
        ((), ("repetition", "deadline"), 0.5),
        (("--mask-capped", "none", "--repeat-rewards-above", "1"), (), 1.0),
        (("--mask-capped", "length,deadline"), ("length", "deadline"), 0.5),
    ],
)
def test_exclusion(at_home: Path, words: Sequence[str], ends: tuple[str, ...], share: float) -> None:
    """Which completions leave the loss, and when rewards are computed once more."""
    masking = parse([*words, "train.py"]).config.masking
    assert (masking.masked_ends, masking.repeat_rewards_above) == (ends, share)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--mask-capped", "eos"), "--mask-capped eos: give none, or some of length, repetition, deadline"),
        (("--repeat-rewards-above", "2"), "--repeat-rewards-above 2: must be a share from 0 to 1"),
        (("--repeat-rewards-above", "nan"), "--repeat-rewards-above nan: must be a share from 0 to 1"),
    ],
)
def test_exclusion_that_cannot_be(at_home: Path, words: Sequence[str], said: str) -> None:
    """The line names the option and what it may be."""
    with pytest.raises(UsageError, match=re.escape(said)):
        parse([*words, "train.py"])
