"""Fixtures of the metrics server."""

from __future__ import annotations

import pytest

from grpo_run.dashboards.metrics import connections


@pytest.fixture(autouse=True)
def _servers_end_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """They look more often whether they are to end."""
    monkeypatch.setattr(connections, "TICK_SECONDS", 0.01)
