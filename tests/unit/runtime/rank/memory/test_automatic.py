"""Automatic collection stays out of the phases of a step; what the script has set is what it finds
afterwards.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from grpo_run.runtime.rank.memory.garbage_collection import (
    LONGEST_SECONDS,
    RAISED,
    TIMED,
    AutomaticCollection,
)
from grpo_run.watchdog.observation import Phase


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    """Python's defaults, before and after each test."""
    own, enabled = gc.get_threshold(), gc.isenabled()
    gc.set_threshold(700, 10, 10)
    gc.enable()
    yield
    gc.set_threshold(*own)
    (gc.enable if enabled else gc.disable)()


def collections() -> int:
    """How many collections this process has made."""
    return sum(generation["collections"] for generation in gc.get_stats())


def make_garbage(cycles: int) -> None:
    """Create so many objects in cycles."""
    for _ in range(cycles):
        node: list[Any] = []
        node.append(node)


@pytest.mark.parametrize("phase", sorted(TIMED))
def test_a_phase_has_no_automatic_collection(phase: Phase) -> None:
    """Its garbage is collected when it has ended."""
    automatic = AutomaticCollection()
    gc.collect()
    automatic.changed(phase)
    before = collections()
    make_garbage(10_000)
    assert collections() == before
    automatic.changed(Phase.data)
    make_garbage(10)
    assert collections() > before
    assert gc.get_count()[0] < 700


def test_phases_inside_phases_end_with_the_outermost() -> None:
    """A vote inside the backward pass does not begin automatic collection there."""
    automatic = AutomaticCollection()
    for phase in (Phase.score, Phase.generate, Phase.reward, Phase.score):
        automatic.changed(phase)
        assert gc.get_threshold() == (RAISED, 10, 10)
    automatic.changed(None)
    assert gc.get_threshold() == (700, 10, 10)


def test_a_phase_full_of_garbage_is_collected_in_the_end() -> None:
    """Otherwise it could fill the memory."""
    automatic = AutomaticCollection()
    gc.collect()
    automatic.changed(Phase.generate)
    before = collections()
    make_garbage(RAISED + 1000)
    assert collections() > before


def choose_disable() -> None:
    """A script that collects by itself."""
    gc.disable()


def choose_none() -> None:
    """Another way to do so."""
    gc.set_threshold(0, 7, 7)


def choose_high() -> None:
    """A script that collects seldom."""
    gc.set_threshold(RAISED + 5, 7, 7)


def choose_low() -> None:
    """A script that collects often."""
    gc.set_threshold(33, 4, 5)


CHOICES: tuple[Callable[[], None], ...] = (choose_disable, choose_none, choose_high, choose_low)


@pytest.mark.parametrize("choose", CHOICES)
@pytest.mark.parametrize("when", ["before", "inside", "at the end"])
def test_what_the_script_chooses_stays(choose: Callable[[], None], when: str) -> None:
    """Before a phase, and inside one, where it replaces what we have set."""
    choose()
    chosen = gc.isenabled(), gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    gc.enable()
    automatic = AutomaticCollection()
    if when == "before":
        choose()
    automatic.changed(Phase.forward_backward)
    if when == "inside":
        choose()
        assert (gc.isenabled(), gc.get_threshold()[1:]) == (chosen[0], chosen[1][1:])
    automatic.changed(Phase.optimizer)
    if when == "at the end":
        choose()
    automatic.changed(Phase.data)
    assert (gc.isenabled(), gc.get_threshold()) == chosen


def test_a_script_that_disables_collection_for_a_moment_finds_it_enabled() -> None:
    """`was = gc.isenabled(); gc.disable(); …; if was: gc.enable()`, as torch and timeit do."""
    automatic = AutomaticCollection()
    automatic.changed(Phase.forward_backward)
    assert gc.isenabled()
    gc.disable()
    automatic.changed(Phase.data)
    assert not gc.isenabled()
    gc.enable()
    assert gc.get_threshold() == (700, 10, 10)


def test_frozen_objects_stay_frozen() -> None:
    """And no others are."""
    gc.collect()
    gc.freeze()
    count = gc.get_freeze_count()
    automatic = AutomaticCollection()
    automatic.changed(Phase.forward_backward)
    automatic.changed(None)
    assert 0.9 * count < gc.get_freeze_count() <= count  # frozen objects may be freed


def test_a_long_phase_has_automatic_collection_again() -> None:
    """The heartbeat sees to it: garbage of a long rollout may hold tensors."""
    now = 10.0
    automatic = AutomaticCollection(lambda: now)
    automatic.changed(Phase.generate)
    automatic.beat()
    assert gc.get_threshold()[0] == RAISED
    now += LONGEST_SECONDS + 0.1
    thread = threading.Thread(target=automatic.beat)
    thread.start()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)
    automatic.changed(Phase.data)
    automatic.changed(Phase.generate)
    assert gc.get_threshold()[0] == RAISED
    automatic.restore()
