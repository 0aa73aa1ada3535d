"""The text of `--guard`."""

from __future__ import annotations

import pytest

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.learning_guards.settings import (
    DEFAULT_RESPONSES,
    GuardResponse,
    LearningGuard,
    parse_guards,
)


def test_defaults_and_settings() -> None:
    """Non-finite rolls back and the others warn; a later setting of the same guard wins, with its limit."""
    rules = parse_guards([])
    assert {guard: rules.response(guard) for guard in LearningGuard} == dict(DEFAULT_RESPONSES)
    rules = parse_guards(["kl=stop:5", "capped=warn:0.3", "kl=off", "zero_variance=roll_back:12"])
    assert rules.response(LearningGuard.kl) is GuardResponse.off
    assert rules.response(LearningGuard.zero_variance) is GuardResponse.roll_back
    assert rules.limits == {LearningGuard.capped: 0.3, LearningGuard.zero_variance: 12.0}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("kl", "expected NAME=RESPONSE"),
        ("kll=stop", "did you mean kl?"),
        ("xyz=stop", "known: nonfinite, zero-variance"),
        ("kl=rollback", "did you mean roll-back?"),
        ("kl=stop:", "largest mean KL"),
        ("kl=stop:-1", "above 0"),
        ("kl=stop:nan", "above 0"),
        ("capped=stop:30", "below 1"),
        ("mismatch=warn:0", "largest mean difference between vLLM and the trainer in nats"),
        ("zero-variance=stop:2.5", "whole number"),
        ("nonfinite=stop:3", "nonfinite has no limit"),
    ],
)
def test_errors_are_one_line_that_helps(setting: str, says: str) -> None:
    """And they contain the setting."""
    with pytest.raises(ConfigError) as caught:
        parse_guards([setting])
    assert says in str(caught.value)
    assert setting in str(caught.value)
    assert "\n" not in str(caught.value)
