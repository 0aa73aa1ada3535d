"""A console that prints only what a test does."""

from __future__ import annotations

import pytest
from support.builders.screen import Open, Screen, fault

from grpo_run.dashboards.terminal import terminal as module


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Open:
    """A screen; the loop does not run, so that only what a test does is printed."""
    monkeypatch.setattr(module, "REFRESH_SECONDS", 60.0)

    def make(width: int | None = None, shown: frozenset[int] = frozenset(), old: int = 0) -> Screen:
        made = Screen(width=width, shown=shown)
        made.history.recoveries += [fault(seconds=1.0) for _ in range(old)]
        made.terminal.start()
        return made

    return make
