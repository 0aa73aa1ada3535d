"""The signals that stop a run: what they do while it runs, after its end, and while Python exits.

They are SIGTERM, SIGINT, SIGHUP and those that `--signals-to-handle` names. Called by `_supervise.py`. A
handler notes what has arrived; the supervisor decides what follows from it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import TYPE_CHECKING

from grpo_run.runtime.processes.starting import VARIABLE, parse_signals

if TYPE_CHECKING:
    from grpo_run.runtime.supervisor.supervisor import Supervisor

ALWAYS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def stop_signals() -> frozenset[signal.Signals]:
    """Return the signals that stop the run."""
    return frozenset({*ALWAYS, *parse_signals(os.environ.get(VARIABLE, ""))})


class StoppedWithoutRanks(BaseException):
    """Raised by a signal while the agent waits for other nodes: no rank exists, so nothing has to be
    saved."""


def handle_signals(supervisor: Supervisor) -> list[float]:
    """Turn each of them into a stop request; SIGHUP stays ignored under nohup.

    Returns:
        a list to which the time of each signal is added, in monotonic seconds.
    """
    received: list[float] = []

    def on_signal(number: int, frame: object) -> None:
        received.append(time.monotonic())
        if not supervisor.has_ranks:
            raise StoppedWithoutRanks(signal.Signals(number).name)
        supervisor.stop.note(signal.Signals(number).name)

    for number in stop_signals():
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, on_signal)
    return received


def stop_by_signal() -> None:
    """Ask this process to stop as a signal from outside does: every wait of the main thread ends."""
    main_thread = threading.main_thread().ident
    assert main_thread is not None
    signal.pthread_kill(main_thread, signal.SIGTERM)


def note_signals() -> list[int]:
    """Return a list to which the signals that arrive from now on are added: they end what is left to wait
    for."""
    signals: list[int] = []

    def note(number: int, frame: object) -> None:
        signals.append(number)

    for number in stop_signals():
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, note)
    return signals


def ignore_signals() -> None:
    """Keep the exit code that was decided: Python restores the default handlers while it exits."""
    for number in stop_signals():
        signal.signal(number, signal.SIG_IGN)
