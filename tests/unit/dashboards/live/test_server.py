"""Only who has the token reads, and nobody changes anything."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient
from structlog.testing import capture_logs
from support.incidents import HOSTILE, write_incident
from support.journal import event

from grpo_run.dashboards.live import server
from grpo_run.dashboards.live.feed import RunList, key_of
from grpo_run.dashboards.live.server import Readers, application, application_of
from grpo_run.dashboards.live.token import read_token
from grpo_run.dashboards.metrics.address import open_listener
from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.journal import Journal
from grpo_run.runtime.history.run_directory import RunDirectory

TOKEN = "t" * 32


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run with one incident whose sentence has markup."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return write_incident(tmp_path, sentence=HOSTILE)


@pytest.fixture
def client(run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestClient]:
    """A client of the page."""
    monkeypatch.setattr(server, "LIST_SECONDS", 0.1)
    listener = open_listener("127.0.0.1:0")
    app = application(RunList(tmp_path / "runs", run), run, TOKEN, listener.accepts_host)
    with listener.socket, TestClient(app, base_url="http://127.0.0.1") as connected:
        yield connected


def paths(run: RunDirectory) -> list[str]:
    """Every address below the token."""
    key = key_of(run.path)
    asked = [
        f"incident/{key}/1",
        f"curves/{key}",
        f"values/{key}",
        f"log/{key}",
        f"log/{key}?rank=1&attempt=0",
    ]
    return ["", "page.js", "charts.js", "page.css", *asked]


def test_the_page_and_its_files_are_served_with_the_token(client: TestClient, run: RunDirectory) -> None:
    """None is kept by the browser or told to another site."""
    for path in paths(run):
        answer = client.get(f"/{TOKEN}/{path}")
        assert answer.status_code == 200, path
        assert (answer.headers["cache-control"], answer.headers["referrer-policy"]) == (
            "no-store",
            "no-referrer",
        )
        assert "set-cookie" not in answer.headers
    policy = client.get(f"/{TOKEN}/").headers["content-security-policy"]
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'")


@pytest.mark.parametrize("token", ["", "wrong", TOKEN[:-1], TOKEN + "t", "%00", "é", "..", TOKEN.upper()])
def test_without_the_token_nothing_is_found(client: TestClient, run: RunDirectory, token: str) -> None:
    """Every address answers alike, and says nothing of the run."""
    for path in [*paths(run), "events"]:
        answer = client.get(f"/{token}/{path}")
        assert answer.status_code == 404, path
        assert "night" not in answer.text


def test_a_name_of_another_site_is_refused(client: TestClient) -> None:
    """It may resolve to this address (DNS rebinding)."""
    assert client.get(f"/{TOKEN}/", headers={"host": "evil.example"}).status_code == 421


@pytest.mark.parametrize("method", ["POST", "PUT", "PATCH", "DELETE", "OPTIONS"])
def test_no_address_takes_anything_but_get(client: TestClient, run: RunDirectory, method: str) -> None:
    """A page of another site can change nothing through the user's browser."""
    for path in [*paths(run), "events"]:
        assert client.request(method, f"/{TOKEN}/{path}").status_code == 405


@pytest.mark.parametrize(
    "path", ["../server.py", "..%2fserver.py", "__init__.py", "index.html", "incident/x/1", "events?run=x",
     "curves/x", "values/x", "log/x", "log/../x"],
)  # fmt: skip
def test_what_is_not_listed_is_not_found(client: TestClient, path: str) -> None:
    """No name in an address is used as a path."""
    assert client.get(f"/{TOKEN}/{path}").status_code == 404


def test_an_incident_opens_its_report(client: TestClient, run: RunDirectory) -> None:
    """With its texts escaped; one that does not exist is a sentence."""
    answer = client.get(f"/{TOKEN}/incident/{key_of(run.path)}/1")
    assert "<script>document.title" not in answer.text
    assert "&lt;script&gt;document.title" in answer.text
    assert client.get(f"/{TOKEN}/incident/{key_of(run.path)}/2").status_code == 404


def test_the_token_is_private_and_stays(tmp_path: Path) -> None:
    """Mode 0600 in a folder of mode 0700, whatever the umask is; the next server has the same address."""
    file = tmp_path / "state" / "serve.token"
    before = os.umask(0)
    try:
        token = read_token(file)
    finally:
        os.umask(before)
    assert len(token) == 32
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert read_token(file) == token


def test_a_token_that_others_can_read_is_refused(tmp_path: Path) -> None:
    """They may have read it; a short one is replaced."""
    file = tmp_path / "serve.token"
    file.write_text("x" * 32)
    file.chmod(0o644)
    with pytest.raises(UsageError, match="mode 0600"):
        read_token(file)
    file.write_text("short")
    file.chmod(0o600)
    assert len(read_token(file)) == 32


async def events_of(readers: Readers, key: str, seen: list[tuple[str, Any]], enough: Any) -> None:
    """Read a stream into `seen` until there is enough."""
    async for data in readers.stream(key):
        for block in data.decode().strip().split("\n\n"):
            name, _, value = block.partition("\ndata: ")
            if value:
                seen.append((name.removeprefix("event: "), json.loads(value)))
        if enough(seen):
            return


def test_all_pages_of_a_run_share_one_reader(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each gets the whole run and then the changes; a page that has gone leaves nothing behind."""
    monkeypatch.setattr(server, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(server, "SEND_SECONDS", 0.05)
    read: list[str] = []
    read_run = server.RunFeed.read
    monkeypatch.setattr(
        server.RunFeed, "read", lambda self: (read.append(self.directory.path.name), read_run(self))[1]
    )

    async def watch() -> list[list[tuple[str, Any]]]:
        runs = RunList(tmp_path / "runs", run)
        runs.find()
        key = key_of(run.path)
        readers = Readers(runs, key, follows=False)
        watching = asyncio.create_task(readers.watch())
        pages: list[list[tuple[str, Any]]] = [[] for _ in range(20)]

        def has_step_50(seen: list[tuple[str, Any]]) -> bool:
            return any(name == "run" and value["step"] == 50 for name, value in seen)

        tasks = [asyncio.create_task(events_of(readers, key, seen, has_step_50)) for seen in pages]
        while not all(any(name == "run" for name, _ in seen) for seen in pages):
            await asyncio.sleep(0.01)
        assert readers.count == 20
        polls = len(read)
        Journal(run.journal, "night").write(event("step_committed", step=50, train_call=1))
        await asyncio.wait_for(asyncio.gather(*tasks), 20)
        assert len(read) - polls < 20
        await asyncio.sleep(0.1)
        watching.cancel()
        return pages

    for seen in asyncio.run(watch()):
        assert next(value["step"] for name, value in seen if name == "run") == 41


def test_a_page_that_does_not_read_is_disconnected(run: RunDirectory, tmp_path: Path) -> None:
    """It connects again and gets everything anew; what waits for it is bounded."""

    async def stall() -> int:
        runs = RunList(tmp_path / "runs", run)
        runs.find()
        key = key_of(run.path)
        readers = Readers(runs, key, follows=False)
        feed = readers._feed(key)
        assert feed is not None
        feed.read()
        stream = readers.stream(key)
        for _ in range(2):
            await anext(stream)
        for _ in range(10 * server.WAITING_CHANGES):
            readers._send(key, b"change")
        return len([data async for data in stream])

    assert asyncio.run(stall()) <= server.WAITING_CHANGES


def test_an_error_while_a_run_is_read_ends_the_watch(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages that stand still would be taken for a run that does."""

    def fail(self: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.RunFeed, "read", fail)
    monkeypatch.setattr(server, "POLL_SECONDS", 0.01)

    async def watch() -> None:
        runs = RunList(tmp_path / "runs", run)
        runs.find()
        await asyncio.wait_for(Readers(runs, key_of(run.path), follows=False).watch(), 20)

    with pytest.raises(ZeroDivisionError):
        asyncio.run(watch())


def test_a_page_without_a_name_follows_the_run_that_is_active(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the shown one is active, no other takes its place."""
    monkeypatch.setattr(server, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(server, "LIST_SECONDS", 0.02)
    other = RunDirectory(path=run.path.with_name("other"))
    other.create()
    other.write_run({})

    async def watch() -> None:
        readers = Readers(RunList(run.path.parent), key_of(run.path), follows=True)
        watching = asyncio.create_task(readers.watch())

        async def until(shown: RunDirectory) -> None:
            while readers.default != key_of(shown.path):
                await asyncio.sleep(0.01)

        with other.locked():
            await asyncio.wait_for(until(other), 20)
            with run.locked():
                await asyncio.sleep(0.2)
                assert readers.default == key_of(other.path)
        with run.locked():
            await asyncio.wait_for(until(run), 20)
        watching.cancel()

    asyncio.run(watch())


def test_a_log_is_a_stream_that_ends_with_the_run(client: TestClient, run: RunDirectory) -> None:
    """It counts as an open page while it lasts; what is no number is no rank."""
    run.attempt(0).mkdir()
    (run.attempt(0) / "rank1.log").write_text("one\n</script>two\n")
    answer = client.get(f"/{TOKEN}/log/{key_of(run.path)}?attempt=0")
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert 'data: [[0,1,1,"one"],[0,1,1,"</script>two"]]' in answer.text
    assert answer.text.endswith("event: end\ndata: null\n\n")
    assert client.get(f"/{TOKEN}/log/{key_of(run.path)}?rank=-1").status_code == 404


def test_curves_of_a_run_that_no_page_shows_are_read(client: TestClient, run: RunDirectory) -> None:
    """To be drawn over those of the one that is shown; with every metric in a list."""
    other = RunDirectory(path=run.path.with_name("other"))
    other.create()
    other.write_run({"run_id": "other"})
    Journal(other.journal, "other").write(event("step_logged", rank=0, step=3, train_call=1, reward=0.5))
    deadline = time.monotonic() + 20
    while (answer := client.get(f"/{TOKEN}/curves/{key_of(other.path)}")).status_code == 404:
        assert time.monotonic() < deadline  # until the list has been read again
        time.sleep(0.05)
    assert answer.json() == {"reward": [[3, 0.5, 0.5, 0.5]]}
    names = {row["name"] for row in client.get(f"/{TOKEN}/values/{key_of(other.path)}").json()["rows"]}
    assert {"grpo_run_state", "grpo_reward"} <= names


def test_the_page_of_a_running_launch_shows_its_run_and_reads_it_only_while_it_is_open(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the supervisor's process: a scraper alone costs no reading, and no other run is read."""
    monkeypatch.setattr(server, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(server, "LIST_SECONDS", 0.02)
    other = RunDirectory(path=run.path.with_name("other"))
    other.create()
    other.write_run({})
    read: list[RunDirectory] = []
    read_run = server.RunFeed.read
    monkeypatch.setattr(server.RunFeed, "read", lambda self: (read.append(self.directory), read_run(self))[1])

    async def look() -> None:
        readers = Readers(RunList(None, run), key_of(run.path), follows=False, keeps=False)
        assert await readers.begin()
        assert list(readers.runs.directories) == [key_of(run.path)]
        await asyncio.sleep(0.2)
        assert read == []
        seen: list[tuple[str, Any]] = []
        watched = events_of(readers, key_of(run.path), seen, lambda seen: "run" in dict(seen))
        await asyncio.wait_for(watched, 20)
        assert next(value["run_id"] for name, value in seen if name == "run") == "night"
        await asyncio.sleep(0.2)
        reads = len(read)
        await asyncio.sleep(0.3)
        assert len(read) == reads
        await readers.end()

    asyncio.run(look())
    assert {directory.path for directory in read} == {run.path}


def test_a_page_of_a_running_launch_that_fails_disconnects_and_ends_nothing_else(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No signal is sent: it would stop the run. Further pages are refused."""

    def fail(self: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server.RunFeed, "read", fail)
    monkeypatch.setattr(server, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(server.os, "kill", lambda *_: pytest.fail("the supervisor was sent a signal"))
    app = application_of(run, TOKEN, lambda host: True, [])
    with TestClient(app, base_url="http://127.0.0.1") as client, capture_logs() as logs:
        ends = time.monotonic() + 20
        while client.get(f"/{TOKEN}/events").status_code != 503:
            assert time.monotonic() < ends
        assert client.get(f"/{TOKEN}/").status_code == 200
    assert [entry["event"] for entry in logs] == ["live_page_failed"]
