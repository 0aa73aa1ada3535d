"""A process that is stopped and an interpreter that does not run are named as such; one that waits for a CPU
is not.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from support.builders.runtime.detector_world import PHASES, World, hang_in

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Phase
from grpo_run.watchdog.stalls.deadlines import DeadlineSettings

# deadlines


def test_a_stopped_process_is_named_as_such(world: World) -> None:
    """A slot that says that it waits does not matter."""
    hang_in(world, Phase.reward)
    world.process_state[1] = "T"
    world.frozen = {1}
    stall = world.stalls(25.0)
    assert (stall.cause, stall.culprits) == (Cause.interpreter_stuck, (1,))
    assert "SIGSTOP" in stall.sentence


def test_an_interpreter_that_does_not_run_is_named_as_such(world: World) -> None:
    """Its heartbeat is old."""
    hang_in(world, Phase.reward)
    world.frozen = {1}
    assert world.stalls(25.0).cause is Cause.interpreter_stuck


def test_a_rank_in_uninterruptible_sleep_is_marked(world: World) -> None:
    """A restart would find its device still in use."""
    hang_in(world, Phase.reward)
    world.process_state[1] = "D"
    assert world.stalls(25.0).uninterruptible


# quiet and frozen ranks


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("how", ["stopped", "holds the interpreter"])
def test_a_frozen_interpreter_is_found_within_half_a_minute_in_any_phase(
    make: Callable[..., World], phase: Phase, how: str
) -> None:
    """A stopped process, and one whose thread runs without releasing the interpreter."""
    world = make(settings=DeadlineSettings())
    hang_in(world, phase)
    world.frozen = {1}
    if how == "stopped":
        world.process_state[1] = "T"

    def compute() -> None:
        world.cpu[1] += 0.5 if how != "stopped" else 0.0

    assert world.advance(18.0, every=0.5, doing=compute) is None
    stall = world.stalls(10.0, every=0.5, doing=compute)
    assert (stall.culprits, stall.cause) == ((1,), Cause.interpreter_stuck)


@pytest.mark.parametrize("share", [0.0, 0.05])
def test_a_starved_machine_freezes_nobody(make: Callable[..., World], share: float) -> None:
    """A main thread that waits for a CPU gets little of it, and its heartbeat none."""
    world = make(settings=DeadlineSettings())
    hang_in(world, Phase.reward)
    world.frozen = {1}
    world.process_state[1] = "R"

    def starve() -> None:
        world.cpu[1] += 0.5 * share

    assert world.advance(300.0, every=0.5, doing=starve) is None
