"""Fixtures: a stand-in for TRL's client and the server behind it, in this process."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest


class Server:
    """Holds weights as one number, and says what a server says of them.

    Attributes:
        held: the weights that it generates with.
        takes: whether it takes the weights that it is sent.
        says: what it says in place of its version, if anything.
        versions: whether it has the routes of versions.
        noise: added to what it answers, once for each entry.
    """

    def __init__(self) -> None:
        self.held, self.version, self.says = 0.0, "default", ""
        self.takes = self.versions = self.scores = True
        self.noise: list[float] = []
        self.asked: list[str] = []

    def start_again(self) -> None:
        """Begin anew, with the weights of the beginning."""
        self.held, self.version = 0.0, "default"

    def answer(self, route: str, body: Any) -> tuple[int, Any]:
        """Return status and content."""
        self.asked.append(route)
        if route == "/v1/completions" and self.scores:
            value = self.held + (self.noise.pop(0) if self.noise else 0.0)
            return 200, {
                "choices": [{"logprobs": {"top_logprobs": [value]}, "prompt_logprobs": [None, value]}]
            }
        if self.versions and route == "/update_weight_version":
            self.version = body["new_version"]
            return 200, {"success": True}
        if self.versions and route == "/weight_info":
            return 200, {"weight_version": self.says or self.version}
        return 404, None


class Session:
    """The part of `requests.Session` that is used."""

    def __init__(self, server: Server) -> None:
        self.server = server

    def get_adapter(self, url: str) -> Any:
        """Return what keeps connections."""
        return SimpleNamespace(init_poolmanager=lambda hosts, connections: None)

    def request(self, method: str, url: str, *, json: Any, timeout: float) -> Any:
        """Ask the server."""
        status, content = self.server.answer(url.removeprefix("http://server"), json)
        return SimpleNamespace(status_code=status, json=lambda: content)


class Client:
    """TRL's client."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.session = Session(server)
        self.base_url, self.model = "http://server", "model"
        self.joined = 0
        self.seeds: list[Any] = []

    def update_named_params(self, metadata: Any, tensors: Any) -> None:
        """Send weights: the first value of the last tensor."""
        for _, tensor in tensors:
            value = float(tensor[0])
        if self.server.takes:
            self.server.held = value

    def generate(
        self, prompts: list[Any], n: int = 1, generation_kwargs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return what the server generates: its weights."""
        self.seeds.append((generation_kwargs or {}).get("seed"))
        return {"completion_ids": [[self.server.held] for _ in prompts for _ in range(n)], "logprobs": None}

    def close_communicator(self) -> None:
        """Forget the group."""

    def init_communicator(self, device: Any) -> None:
        """Make it anew."""
        self.joined += 1


@pytest.fixture
def server() -> Server:
    """A healthy server."""
    return Server()


@pytest.fixture
def client(server: Server) -> Client:
    """A client of it."""
    return Client(server)


@pytest.fixture
def plain_requests(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    """Return `requests.sessions`, whose method is put back at the end."""
    import requests.sessions as module

    monkeypatch.setattr(module.Session, "request", module.Session.request)
    return lambda: module
