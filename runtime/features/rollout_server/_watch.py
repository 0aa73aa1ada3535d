"""A thread that asks a rollout server how it is: its health check, whether it is paused, and one token.

A server whose engine stands still says on `/health` that it is well, so a token is asked for, but only while
a rank waits for the server, nobody sends weights, the server is not paused, and its counters of tokens do not
rise: the question never disturbs one that works. Routes are those of vLLM 0.31; one that a server does not
have (404) tells nothing. Started by `supervisor.py`. Judges nothing (`_judge.py`).
"""

from __future__ import annotations

import http.client
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from http import HTTPStatus
from typing import Any
from urllib.parse import urlsplit

from grpo_run.runtime.features.rollout_server._judge import Reading

LOOK_SECONDS = 0.5
"""Between two looks."""
ANSWER_SECONDS = 5.0
"""For everything but tokens. A busy server may be late; only a refused connection is a fault."""
QUIET_SECONDS = 5.0
"""A token is asked for after a rank has waited this long without a sign of work."""
AGAIN_SECONDS = 10.0
"""Least time between two questions for a token."""
COUNT_SECONDS = 2.0
"""Time between two looks at its counters of tokens, before and while it is asked for one."""
TOKEN_SECONDS = 3600.0
"""A question for a token is given up after this time; the judge decides long before."""
MAX_BYTES = 8 * 1024 * 1024
COUNTERS = re.compile(
    rb"^vllm:(?:generation_tokens|prompt_tokens)_total(?:\{[^}]*\})? ([0-9.eE+]+)", re.MULTILINE
)


class ServerError(Exception):
    """A request was not answered as expected."""


def request(
    base_url: str, method: str, route: str, body: Mapping[str, Any] | None = None, *, seconds: float
) -> tuple[int, bytes]:
    """Send a request past any proxy, and return status and body.

    Raises:
        ConnectionRefusedError: nothing listens there.
        OSError: it was not answered in time, or the connection broke.
        ServerError: what was answered is no HTTP.
    """
    parts = urlsplit(base_url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "127.0.0.1", parts.port, timeout=seconds)
    try:
        data = None if body is None else json.dumps(body).encode()
        connection.request(method, parts.path.rstrip("/") + route, data, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(MAX_BYTES)
    except http.client.HTTPException as error:
        raise ServerError(f"{type(error).__name__} at {route}") from error
    finally:
        connection.close()


def model_of(base_url: str, *, seconds: float) -> str:
    """Return the name of a server's model.

    Raises:
        OSError, ServerError: it has not answered, or has none.
    """
    status, body = request(base_url, "GET", "/v1/models", seconds=seconds)
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise ServerError(f"/v1/models answers {status} without a model") from error


def one_token(base_url: str, *, seconds: float) -> None:
    """Ask for a completion of one token, and return when it has come.

    Raises:
        OSError, ServerError: it has not.
    """
    model = model_of(base_url, seconds=ANSWER_SECONDS)
    question = {"model": model, "prompt": [1], "max_tokens": 1, "temperature": 0.0}
    status, body = request(base_url, "POST", "/v1/completions", question, seconds=seconds)
    if status != 200:
        raise ServerError(f"/v1/completions answers {status}: {body[:200].decode(errors='replace')}")


class ServerWatch:
    """Watches one server until it is closed.

    Args:
        base_url: where it answers.
    """

    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self.reading = Reading()
        """The last one; replaced as a whole."""
        self.waiting_since: float | None = None
        """A rank waits for tokens since then; set by the supervisor."""
        self.syncing = False
        """A rank sends weights; set by the supervisor."""
        self._lock = threading.Lock()
        self._tokens: float | None = None
        self._counted_at = self._asked_at = 0.0
        self._asking: threading.Thread | None = None
        self._asking_pause: threading.Thread | None = None
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="rollout server watch", daemon=True).start()

    def close(self) -> None:
        """Stop watching. Does not wait for a request that is not answered."""
        self._closed.set()

    def note_answer(self, seconds: float) -> None:
        """Take note that a token came after so many seconds."""
        self._note(longest_answer_seconds=max(self.reading.longest_answer_seconds, seconds))

    def begin_anew(self, now: float) -> None:
        """Let all times begin now: this process did not run, and has not read what was answered meanwhile."""
        asked_at = None if self.reading.asked_at is None else now
        self._note(asked_at=asked_at, refused_since=None, unhealthy_since=None, paused_since=None)

    def look(self) -> None:
        """Look once. What the engine has to answer is asked by another thread: it may never come."""
        now = time.monotonic()
        refused = unhealthy = False
        answered = self.reading.answered_at
        try:
            status, _ = request(self.base_url, "GET", "/health", seconds=ANSWER_SECONDS)
            # another status is of something between, or of a server without this route
            unhealthy = status >= HTTPStatus.INTERNAL_SERVER_ERROR and answered is not None
            answered = time.monotonic() if status == HTTPStatus.OK else answered
        except ConnectionRefusedError:
            refused = True
        except (OSError, ServerError):
            return  # late, or in the middle of its end: the next look tells more
        self._note(
            answered_at=answered,
            refused_since=self._since(self.reading.refused_since, refused, now),
            unhealthy_since=self._since(self.reading.unhealthy_since, unhealthy, now),
        )
        if self.syncing or refused or unhealthy:
            self._note(paused_since=None)  # it is paused for the weights
        if not refused and not unhealthy and not _is_busy(self._asking_pause):
            self._asking_pause = self._ask_in_background(self._ask_whether_paused)

    def _run(self) -> None:
        while not self._closed.wait(LOOK_SECONDS):
            self.look()
            now = time.monotonic()
            if not self._is_suspect(now):
                continue
            if now - self._counted_at >= COUNT_SECONDS:
                self._counted_at = now
                self._count_tokens()
            again = now - self._asked_at >= AGAIN_SECONDS and not _is_busy(self._asking)
            if again and self._is_suspect(now):
                self._asked_at = now
                self._asking = self._ask_in_background(self._ask_for_token)

    def _is_suspect(self, now: float) -> bool:
        """Whether a rank waits, the server could answer, and there is no sign of work."""
        waiting, reading = self.waiting_since, self.reading
        return (
            waiting is not None
            and now - max(waiting, reading.worked_at or 0.0) >= QUIET_SECONDS
            and not self.syncing
            and reading.paused_since is None
            and reading.refused_since is None
        )

    @staticmethod
    def _ask_in_background(question: Callable[[], None]) -> threading.Thread:
        thread = threading.Thread(target=question, name="rollout server question", daemon=True)
        thread.start()
        return thread

    def _ask_whether_paused(self) -> None:
        began, syncing = time.monotonic(), self.syncing
        try:
            paused = is_paused(self.base_url, seconds=TOKEN_SECONDS)
        except (OSError, ServerError):
            paused = False  # what it means, the health check tells
        counts = paused and not syncing and not self.syncing
        self._note(paused_since=self._since(self.reading.paused_since, counts, began))

    def _ask_for_token(self) -> None:
        began = time.monotonic()
        self._note(asked_at=began)
        try:
            one_token(self.base_url, seconds=TOKEN_SECONDS)
        except (OSError, ServerError):
            pass  # what it means, the health check tells
        else:
            self.note_answer(time.monotonic() - (self.reading.asked_at or began))
        self._note(asked_at=None)

    def _count_tokens(self) -> None:
        """Read the server's own counters of tokens."""
        try:
            status, body = request(self.base_url, "GET", "/metrics", seconds=ANSWER_SECONDS)
        except (OSError, ServerError):
            return
        counters = COUNTERS.findall(body) if status == HTTPStatus.OK else []
        tokens = sum(map(float, counters)) if counters else None
        if tokens is not None and self._tokens is not None and tokens > self._tokens:
            self._note(worked_at=time.monotonic())
        self._tokens = tokens
        self._note(counts_tokens=tokens is not None)

    def _note(self, **changes: Any) -> None:
        with self._lock:  # two threads note what they have seen
            self.reading = replace(self.reading, **changes)

    @staticmethod
    def _since(before: float | None, now_so: bool, now: float) -> float | None:
        return (before if before is not None else now) if now_so else None


def _is_busy(thread: threading.Thread | None) -> bool:
    return thread is not None and thread.is_alive()


def is_paused(base_url: str, *, seconds: float = ANSWER_SECONDS) -> bool:
    """Whether a server says that it is paused. One that cannot tell is not.

    Raises:
        OSError, ServerError: it has not answered.
    """
    status, body = request(base_url, "GET", "/is_paused", seconds=seconds)
    try:
        return status == 200 and json.loads(body).get("is_paused") is True
    except (ValueError, AttributeError):
        return False
