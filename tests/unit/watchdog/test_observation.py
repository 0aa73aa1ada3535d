"""Slots, phases and exits as observed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from grpo_run.watchdog.observation import Phase, Slot


def test_the_phase_is_the_innermost_open_one(make_slot: Callable[..., Slot]) -> None:
    """Phases nest."""
    assert make_slot(0).phase is Phase.generate


def test_before_the_first_phase_there_is_none(make_slot: Callable[..., Slot]) -> None:
    """It is not `idle`: nothing is known yet."""
    assert make_slot(0, phases=()).phase is None


def test_the_names_of_phases_are_fixed() -> None:
    """They are metric labels."""
    names = "startup data generate reward score forward_backward optimizer vote checkpoint eval hygiene idle"
    assert [phase.name for phase in Phase] == names.split()


def test_no_phase_is_zero() -> None:
    """An unwritten slot contains zeros."""
    assert 0 not in {int(phase) for phase in Phase}


def test_a_reading_cannot_be_changed(make_slot: Callable[..., Slot]) -> None:
    """Detectors share readings."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_slot(0).step = 8  # type: ignore[misc]
