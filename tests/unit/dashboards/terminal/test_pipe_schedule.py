"""When the progress line is printed in a pipe."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest

from grpo_run.dashboards.terminal.terminal import PipeSchedule

Text = Callable[[float], tuple[bool, str, Hashable]]


def printed(seconds: float, line: Text) -> list[tuple[float, str]]:
    """What is printed when the line is offered twice a second from 0.5 s on: (time, text).

    Args:
        line: returns at a time whether ranks are starting, the text, and who is waited for.
    """
    schedule, shown = PipeSchedule(0.0), []
    for tick in range(1, int(2 * seconds) + 1):
        now = tick / 2
        starting, text, wait = line(now)
        if schedule.due(starting, text, wait, now):
            shown.append((now, text))
    return shown


def test_training_is_reported_at_once_and_then_every_15_s() -> None:
    """However fast the line changes."""
    times = [now for now, _ in printed(46, lambda now: (False, f"step {now}", None))]
    assert times == [0.5, 15.5, 30.5, 45.5]


def test_a_line_that_does_not_change_is_printed_once() -> None:
    """The run commits no steps, and nobody is known to be waited for."""
    assert printed(200, lambda now: (False, "step 7", None)) == [(0.5, "step 7")]


def test_a_short_start_is_not_reported() -> None:
    """The first line is the first step."""

    def line(now: float) -> tuple[bool, str, Hashable]:
        return (True, "starting", None) if now < 10 else (False, "step 1", None)

    assert printed(12, line) == [(10.0, "step 1")]


def test_a_long_start_is_reported() -> None:
    """Once, while it says the same."""
    shown = printed(200, lambda now: (True, "starting" if now < 100 else "the script runs", None))
    assert shown == [(15.0, "starting"), (100.0, "the script runs")]


def test_a_wait_is_reported_when_it_begins_and_at_growing_intervals() -> None:
    """A night of waiting must not fill a log."""

    def line(now: float) -> tuple[bool, str, Hashable]:
        if now < 20:
            return False, f"step {now}", None
        return False, f"waiting {now}", (1, "reward")

    times = [now for now, _ in printed(2300, line)]
    assert times == [0.5, 15.5, 20.0, 35.0, 65.0, 125.0, 245.0, 485.0, 965.0, 1565.0, 2165.0]


@pytest.mark.parametrize("pause", [True, False])
def test_another_wait_is_reported_at_once(pause: bool) -> None:
    """Whether or not steps were committed between the two."""

    def line(now: float) -> tuple[bool, str, Hashable]:
        if pause and 100 < now < 102:
            return False, "step 8", None
        return False, f"waiting {now}", (1, "reward") if now <= 101 else (0, "data")

    times = [now for now, text in printed(118, line) if text != "step 8"]
    assert times[:4] == [0.5, 15.5, 45.5, 102.0 if pause else 101.5]
    assert times[4:] == [117.0 if pause else 116.5]
