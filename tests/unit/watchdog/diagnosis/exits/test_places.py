"""A fault is placed in the step and the phase in which it happened."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.diagnosis._place import position
from grpo_run.watchdog.observation import OpenPhase, Phase


@pytest.mark.parametrize(
    ("step", "phase", "text"),
    [
        (14, "forward_backward", "in step 15 (phase forward_backward)"),
        (0, "data", "in step 1 (phase data)"),
        (14, "checkpoint", "after step 14 (phase checkpoint)"),
        (14, "idle", "after step 14 (phase idle)"),
        (0, "callback", "before the first step (phase callback)"),
        (14, None, "after step 14"),
        (0, None, "before the first step"),
        (0, "startup", "before the first step"),
    ],
)
def test_a_fault_is_placed_in_the_step_that_an_injection_names(
    step: int, phase: str | None, text: str
) -> None:
    """`--inject kill@rank1:step15` is reported in step 15, although 14 steps are completed."""
    assert position(step, phase) == text


@pytest.mark.parametrize(
    ("phases", "place"),
    [
        ((Phase.optimizer,), "in step 8 (phase optimizer)"),
        ((Phase.optimizer, Phase.callback), "in step 8 (phase callback)"),
        ((Phase.forward_backward, Phase.callback), "in step 8 (phase callback)"),
        ((Phase.optimizer, Phase.callback, Phase.checkpoint), "in step 8 (phase checkpoint)"),
        ((Phase.data, Phase.callback), "after step 7 (phase callback)"),
        ((Phase.data, Phase.checkpoint), "after step 7 (phase checkpoint)"),
    ],
)
def test_a_callback_at_the_end_of_a_step_belongs_to_the_step(phases: tuple[Phase, ...], place: str) -> None:
    """Whether it was killed or raised; the step is the culprit's, although its peers have finished step 8."""
    slots = {
        0: make_slot(0, step=8),
        1: make_slot(1, step=7, phases=tuple(OpenPhase(phase=phase, since_seconds=9.0) for phase in phases)),
    }
    verdict = diagnose(make_exit(1, signal=signal.SIGKILL), slots=slots)
    assert verdict.sentence == f"Rank 1 was killed by SIGKILL {place}."


@pytest.mark.parametrize(
    ("callback", "place"), [("Log.on_step_begin", "in step 8"), ("Log.on_log", "after step 7")]
)
def test_a_callback_at_the_beginning_of_a_step_belongs_to_the_step(callback: str, place: str) -> None:
    """It is called while the rank is still in the phase that loads data."""
    phases = (
        OpenPhase(phase=Phase.data, since_seconds=8.0),
        OpenPhase(phase=Phase.callback, since_seconds=9.0, callback=callback),
    )
    slots = {0: make_slot(0, step=7, phases=phases)}
    verdict = diagnose(make_exit(0, signal=signal.SIGKILL), slots=slots)
    assert verdict.sentence == f"Rank 0 was killed by SIGKILL {place} (callback {callback})."


def test_a_phase_deep_inside_the_computation_of_a_step_belongs_to_the_step() -> None:
    """Whatever phases surround the computation."""
    error = make_error(phases=(Phase.data, Phase.optimizer, Phase.callback))
    assert "in step 8 (phase callback)" in diagnose(make_exit(0, error=error)).sentence
