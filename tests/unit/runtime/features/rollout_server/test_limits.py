"""Time limits of requests to a server: what they are, and that they end a request once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
from requests.adapters import HTTPAdapter
from urllib3.exceptions import ProtocolError, ReadTimeoutError
from urllib3.util.retry import Retry

from grpo_run.runtime.features.rollout_server._limits import Answers, Limits, shorter, unlimited


@pytest.mark.parametrize(
    ("route", "answers", "seconds"),
    [
        ("GET /server_info", [], 600),
        ("GET /server_info", [0.1], 60),
        ("POST /pause", [3.0, 40.0, 1.0], 400),
        ("POST /v1/completions", [], 14400),
        ("POST /v1/chat/completions", [0.5], 14400),
        ("POST /update_weights", [0.5], 600),
        ("POST /inference/v1/generate", [2000.0], 20000),
        ("GET /health", [100.0], 10),
    ],
)
def test_a_limit_is_learned_from_the_answers_of_its_route(
    route: str, answers: list[float], seconds: float
) -> None:
    """A route that works is patient: the next rollout may be a hundred times as long."""
    learned = Answers()
    for one in answers:
        learned.note(one)
    assert learned.limit_seconds(route) == seconds


@pytest.mark.parametrize(
    ("given", "limits"),
    [(None, (10, 60)), (1800, (10, 60)), (5, (5, 5)), ((2, None), (2, 60)), ((None, 90), (10, 60))],
)
def test_a_shorter_limit_of_the_request_counts(given: Any, limits: tuple[float, float]) -> None:
    """TRL sets 1800 s in places."""
    assert shorter(given, 60) == limits


class Adapter(HTTPAdapter):
    """Answers without a network, or does not."""

    def __init__(self, retries: Retry) -> None:
        super().__init__(max_retries=retries)
        self.timeouts: list[Any] = []
        self.silent = False

    def send(self, request: Any, *args: Any, timeout: Any = None, **kwargs: Any) -> Any:
        """Answer at once, or as after the time limit."""
        self.timeouts.append(timeout)
        if self.silent:
            raise requests.ReadTimeout("Read timed out.", request=request)
        answer = requests.Response()
        answer.status_code, answer.url, answer.request = 200, request.url, request
        answer._content = b"{}"
        return answer


@pytest.fixture
def adapter(plain_requests: Callable[[], Any]) -> Adapter:
    """What limited requests of `requests` go to, with TRL's retries."""
    limits = Limits()
    limits.servers.add("http://server:8000")
    limits.install(plain_requests())
    return Adapter(Retry(total=5, connect=5, read=5, status=3, allowed_methods=["POST", "GET"]))


@pytest.fixture
def session(adapter: Adapter) -> requests.Session:
    """A session with the adapter."""
    made = requests.Session()
    made.mount("http://", adapter)
    return made


def test_requests_to_a_server_are_limited_and_others_are_not(
    session: requests.Session, adapter: Adapter
) -> None:
    """Also those of TRL that have a limit of their own."""
    session.post("http://server:8000/v1/completions", json={})
    session.get("http://server:8000/health", timeout=5)
    session.get("http://elsewhere/health")
    assert adapter.timeouts == [(10, 14400), (5, 5), None]


def test_our_own_requests_do_not_count(session: requests.Session, adapter: Adapter) -> None:
    """A fingerprint takes milliseconds, and a rollout that uses the same route minutes."""
    unlimited(session)("POST", "http://server:8000/v1/completions", json={}, timeout=60)
    session.post("http://server:8000/v1/completions", json={})
    assert adapter.timeouts == [60, (10, 14400)]


def test_the_error_says_what_was_asked_and_what_is_usual(session: requests.Session, adapter: Adapter) -> None:
    """Its class stays, so that whoever handles it does so still."""
    session.post("http://server:8000/pause")
    adapter.silent = True
    with pytest.raises(requests.ReadTimeout) as raised:
        session.post("http://server:8000/pause")
    assert str(raised.value).startswith(
        "the rollout server http://server:8000 has not answered POST /pause for 60 s"
    )
    assert "the longest of 1 answers there took" in str(raised.value)
    with pytest.raises(requests.ReadTimeout, match="it has not answered there before"):
        session.post("http://server:8000/resume")


def test_an_expired_limit_is_not_repeated_and_a_broken_connection_is(
    session: requests.Session, adapter: Adapter
) -> None:
    """TRL would send a request five times more. A server closes connections that were idle."""
    session.post("http://server:8000/pause")
    expired = ReadTimeoutError(None, "/pause", "Read timed out.")  # type: ignore[arg-type]
    retries = adapter.max_retries
    with pytest.raises(ReadTimeoutError):
        retries.increment("POST", "/pause", error=expired)
    again = retries.increment("POST", "/pause", error=ProtocolError("Connection aborted."))
    assert again.read == 4
    with pytest.raises(ReadTimeoutError):
        again.increment("POST", "/pause", error=expired)
