"""Output to a full disk ends no rank."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from grpo_run.runtime.rank.output import RankOutput


def test_printing_to_a_full_disk_does_not_raise() -> None:
    """Python's own streams raise, and a progress bar would end training."""
    descriptor = os.open("/dev/full", os.O_WRONLY | os.O_CLOEXEC)
    try:
        with pytest.raises(OSError, match="No space left"):
            os.write(descriptor, b"lost")
        raw = RankOutput(descriptor, "w", closefd=False)
        stream = io.TextIOWrapper(raw, "utf-8", write_through=True)
        print("lösung", file=stream, flush=True)
        assert raw.write(memoryview(b"ab").cast("H")) == 2
        raw.close()
    finally:
        os.close(descriptor)


def test_other_errors_of_printing_are_raised(tmp_path: Path) -> None:
    """Only a full disk is tolerated."""
    descriptor = os.open(tmp_path / "log", os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        raw = RankOutput(descriptor, "w", closefd=False)
        with pytest.raises(OSError, match="Bad file descriptor"):
            raw.write(b"text")
    finally:
        os.close(descriptor)
