"""A signal while a run without ranks ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from grpo_run.runtime.errors import HostsLostError, ProcessError
from grpo_run.runtime.launching import _stop_signals, _supervise


@pytest.fixture(autouse=True)
def _handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in _stop_signals.ALWAYS}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "ends_by"),
    [
        (HostsLostError("gone."), "end_without_hosts"),
        (ProcessError("no memory"), "give_up"),
        (_stop_signals.StoppedWithoutRanks("SIGTERM"), "stop_without_ranks"),
    ],
)
def test_a_signal_does_not_interrupt_the_end(
    error: BaseException, ends_by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left of the run is written, and the code is that of its end."""
    monkeypatch.setattr(_supervise, "_report_failed_threads", lambda supervisor: None)
    monkeypatch.setattr(_supervise, "end_previous", lambda *_: [])
    supervisor, ended = MagicMock(has_ranks=False), []

    def end(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        ended.append(ends_by)

    setattr(supervisor, ends_by, end)
    agent = SimpleNamespace(run=MagicMock(side_effect=error))
    _supervise._run_agent(agent, supervisor, MagicMock(), MagicMock(), MagicMock(), "token")
    assert ended == [ends_by]
