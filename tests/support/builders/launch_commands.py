"""Commands of `grpo-run launch`: what they ask for after all checks, or how they are refused."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from grpo_run.cli.launching.command import parse
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.launching._configuration import PreparedLaunch, configure


def prepare(words: Sequence[str]) -> PreparedLaunch:
    """Parse and check a command."""
    request, _ = parse(words)
    return configure(request)


def error(*words: str) -> str:
    """The line with which these words are refused."""
    with pytest.raises(UsageError) as caught:
        prepare(words)
    line = str(caught.value)
    assert "\n" not in line
    return line
