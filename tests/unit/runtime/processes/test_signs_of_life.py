"""What proves that a host is lost, and what does not."""

from __future__ import annotations

import socket
import time

import pytest

from grpo_run.runtime.processes.signs_of_life import (
    LOOK_SECONDS,
    PROBE_SECONDS,
    Answer,
    Signs,
    listen,
    own_address,
    probe,
)

CUT_SECONDS = 8.0


def _declared_after(died_at: float, *, back_at: float = 1e9, beats: bool = False) -> float | None:
    """Return when a host is lost that is looked at twice a second from 0 on, and silent from `died_at` on."""
    signs = Signs(0.0, reached=True)
    for look in range(80):
        asked_at = look * LOOK_SECONDS
        silent = died_at < asked_at < back_at
        beat = asked_at if beats or not silent else None
        if signs.why_lost(Answer.silent if silent else Answer.accepted, beat, asked_at=asked_at):
            return asked_at + PROBE_SECONDS
    return None


@pytest.mark.parametrize("second", [0.01, 0.2, 0.4, 0.49])
def test_a_silent_host_is_lost_within_10_s_and_a_cut_of_8_s_is_none(second: float) -> None:
    """Whatever the time between two looks at which it begins."""
    lost_at = _declared_after(5 + second)
    assert lost_at is not None
    assert CUT_SECONDS < lost_at - (5 + second) <= 10
    assert _declared_after(5 + second, back_at=5 + second + CUT_SECONDS) is None


def test_a_host_whose_keep_alive_arrives_is_not_lost() -> None:
    """Only its port cannot be reached any more."""
    assert _declared_after(5, beats=True) is None


@pytest.mark.parametrize(("reached", "dropped"), [(True, False), (False, True), (False, False)])
def test_a_closed_port_proves_a_loss_unless_it_was_never_reached(reached: bool, dropped: bool) -> None:
    """A firewall may refuse it in the host's place; then torch's own keep-alive decides."""
    signs = Signs(0.0, reached=reached)
    said = signs.why_lost(Answer.refused, 1, asked_at=1.0, dropped=dropped)
    assert said == ("its supervisor has ended" if reached or dropped else "")
    assert signs.why_lost(Answer.accepted, 1, asked_at=2.0) == ""


def test_a_port_answers_as_long_as_its_process_lives() -> None:
    """More often than the kernel keeps connections that nobody has taken."""
    port = listen()
    for _ in range(300):  # an answer may come late where the process gets no time
        assert probe("127.0.0.1", port) is not Answer.refused
    assert Answer.accepted in {probe("127.0.0.1", port) for _ in range(10)}
    assert probe(own_address("127.0.0.1", port), port) is Answer.accepted
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        assert probe("127.0.0.1", closed.getsockname()[1]) is Answer.refused
    began_at = time.monotonic()
    assert probe("no-such-host.invalid", 9) is Answer.silent
    assert time.monotonic() - began_at < 60
