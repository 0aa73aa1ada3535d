"""Whether another host is alive: each supervisor listens on a port, which the host of the endpoint tries.

Called by `meeting.py`, twice a second for each host. A port that is closed proves that the supervisor has
ended: the host's kernel says so. A silent one may be a cut; it proves a loss only when torch's keep-alive of
that host is as silent. A port that has never been reached, as behind a firewall, proves nothing. Does not
know which hosts there are, or what follows from a loss.
"""

from __future__ import annotations

import socket
import threading
import time
from enum import Enum
from typing import Any

LOOK_SECONDS = 0.5
"""Between two attempts to reach a host."""
PROBE_SECONDS = 0.5
SILENT_SECONDS = 9.0
"""Between the last attempt with an answer and the one that proves the loss. The silence began up to
`LOOK_SECONDS` after the former: it lasts 8.5 s or more, a second more than a cut of 8 s takes to be over, and
is declared before 10 s."""
QUIET_SECONDS = 5.0
"""Without news by torch's keep-alive, which is up to 4 s old where nothing is wrong."""
AGAIN_SECONDS = 0.2


class Answer(Enum):
    """What a host answers to a new connection."""

    accepted = "accepted"
    refused = "refused"
    """It is up, and nobody serves the port."""
    silent = "silent"


def probe(host: str, port: int) -> Answer:
    """Connect to a port of a host for a moment. A refusal is asked for twice."""
    answer = _connect(host, port)
    if answer is Answer.refused:
        time.sleep(AGAIN_SECONDS)
        answer = _connect(host, port)
    return answer


def _connect(host: str, port: int) -> Answer:
    try:
        socket.create_connection((host, port), PROBE_SECONDS).close()
    except ConnectionRefusedError:
        return Answer.refused
    except OSError:  # also a name that cannot be resolved yet
        return Answer.silent
    return Answer.accepted


def listen() -> int:
    """Let others see that this process lives, until it ends; return the port. Nothing is said there."""
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    server = socket.create_server(("", 0), family=family, dualstack_ipv6=dual)

    def serve() -> None:
        while True:
            try:
                server.accept()[0].close()
            except OSError:  # the other side has gone, or no descriptor is left for a moment
                time.sleep(AGAIN_SECONDS)

    threading.Thread(target=serve, name="grpo-run-alive", daemon=True).start()
    return int(server.getsockname()[1])


def own_address(host: str, port: int) -> str:
    """Return the address of this host on the way to another one; sends nothing."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)
    with socket.socket(found[0][0], socket.SOCK_DGRAM) as way:
        way.connect(found[0][4])
        return str(way.getsockname()[0])


class Signs:
    """What is known of one host. Pure.

    Args:
        now: when it was first seen, in monotonic seconds.
        reached: it has answered before.
    """

    def __init__(self, now: float, *, reached: bool = False) -> None:
        self.seen_at = self._answered_at = self._beat_at = now
        self._beat: Any = None
        self._reached = reached

    def why_lost(self, answer: Answer, beat: Any, *, asked_at: float, dropped: bool = False) -> str:
        """Return why the host is lost, as the end of a sentence; empty if it is not.

        Args:
            answer: to an attempt to reach it.
            beat: whatever changes with its keep-alive.
            asked_at: when the attempt began, in monotonic seconds.
            dropped: torch does not count it any more.
        """
        if beat != self._beat:
            self._beat, self._beat_at = beat, asked_at
        if answer is Answer.accepted:
            self._answered_at, self._reached = asked_at, True
            return ""
        if not (self._reached or dropped):
            return ""
        if answer is Answer.refused:
            return "its supervisor has ended"
        silent_seconds = asked_at - self._answered_at
        if silent_seconds < SILENT_SECONDS or (asked_at - self._beat_at < QUIET_SECONDS and not dropped):
            return ""
        return f"it has not answered for {silent_seconds:.0f} s"
