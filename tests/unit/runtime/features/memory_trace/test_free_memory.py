"""How much memory a rank may still take, for what a trace says of its growth."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.features.memory_trace import rank
from grpo_run.runtime.snapshots.headroom import Headroom


def test_a_rank_may_take_its_share_of_the_memory_that_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the host's nearest limit; that of a device is not known before the script uses one."""
    limits = [Headroom(name=name, free_bytes=free, total_bytes=100) for name, free in (("a", 90), ("b", 60))]
    monkeypatch.setattr(rank, "memory_headroom", lambda: limits)
    unused = SimpleNamespace(usable_bytes=lambda: 0, sizes=lambda: (0,))
    session: Any = SimpleNamespace(local_world_size=2, device_memory=unused)
    assert rank._free_bytes(session, "cpu") == 30
    assert rank._free_bytes(session, "cuda") == 0
