"""Requests to drain a slot, and what is expected of their replies."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from grpo_run.runtime.snapshots._drain_messages import DrainFailed, DrainPublished, DrainRequest
from grpo_run.runtime.snapshots._drain_worker import handle_request
from grpo_run.runtime.snapshots.area import StagingArea

Usage = namedtuple("Usage", "total used free")


def drain_slot(staging: StagingArea, index: int = 0, **options: Any) -> DrainPublished | DrainFailed:
    """Send one request for a slot and return the reply."""
    return handle_request(staging, DrainRequest(slot=index, **options), lambda written_bytes: None)


def expect_published(reply: DrainPublished | DrainFailed) -> DrainPublished:
    """Require that the request succeeded."""
    assert isinstance(reply, DrainPublished), reply
    return reply


def expect_failed(reply: DrainPublished | DrainFailed) -> DrainFailed:
    """Require that the request failed."""
    assert isinstance(reply, DrainFailed), reply
    return reply


def is_empty(out: Path) -> bool:
    """Return True if the directory has neither checkpoints nor partial directories."""
    return not out.exists() or list(out.iterdir()) == []


def set_free_space(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    """Set the free space of the disk."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1 << 40, 0, free))
