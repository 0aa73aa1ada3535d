"""Commands that `grpo-run launch` refuses."""

from __future__ import annotations

import pytest

from grpo_run.cli.launching.command import parse
from grpo_run.runtime.errors import UsageError


def error(*words: str) -> str:
    """The line with which these words are refused."""
    with pytest.raises(UsageError) as caught:
        parse(words)
    line = str(caught.value)
    assert "\n" not in line
    return line
