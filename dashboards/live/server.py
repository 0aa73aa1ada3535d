"""The live page: a page, a stream of changes, the output of ranks, and reports.

`grpo-run serve` has it of all runs (`application`), and each run of itself beside its metrics
(`application_of`). Every address begins with a token that only the user knows; any other is answered 404.
Nothing can be changed through the server: it knows GET alone. Texts of scripts are sent as JSON and put into
the page as text, and the policy that the page is sent with allows no script but its own. The page loads
nothing from elsewhere. No TLS: listen on the loopback device, and forward the port with ssh.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import structlog
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from grpo_run.dashboards.live.feed import RunFeed, RunList, key_of
from grpo_run.dashboards.metrics.connections import in_thread
from grpo_run.dashboards.rank_logs import log_lines
from grpo_run.runtime.errors import RunDirectoryError
from grpo_run.runtime.history.run_directory import RunDirectory

log = structlog.get_logger(__name__)

POLL_SECONDS = 0.4
SEND_SECONDS = 1.0
"""Between two changes that are sent, except when a fault begins or ends: with many pages most time goes
into sending."""
LIST_SECONDS = 2.0
LIST_READ_SECONDS = 0.2
QUIET_SECONDS = 15.0
"""A stream without changes says that it is alive."""
MOST_READERS = 256
WAITING_CHANGES = 32
"""A page that does not read so many changes is disconnected; it connects again and gets everything anew."""
MAX_FEEDS = 32
ASKED_SECONDS = 30.0
"""A run whose curves or values a page has asked for is read for so long."""
FIRST_SECONDS = 30.0
"""A first reading may take so long."""
ALIVE = b"event: alive\ndata: null\n\n"
"""Its absence tells a page that the connection is gone."""
STATIC = Path(__file__).with_name("static")
FILES = {
    "": ("index.html", "text/html"),
    "page.js": ("page.js", "text/javascript"),
    "charts.js": ("charts.js", "text/javascript"),
    "page.css": ("page.css", "text/css"),
}
HEADERS = {
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "cross-origin-resource-policy": "same-origin",
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def event(name: str, value: object) -> bytes:
    """Return one server-sent event."""
    return f"event: {name}\ndata: {json.dumps(value, separators=(',', ':'))}\n\n".encode()


class Readers:
    """The pages that are open, and the runs that they show.

    Args:
        runs: all runs.
        default: the key of the run that a page shows if it names none.
        follows: another run becomes the default when it is active and the default is not.
        keeps: the default is read also without a page, so that the first page has its past.
    """

    def __init__(self, runs: RunList, default: str, *, follows: bool, keeps: bool = True) -> None:
        self.runs, self.default, self._follows, self._keeps = runs, default, follows, keeps
        self._watching: asyncio.Task[None] | None = None
        self._feeds: dict[str, RunFeed] = {}
        self._queues: dict[str, set[asyncio.Queue[bytes | None]]] = {}
        self._asked: dict[str, float] = {}
        self._listed: bytes = b""
        self._logs = 0

    async def begin(self) -> bool:
        """Begin to read what is shown; return whether that goes on, without which pages would stand still."""
        if not self.runs.directories:
            await in_thread(self.runs.find)
        if self._watching is None:
            self._watching = asyncio.create_task(self.watch())
            self._watching.add_done_callback(self._report)
        return not self._watching.done()

    async def end(self) -> None:
        """Read nothing more. Raises what reading has raised, unless it was logged."""
        if self._watching is not None and (self._keeps or not self._watching.done()):
            self._watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watching

    def _report(self, watching: asyncio.Task[None]) -> None:
        if watching.cancelled():
            return
        if self._keeps:  # the server has nothing else: end it with the error
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            log.error("live_page_failed", exc_info=watching.exception())
            for key in self._queues:
                self._send(key, None)

    async def watch(self) -> None:
        """Read all runs that are shown, and the list, until cancelled. Raises what reading a run raises."""
        loop, found_at = asyncio.get_running_loop(), -LIST_SECONDS
        followers: dict[str, asyncio.Task[None]] = {}
        try:
            while True:
                if not self._wanted():
                    await asyncio.sleep(POLL_SECONDS)
                    continue
                for key in self._wanted() - followers.keys():
                    followers[key] = asyncio.create_task(self._follow(key))
                for key, task in list(followers.items()):
                    if task.done():
                        task.result()
                        del followers[key]
                if loop.time() - found_at >= LIST_SECONDS:
                    found_at = loop.time()
                    await in_thread(self.runs.find)
                    active = self.runs.active
                    if self._follows and active and self.default not in active:
                        self.default = active[0]
                watched = {
                    key: feed.shown.get("run")
                    for key, feed in self._feeds.items()
                    if not feed.shown or "run" in feed.shown
                }
                await in_thread(self.runs.read, watched, LIST_READ_SECONDS)
                self._send_list()
                await asyncio.sleep(POLL_SECONDS)
        finally:
            for task in followers.values():
                task.cancel()

    def _wanted(self) -> set[str]:
        since = asyncio.get_running_loop().time() - ASKED_SECONDS
        asked = {key for key, at in self._asked.items() if at >= since}
        default = {self.default} if self._keeps else set()
        return {*default, *asked, *(key for key, queues in self._queues.items() if queues)}

    async def feed_of(self, key: str) -> RunFeed | None:
        """Return the feed of a run, once it has been read; None if there is no such run."""
        if not await self.begin():
            return None
        loop = asyncio.get_running_loop()
        ends = loop.time() + FIRST_SECONDS
        self._asked[key] = loop.time()
        while key in self.runs.directories and loop.time() < ends:
            if (feed := self._feed(key)) is not None and feed.shown:
                return feed
            await asyncio.sleep(POLL_SECONDS / 4)
        return None

    async def _follow(self, key: str) -> None:
        """Read one run for all of its pages: a long journal takes seconds, for which no other run waits."""
        loop, sent_at = asyncio.get_running_loop(), -SEND_SECONDS
        while key in self._wanted() and (feed := self._feed(key)) is not None:
            await in_thread(feed.read)
            if feed.urgent or loop.time() - sent_at >= SEND_SECONDS:
                sent_at = loop.time()
                changes = feed.changes()
                self._send(key, b"".join(event(name, value) for name, value in changes.items()))
            await asyncio.sleep(POLL_SECONDS)

    def _feed(self, key: str) -> RunFeed | None:
        feed = self._feeds.get(key)
        directory = self.runs.directories.get(key)
        if feed is None and directory is not None:
            unused = [other for other in self._feeds if other not in self._wanted()]
            for other in unused[: max(0, len(self._feeds) - MAX_FEEDS + 1)]:
                del self._feeds[other]
            feed = self._feeds[key] = RunFeed(directory)
        return feed

    def _send_list(self) -> None:
        listed = event("runs", {"runs": self.runs.shown(), "default": self.default})
        if listed != self._listed:
            self._listed = listed
            for key in self._queues:
                self._send(key, listed)

    def _send(self, key: str, data: bytes | None) -> None:
        """Send to all pages of a run; None disconnects them."""
        if data == b"":
            return
        for queue in self._queues.get(key, ()):
            if queue.full() or data is None:
                while not queue.empty():
                    queue.get_nowait()
                queue.put_nowait(None)
            else:
                queue.put_nowait(data)

    @property
    def count(self) -> int:
        """How many streams pages have open."""
        return sum(map(len, self._queues.values())) + self._logs

    async def log_stream(self, batches: Callable[[], list[Any] | None]) -> AsyncIterator[bytes]:
        """Yield lines of the ranks' output as they come, and at last that there are no more.

        Args:
            batches: returns what is new; None once nothing more can come.
        """
        self._logs += 1
        try:
            while (batch := await in_thread(batches)) is not None:
                yield event("lines", batch) if batch else ALIVE
                await asyncio.sleep(SEND_SECONDS)
            yield event("end", None)
        finally:
            self._logs -= 1

    async def stream(self, key: str) -> AsyncIterator[bytes]:
        """Yield what is shown of a run, and then every change."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(WAITING_CHANGES)
        self._queues.setdefault(key, set()).add(queue)
        try:
            yield b"retry: 1000\n\n" + self._listed
            while (feed := self._feed(key)) is None or not feed.shown:
                if self._watching is not None and self._watching.done():
                    return
                await asyncio.sleep(POLL_SECONDS / 4)  # the first reading of a long journal
            # a change that waits in the queue may be part of it: to have it twice does no harm
            yield b"".join(event(name, value) for name, value in feed.shown.items())
            while True:
                try:
                    data = await asyncio.wait_for(queue.get(), QUIET_SECONDS)
                except asyncio.TimeoutError:
                    data = ALIVE
                if data is None:
                    return
                yield data
        finally:
            self._queues[key].discard(queue)


def application(
    runs: RunList,
    default: RunDirectory,
    token: str,
    accepts_host: Callable[[str], bool],
    *,
    follows: bool = False,
    keeps: bool = True,
    also: Sequence[Route] = (),
) -> Starlette:
    """Return the ASGI application.

    Args:
        default: the run that the page shows first.
        token: the first part of every address.
        accepts_host: whether a Host header names this server, as `Listener.accepts_host`.
        follows: the user has named no run: the page shows the one that is active.
        keeps: as of `Readers`.
        also: further addresses, without a token.
    """
    readers = Readers(runs, key_of(default.path), follows=follows, keeps=keeps)

    def guarded(answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        async def checked(request: Request) -> Response:
            host = request.headers.get("host")
            if host is not None and not accepts_host(host):
                return PlainTextResponse("not a name of this server\n", 421, headers=HEADERS)
            given = request.path_params["token"].encode(errors="replace")
            if not hmac.compare_digest(given, token.encode()):
                text = "not found; open the address that `grpo-run serve` has printed\n"
                return PlainTextResponse(text, 404, headers=HEADERS)
            return await answer(request)

        return checked

    async def static(request: Request) -> Response:
        name = request.path_params.get("file", "")
        if name not in FILES:
            return PlainTextResponse("not found\n", 404, headers=HEADERS)
        file, kind = FILES[name]
        content = (STATIC / file).read_bytes()
        return Response(content, media_type=kind, headers={**HEADERS, "content-security-policy": POLICY})

    async def events(request: Request) -> Response:
        if not await readers.begin():
            return PlainTextResponse("the page has failed\n", 503, headers=HEADERS)
        key = request.query_params.get("run") or readers.default
        if key not in runs.directories:
            return PlainTextResponse("no such run\n", 404, headers=HEADERS)
        if readers.count >= MOST_READERS:
            return PlainTextResponse("too many pages are open\n", 503, headers=HEADERS)
        return StreamingResponse(readers.stream(key), media_type="text/event-stream", headers=HEADERS)

    def of_feed(read: Callable[[RunFeed], Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            feed = await readers.feed_of(request.path_params["key"])
            if feed is None:
                return PlainTextResponse("no such run\n", 404, headers=HEADERS)
            return JSONResponse(await in_thread(read, feed), headers=HEADERS)

        return guarded(answer)

    async def output(request: Request) -> Response:
        run = runs.directories.get(request.path_params["key"])
        asked = request.query_params
        numbers = [asked.get(name, "") for name in ("rank", "attempt")]
        if run is None or not all(number.isdecimal() or not number for number in numbers):
            return PlainTextResponse("no such run, rank or attempt\n", 404, headers=HEADERS)
        if readers.count >= MOST_READERS:
            return PlainTextResponse("too many pages are open\n", 503, headers=HEADERS)
        rank, attempt = (int(number) if number else None for number in numbers)
        lines = log_lines(run, rank=rank, attempt=attempt, find=asked.get("find", ""))
        return StreamingResponse(readers.log_stream(lines), media_type="text/event-stream", headers=HEADERS)

    async def report(request: Request) -> Response:
        run = runs.directories.get(request.path_params["key"])
        if run is None:
            return PlainTextResponse("no such run\n", 404, headers=HEADERS)
        try:
            page = await in_thread(_report, run, str(request.path_params["number"]))
        except RunDirectoryError as error:
            return PlainTextResponse(f"{error}\n", 404, headers=HEADERS)
        return HTMLResponse(page, headers=HEADERS)  # with a policy of its own

    @contextlib.asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        if keeps:
            await readers.begin()
        yield
        await readers.end()

    return Starlette(
        routes=[
            *also,
            Route("/{token}/", guarded(static), methods=["GET"]),
            Route("/{token}/events", guarded(events), methods=["GET"]),
            Route("/{token}/curves/{key}", of_feed(RunFeed.points), methods=["GET"]),
            Route("/{token}/values/{key}", of_feed(RunFeed.values), methods=["GET"]),
            Route("/{token}/log/{key}", guarded(output), methods=["GET"]),
            Route("/{token}/incident/{key}/{number:int}", guarded(report), methods=["GET"]),
            Route("/{token}/{file}", guarded(static), methods=["GET"]),
        ],
        lifespan=lifespan,
    )


def application_of(
    run: RunDirectory, token: str, accepts_host: Callable[[str], bool], also: Sequence[Route]
) -> Starlette:
    """Return the application of one run, which is read while a page is open."""
    return application(RunList(None, run), run, token, accepts_host, keeps=False, also=also)


def _report(run: RunDirectory, number: str) -> str:
    from grpo_run.dashboards.reports.incident_contents import find_incident, read_report
    from grpo_run.dashboards.reports.incident_page import build

    return build(read_report(run, find_incident(run, number)))
