"""What can be seen of a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from grpo_run.watchdog.observation import Phase, Slot


def test_the_phase_is_the_innermost_open_one(make_slot: Callable[..., Slot]) -> None:
    """Phases nest; what a rank does is what it began last."""
    assert make_slot(0).phase is Phase.generate


def test_before_the_first_phase_there_is_none(make_slot: Callable[..., Slot]) -> None:
    """Not `idle`: nothing is known yet."""
    assert make_slot(0, phases=()).phase is None


def test_phases_are_those_of_the_design() -> None:
    """The names are metric labels and part of the contract."""
    names = "startup data generate reward score forward_backward optimizer vote checkpoint eval hygiene idle"
    assert [phase.name for phase in Phase] == names.split()


def test_no_phase_is_zero() -> None:
    """Zero is what an unwritten slot holds; a phase with that number could not be told from it."""
    assert 0 not in {int(phase) for phase in Phase}


def test_a_reading_cannot_be_changed(make_slot: Callable[..., Slot]) -> None:
    """Detectors share readings."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        make_slot(0).step = 8  # type: ignore[misc]
