"""A failure before the first step of a run is one of its start, and has advice."""

from __future__ import annotations

import signal

import pytest
from support.builders.watchdog.failed_ranks import diagnose, make_error, make_exit, peer_error
from support.builders.watchdog.slots import make_slot

from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.observation import Exit, OpenPhase, Phase, RankState, Slot


def test_failing_before_the_first_step_is_a_startup_failure() -> None:
    """It is the script's own, by class and line."""
    slot = make_slot(0, train_call=0, step=0, phases=(), state=RankState.starting)
    verdict = diagnose(make_exit(0, error=make_error()), slots={0: slot}, best_position=(0, 0))
    assert verdict.cause is Cause.startup_failure
    assert verdict.sentence == "Rank 0 raised ZeroDivisionError before the first step: division by zero"
    assert verdict.repeat_key == "startup_failure: ZeroDivisionError at train.py:12 in reward"


def test_an_unwritten_slot_is_a_startup_failure() -> None:
    """The rank failed before it wrote its slot."""
    verdict = diagnose(make_exit(0, error=make_error()), slots={0: None}, best_position=(0, 0))
    assert (verdict.cause, verdict.phase) == (Cause.startup_failure, None)


@pytest.mark.parametrize(
    "changes", [{"train_call": 2, "step": 0}, {"train_call": 1, "step": 5, "resumed_step": 5}]
)
def test_failing_in_a_later_call_or_after_resuming_is_not_startup(changes: dict[str, int]) -> None:
    """Work had been done; a restart resumes from it."""
    verdict = diagnose(
        make_exit(0, error=make_error()), slots={0: make_slot(0, **changes)}, best_position=(1, 5)
    )
    assert verdict.cause is Cause.exception


@pytest.mark.parametrize(
    ("position", "cause"),
    [
        ({"train_call": 0, "step": 0, "resumed_step": 0}, Cause.startup_failure),
        ({"train_call": 1, "step": 0, "resumed_step": 0}, Cause.startup_failure),
        ({"train_call": 1, "step": 0, "resumed_step": 3}, Cause.exception),
        ({"train_call": 1, "step": 4, "resumed_step": 3}, Cause.exception),
        ({"train_call": 2, "step": 0, "resumed_step": 0}, Cause.exception),
    ],
)
def test_an_exception_before_the_first_step_is_a_startup_failure(
    position: dict[str, int], cause: Cause
) -> None:
    """Neither a resumed call nor a second one is a start-up."""
    assert diagnose(make_exit(0, error=make_error()), slots={0: make_slot(0, **position)}).cause is cause


def test_advice_is_given_for_failures_before_any_step_only() -> None:
    """And only for exceptions that may pass: of files, the network or a device."""

    def advice(best_position: tuple[int, int], **exit: object) -> tuple[str, ...]:
        return diagnose(make_exit(0, **exit), best_position=best_position).advice

    never = (int("0"), int("0"))  # another object than any constant of the module
    away = make_error(bases=("builtins.OSError",))
    assert advice(never, error=away)
    assert not advice((1, 7), error=away)
    assert not advice(never, error=make_error())
    assert not advice((0, 0), error=None, exit_code=5)
    assert advice((1, 7), signal=int("9"))


@pytest.mark.parametrize(
    ("phases", "starting"),
    [
        ((), True),
        ((Phase.startup,), True),
        ((Phase.idle,), True),
        ((Phase.idle, Phase.startup), True),
        ((Phase.generate,), False),
        ((Phase.startup, Phase.generate), False),
    ],
)
def test_a_failure_outside_the_steps_of_a_call_is_one_of_the_start(
    phases: tuple[Phase, ...], starting: bool
) -> None:
    """By the phases of the exception, or else by those on the board; a kill and a lost peer are none."""
    slot = make_slot(0, phases=tuple(OpenPhase(phase=phase, since_seconds=9.0) for phase in phases))

    def verdict_starts(exit: Exit, slot: Slot | None = slot) -> bool:
        return diagnose(exit, slots={0: slot}).starting

    assert verdict_starts(make_exit(0)) is starting
    assert verdict_starts(make_exit(0, error=make_error())) is starting
    assert verdict_starts(make_exit(0, error=make_error(phases=phases)), make_slot(0)) is starting
    assert verdict_starts(make_exit(0), None)
    assert not verdict_starts(make_exit(0, signal=signal.SIGKILL))
    assert not verdict_starts(make_exit(0, error=peer_error()))
