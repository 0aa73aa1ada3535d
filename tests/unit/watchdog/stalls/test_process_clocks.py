"""Clocks of a rank's processes: any sign of work restarts them, and a starved machine stops none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from grpo_run.watchdog.stalls.process_clocks import FrozenClock, QuietClock, ThreadReading, TreeReading

IDLE = TreeReading(
    members=frozenset({1, 2}), cpu_seconds=10.0, io_bytes=1000, connected=False, traffic_bytes=0
)


def quiet(*readings: TreeReading | None, every: float = 2.0) -> QuietClock:
    """The clock after these readings, the first of them at 100 s."""
    clock = QuietClock()
    for number, reading in enumerate(readings):
        clock = clock.after(reading, 100.0 + every * number)
    return clock


def test_an_idle_process_tree_is_quiet_since_the_first_reading() -> None:
    """Its heartbeat and its idle threads may use a hundredth of a core."""
    readings = [replace(IDLE, cpu_seconds=10.0 + 0.015 * number) for number in range(40)]
    assert quiet(*readings).since_seconds == 100.0


@pytest.mark.parametrize(
    "change",
    [
        {"cpu_seconds": 10.2}, {"io_bytes": 80_000}, {"traffic_bytes": 80_000},
        {"members": frozenset({1, 2, 3})}, {"members": frozenset({1})},
    ],
)  # fmt: skip
def test_any_work_restarts_the_clock(change: dict[str, object]) -> None:
    """CPU time, I/O, traffic, and a process that starts or ends."""
    assert quiet(IDLE, IDLE, replace(IDLE, **change)).since_seconds == 104.0  # type: ignore[arg-type]


def test_slow_work_restarts_the_clock_again_and_again() -> None:
    """Two hundredths of a core for a minute are no silence of a minute."""
    readings = [replace(IDLE, cpu_seconds=10.0 + 0.04 * number) for number in range(30)]
    since = quiet(*readings).since_seconds
    assert since is not None
    assert since > 150.0


def test_a_thread_that_often_waits_for_a_cpu_works() -> None:
    """Under load a rank may get less than a hundredth of a core; one thread that was seen once proves
    nothing.
    """
    starved = replace(IDLE, runnable=frozenset({7}))
    since = quiet(*[starved] * 30).since_seconds
    assert since is not None
    assert since > 150.0
    assert quiet(*[IDLE] * 10, starved, *[IDLE] * 10).since_seconds == 100.0


def test_a_failed_reading_makes_everything_unknown() -> None:
    """What was seen before it does not count either."""
    assert quiet(IDLE, IDLE, None).since_seconds is None
    assert quiet(IDLE, None, IDLE).since_seconds == 104.0


def test_a_connection_to_outside_is_remembered_for_the_silence() -> None:
    """A request may have been open for a moment only."""
    unknown = replace(IDLE, connected=None, traffic_bytes=None)
    assert quiet(unknown, unknown).connected is None
    assert quiet(unknown, IDLE).connected is False
    assert quiet(IDLE, replace(IDLE, connected=True), IDLE).connected is True


def frozen(*readings: dict[int, ThreadReading] | None, every: float = 0.5) -> FrozenClock:
    """The clock after these readings of threads."""
    clock = FrozenClock()
    for number, reading in enumerate(readings):
        clock = clock.after(reading, 100.0 + every * number)
    return clock


def test_a_process_is_stopped_if_all_its_threads_are() -> None:
    """And no longer once one of them runs."""
    stopped = {1: ThreadReading("T", 1.0), 2: ThreadReading("T", 1.0)}
    assert frozen(stopped, stopped).frozen(stopped=True)
    running = {**stopped, 2: ThreadReading("S", 1.0)}
    assert not frozen(stopped, running).frozen(stopped=True)
    assert not frozen(stopped, None).frozen(stopped=True)


@pytest.mark.parametrize(
    ("share", "state", "expected"),
    [
        (1.0, "R", True), (0.6, "S", True), (0.2, "R", True),
        (0.2, "S", False), (0.05, "R", False), (0.0, "S", False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("thread", [1, 2])
def test_a_thread_that_runs_keeps_the_interpreter_from_running(
    thread: int, share: float, state: str, expected: bool
) -> None:
    """The main thread or another; on a shared core it gets less CPU time, but is always runnable."""
    idle = ThreadReading("S", 1.0)
    readings = [
        {1: idle, 2: idle, thread: ThreadReading(state, 1.0 + share * 0.5 * number)} for number in range(20)
    ]
    assert frozen(*readings).frozen(stopped=False) is expected


def test_a_moment_of_work_freezes_nothing() -> None:
    """The first readings after the heartbeat became late say little."""
    readings = [{1: ThreadReading("R", 1.0 + 0.5 * number)} for number in range(4)]
    assert not frozen(*readings).frozen(stopped=False)
