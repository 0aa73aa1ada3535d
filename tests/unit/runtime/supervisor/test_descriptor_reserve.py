"""The reserve of descriptors."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from grpo_run.runtime.supervisor.last_resort import RESERVED, RESERVED_PER_RANK, DescriptorReserve


def count() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def reserve() -> Iterator[DescriptorReserve]:
    """The reserve for two ranks, released after the test."""
    made = DescriptorReserve(2)
    yield made
    made.release()


def test_the_reserve_is_available_when_it_is_released(reserve: DescriptorReserve) -> None:
    """And is taken back once."""
    full = count()
    reserve.release()
    reserve.release()
    assert full - count() == RESERVED + 2 * RESERVED_PER_RANK
    reserve.fill()
    reserve.fill()
    assert count() == full


def test_a_reserve_that_cannot_be_filled_is_smaller(
    reserve: DescriptorReserve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has none left; nothing is raised."""
    reserve.release()

    def refuse(*arguments: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "open", refuse)
    reserve.fill()
