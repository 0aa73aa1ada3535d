"""Time limits of the requests to a rollout server, which TRL's clients send without one, or with a long one.

`Limits.install` wraps `requests.Session.request`, through which all of TRL's clients go and those of a
script, for the addresses that are known as servers. How long an answer may take is learned for each route
in this process. These limits are the last resort: the supervisor sees sooner that a server does nothing.
They are long where an answer's time depends on what is asked: a rollout whose completions do not end takes a
hundred times as long as one whose completions do. Called by `rank.py`. Imports `requests` only if the script
has.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from grpo_run.watchdog.text import duration_text

CONNECT_SECONDS = 10.0
HEALTH = "/health"
HEALTH_SECONDS = 10.0
FIRST_SECONDS = 600.0
"""Of a route that has not answered yet: the server may compile, or load a library."""
LEAST_SECONDS = 60.0
WORK = ("completions", "generate", "chat")
"""How the names of routes end whose answers take as long as their completions: hours for an evaluation."""
LEAST_WORK_SECONDS = 4 * 3600.0
WEIGHTS = ("update_weights", "init_weight_transfer_engine", "load_lora_adapter")
"""Those that wait for all ranks, the slowest too."""
LEAST_WEIGHTS_SECONDS = 600.0
FACTOR = 10.0


@dataclass
class Answers:
    """The answers of one route so far."""

    count: int = 0
    longest_seconds: float = 0.0

    def note(self, seconds: float) -> None:
        """Add one."""
        self.count += 1
        self.longest_seconds = max(self.longest_seconds, seconds)

    def limit_seconds(self, route: str) -> float:
        """Return how long the next answer of the route may take."""
        if route.endswith(HEALTH):
            return HEALTH_SECONDS
        if route.endswith(WORK):
            least = LEAST_WORK_SECONDS
        elif route.endswith(WEIGHTS):
            least = LEAST_WEIGHTS_SECONDS
        else:
            least = LEAST_SECONDS if self.count else FIRST_SECONDS
        return max(least, FACTOR * self.longest_seconds)

    def usual(self) -> str:
        """Return what is usual, for an error."""
        if not self.count:
            return "it has not answered there before"
        return f"the longest of {self.count} answers there took {duration_text(self.longest_seconds)}"


class Limits:
    """The limits in this process.

    Attributes:
        servers: addresses, such as `http://127.0.0.1:8000`. Requests elsewhere are left alone.
    """

    def __init__(self) -> None:
        self.servers: set[str] = set()
        self._routes: defaultdict[str, Answers] = defaultdict(Answers)

    def install(self, module: Any) -> None:
        """Limit the requests of `requests.sessions` from now on."""
        from requests.exceptions import ReadTimeout

        original = module.Session.request

        @functools.wraps(original)
        def request(session: Any, method: str, url: Any, *args: Any, **kwargs: Any) -> Any:
            server = next((one for one in self.servers if f"{url}/".startswith(f"{one}/")), None)
            if server is None:
                return original(session, method, url, *args, **kwargs)
            route = f"{method.upper()} {urlsplit(url).path.rstrip('/')}"
            answers = self._routes[route]
            limit = answers.limit_seconds(route)
            connect, read = shorter(kwargs.get("timeout"), limit)
            _let_time_limits_end(session.get_adapter(url))
            began = time.monotonic()
            try:
                answer = original(session, method, url, *args, **{**kwargs, "timeout": (connect, read)})
            except ReadTimeout as error:
                raise ReadTimeout(
                    f"the rollout server {server} has not answered {route} for {duration_text(read)};"
                    f" {answers.usual()}",
                    request=error.request,
                ) from error
            answers.note(time.monotonic() - began)
            return answer

        module.Session.request = request


def shorter(given: Any, limit_seconds: float) -> tuple[float, float]:
    """Return the time limits of connecting and reading: those that are given, unless they are longer.

    Args:
        given: as `requests` takes it: None, seconds, or two of these.
    """
    connect, read = given if isinstance(given, tuple) else (given, given)
    return (
        CONNECT_SECONDS if connect is None else min(connect, CONNECT_SECONDS),
        limit_seconds if read is None else min(read, limit_seconds),
    )


def _let_time_limits_end(adapter: Any) -> None:
    """Let an expired limit end a request that TRL would repeat five times. Broken connections are repeated
    as ever: servers close those that were idle.
    """
    retries: Any = getattr(adapter, "max_retries", None)
    if not getattr(retries, "read", None) or hasattr(retries, "ends_at_time_limits"):
        return
    made, kind = copy.copy(retries), retries.__class__
    made.__class__ = _ending(kind)
    adapter.max_retries = made


@functools.cache
def _ending(kind: type) -> type:
    """Return a class of retries that are none after a read that took too long."""
    from urllib3.exceptions import ReadTimeoutError

    class Ending(kind):  # type: ignore[misc]
        ends_at_time_limits = True

        def increment(self, *args: Any, error: Exception | None = None, **kwargs: Any) -> Any:
            if isinstance(error, ReadTimeoutError):
                raise error
            return super().increment(*args, error=error, **kwargs)

    return Ending


def unlimited(session: Any) -> Callable[..., Any]:
    """Return the session's `request` without the limits of this module: for requests of our own, which say
    nothing about those of the trainer.
    """
    return functools.partial(getattr(type(session).request, "__wrapped__", type(session).request), session)
