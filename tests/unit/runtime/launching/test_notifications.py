"""Messages of `--notify` and heartbeats of `--heartbeat-url`, received by a real server."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.web_hooks import SECRET, receiver

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.history import History
from grpo_run.runtime.launching import notifications
from grpo_run.runtime.launching.notifications import Notifier, Outbox, address, without_path


def eventually(condition: Callable[[], object]) -> None:
    """Wait until it holds."""
    deadline = time.monotonic() + 20.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The receivers are on this machine."""
    monkeypatch.setenv("no_proxy", "*")


def test_at_most_three_messages_are_sent_a_minute_and_the_rest_with_the_next() -> None:
    """The oldest are only counted, and the end is told in any case."""
    outbox = Outbox()
    for number in range(3):
        outbox.add(f"text {number}")
        assert outbox.due(float(number), final=False) == f"text {number}"
        outbox.accepted()
    for number in range(6):
        outbox.add(f"later {number}")
    assert outbox.due(59.9, final=False) == ""
    waiting = "later 2\nlater 3\nlater 4\nlater 5"
    assert outbox.due(60.0, final=False) == f"(2 earlier messages left out)\n{waiting}"
    outbox.accepted()
    outbox.add("also at 60")
    outbox.due(61.0, final=False)
    outbox.accepted()
    outbox.add("also at 62")
    outbox.due(62.0, final=False)
    outbox.accepted()
    outbox.add("the end")
    assert outbox.due(62.5, final=False) == ""
    assert outbox.due(62.5, final=True) == "the end"
    outbox.accepted()
    assert outbox.due(200.0, final=True) == ""


def test_a_message_that_was_refused_goes_with_the_next_one() -> None:
    """It is not tried again by itself: a receiver that does not answer may have shown it."""
    outbox = Outbox()
    outbox.add("first")
    assert outbox.due(0.0, final=False) == "first"
    assert outbox.due(100.0, final=False) == ""
    outbox.add("second")
    assert outbox.due(101.0, final=False) == "first\nsecond"
    outbox.accepted()
    assert outbox.due(200.0, final=True) == ""


def test_a_message_is_bounded() -> None:
    """In the number of texts and in the length of each."""
    outbox = Outbox()
    for _ in range(100):
        outbox.add("x" * 100_000)
    sent = outbox.due(0.0, final=False)
    assert len(sent) < 2000
    assert sent.startswith("(96 earlier messages left out)\nxxx")


def test_messages_arrive_and_the_last_one_before_the_end() -> None:
    """As Slack reads them: an exception's text cannot call a channel, and is valid Unicode."""
    with receiver() as server:
        notifier = Notifier(server.url, "", "night")
        notifier.start(History(), pytest.fail)
        notifier.tell("FAULT <!channel> & \udcff\nwhere     train.py:3")
        eventually(lambda: server.texts)
        notifier.tell("Gave up.")
        notifier.end()
        first, last = server.texts
    assert first.startswith("grpo-run night on ")
    assert first.endswith(": FAULT &lt;!channel&gt; &amp; ?\nwhere     train.py:3")
    assert last.endswith(": Gave up.")
    assert server.pings == []


@pytest.mark.parametrize(
    ("status", "reason"), [(404, "status 404"), (302, "status 302"), (None, "Connection refused")]
)
def test_a_failing_address_is_one_warning_without_its_path(status: int | None, reason: str) -> None:
    """Of every kind of failure; a redirect would lose the message."""
    warnings: list[str] = []
    with receiver(status=status or 200) as server:
        url = server.url
        if status is None:
            with socket.create_server(("127.0.0.1", 0)) as closed:
                url = f"http://127.0.0.1:{closed.getsockname()[1]}/{SECRET}"
        notifier = Notifier(url, "", "night")
        notifier.start(History(), warnings.append)
        notifier.tell("one")
        eventually(lambda: warnings)
        notifier.tell("two")
        notifier.end()
        assert len(server.texts) == (2 if status else 0)
    host = url.removesuffix(f"/{SECRET}")
    assert warnings == [f"warning: --notify {host}/...: {reason}"]


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_server_that_never_answers_delays_the_end_by_seconds(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Telling does not wait; the end does, within its bound, and a signal ends that wait too."""
    monkeypatch.setattr(notifications, "END_SECONDS", 60.0 if interrupted else 0.2)
    warnings: list[str] = []
    with receiver(silent=True) as server:
        notifier = Notifier(server.url, "", "night")
        notifier.start(History(), warnings.append)
        began = time.monotonic()
        for number in range(10_000):
            notifier.tell(f"text {number}")
        eventually(lambda: server.texts)
        notifier.end(lambda: interrupted)
        assert time.monotonic() - began < 30.0  # the server never answers
    assert warnings == ["warning: --notify: the last message has not been answered"]


def test_the_heartbeat_follows_commits_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not while the run stands still, starts again, or has only the steps of an earlier supervisor."""
    now, looks = 0.0, 0

    def monotonic() -> float:
        nonlocal looks
        looks += 1
        return now

    monkeypatch.setattr(notifications, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(notifications, "time", SimpleNamespace(monotonic=monotonic))
    history = History(attempts=1, committed_in_attempt=7)
    with receiver() as server:
        notifier = Notifier("", server.url, "night")
        notifier.start(history, pytest.fail)

        def pings(at: float, attempts: int, committed: int) -> int:
            nonlocal now
            now, history.attempts, history.committed_in_attempt = at, attempts, committed
            enough = looks + 2  # the first began after the change, and has ended
            eventually(lambda: looks >= enough)
            return len(server.pings)

        assert [pings(0.0, 1, 7), pings(1.0, 2, 0)] == [0, 0]
        assert [pings(2.0, 2, 1), pings(3.0, 2, 2), pings(61.9, 2, 3), pings(62.0, 2, 3)] == [1, 1, 1, 2]
        assert [pings(500.0, 2, 3), pings(501.0, 3, 0), pings(502.0, 3, 1)] == [2, 2, 3]
        notifier.tell("Finished.")
        notifier.end()
    assert set(server.pings) == {f"/{SECRET}"}
    assert server.texts == []


def test_a_heartbeat_that_is_not_answered_does_not_delay_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for it, and nobody reads a warning about it then."""
    monkeypatch.setattr(notifications, "POLL_SECONDS", 0.01)
    history = History(attempts=1)
    with receiver(silent=True) as server:
        notifier = Notifier("", server.url, "night")
        notifier.start(history, pytest.fail)
        time.sleep(0.05)
        history.committed_in_attempt = 1
        eventually(lambda: server.pings)
        began = time.monotonic()
        notifier.end()
        assert time.monotonic() - began < notifications.END_SECONDS


def test_without_addresses_there_is_no_thread() -> None:
    """A run that asks for nothing pays nothing."""
    notifier = Notifier("", "", "night")
    notifier.start(History(), pytest.fail)
    notifier.tell("Finished.")
    began = time.monotonic()
    notifier.end()
    assert time.monotonic() - began < notifications.END_SECONDS


def test_an_address_may_be_in_a_file(tmp_path: Path) -> None:
    """And its secret part is not shown."""
    hook = tmp_path / "hook"
    hook.write_text("https://hooks.example.org:8443/T0/s3cret?key=1\n")
    assert address("--notify", str(hook)) == "https://hooks.example.org:8443/T0/s3cret?key=1"
    assert address("--notify", "http://[::1]:80/x") == "http://[::1]:80/x"
    assert address("--notify", "") == ""
    for word in ("--notify=", "--heartbeat-url=", ""):
        shown = without_path(f"{word}https://hooks.example.org/T0/s3cret")
        assert shown == f"{word}https://hooks.example.org/..."
    assert without_path("train.py") == "train.py"


@pytest.mark.parametrize(
    "word",
    ["hooks.example.org/s3cret", "ftp://h/s3cret", "http://", "http://user:s3cret@h/", "https://h/a s3cret",
     "https://h/s3crét", "/"],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_repeating_it(word: str) -> None:
    """It may be a secret with a mistake in it."""
    with pytest.raises(UsageError, match=r"--heartbeat-url: .*give http") as refused:
        address("--heartbeat-url", word)
    assert "s3cr" not in str(refused.value)
