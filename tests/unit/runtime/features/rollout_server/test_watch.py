"""What a watch notes of a server: a route that is not answered holds up none of the others."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from grpo_run.runtime.features.rollout_server import _watch
from grpo_run.runtime.features.rollout_server._watch import ServerWatch


class Server:
    """A server whose engine is told when to answer."""

    def __init__(self) -> None:
        self.goes_on, self.paused, self.healthy = threading.Event(), False, 200
        self.goes_on.set()

    def request(self, url: str, method: str, route: str, body: Any = None, *, seconds: float) -> Any:
        if route == "/is_paused":
            self.goes_on.wait(10)
            return 200, b'{"is_paused": true}' if self.paused else b'{"is_paused": false}'
        return self.healthy, b""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """One that answers."""
    made = Server()
    monkeypatch.setattr(_watch, "request", made.request)
    monkeypatch.setattr(ServerWatch, "_run", lambda watch: None)  # the test looks
    yield made
    made.goes_on.set()


@pytest.fixture
def watch(server: Server) -> ServerWatch:
    """A watch of it."""
    return ServerWatch("http://server")


def look(watch: ServerWatch) -> None:
    """Look, and let the engine answer."""
    watch.look()
    assert watch._asking_pause is not None
    watch._asking_pause.join(10)
    assert not watch._asking_pause.is_alive()


def test_an_engine_that_stands_still_does_not_blind_the_watch(server: Server, watch: ServerWatch) -> None:
    """Its health is noted at each look, and it is asked no further question meanwhile."""
    look(watch)
    server.goes_on.clear()
    watch.look()
    asking = watch._asking_pause
    watch.look()
    assert watch._asking_pause is asking
    server.healthy = 503
    watch.look()
    assert watch.reading.unhealthy_since is not None


def test_a_pause_for_weights_is_none(server: Server, watch: ServerWatch) -> None:
    """Neither while they are sent nor right after, when the last answer is from before."""
    server.paused, watch.syncing = True, True
    look(watch)
    watch.syncing = False
    assert watch.reading.paused_since is None
    look(watch)
    since = watch.reading.paused_since
    look(watch)
    assert since is not None
    assert watch.reading.paused_since == since
    watch.syncing = True
    server.goes_on.clear()
    watch.look()
    assert watch.reading.paused_since is None
