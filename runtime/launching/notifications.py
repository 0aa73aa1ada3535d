"""Messages about a run to a chat, and a heartbeat for a dead-man's switch, by HTTP from one thread.

`--notify` gets what the terminal says of faults, recoveries and the end of the run, as `{"text": ...}` in the
form that Slack, Mattermost and others accept. `--heartbeat-url` is requested while steps are committed, so
that its silence tells of a run, a node or a supervisor that is gone. Nothing waits for either while the run
lasts, and neither changes how it ends. The addresses are secrets: a warning names scheme and host only.
Made by `_supervise.py`, and by `launch.py` after a failure of grpo-run itself. Does not choose what is
told (`dashboards/terminal/terminal.py`).
"""

from __future__ import annotations

import html
import json
import math
import os
import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.history.history import History
from grpo_run.watchdog.text import counted

MINUTE_SECONDS = 60.0
"""Between two heartbeats, and for `MAX_POSTS` messages."""
MAX_POSTS = 3
"""A fault, its recovery, and what has happened since; a restart loop does not fill a channel. The end of the
run is told in any case."""
MAX_WAITING = 4
MAX_CHARACTERS = 450
"""Of one text. Discord refuses a message of more than 2000 characters."""
POLL_SECONDS = 1.0
TIMEOUT_SECONDS = 5.0
"""Of connecting, and of each wait for an answer."""
END_SECONDS = 6.0
"""Longest wait for the last message: an earlier request may have to time out first."""
ADDRESS = re.compile(r"^((?:--[a-z-]+=)?https?://[\w.:\[\]-]+)([/?][!-~]*)?$", re.ASCII)
"""An address, also in one word with its option: what may be shown, and what may not."""
PATH_LEFT_OUT = "/..."
GIVE = "give http://HOST/PATH or https://HOST/PATH, or a file with such a line"


def address(option: str, word: str) -> str:
    """Return the address that an option gives: itself, or the content of a file; "" for none.

    Raises:
        UsageError: it is none. The message does not repeat it.
    """
    try:
        url = word if not word or word.startswith("http") else Path(word).read_text().strip()
    except (OSError, ValueError):
        raise UsageError(f"{option}: there is no such file, and it is no address; {GIVE}") from None
    if url and not ADDRESS.match(url):
        raise UsageError(f"{option}: {GIVE}")
    return url


def without_path(word: str) -> str:
    """Return a word of a command; an address without what is secret in it."""
    return ADDRESS.sub(rf"\1{PATH_LEFT_OUT}", word)


class Outbox:
    """Decides what is sent when; pure, the clock is passed in. One thread adds, and another one sends.

    Texts that wait are sent in one message, which counts the oldest above `MAX_WAITING`. What could not be
    sent goes with the next text.
    """

    def __init__(self) -> None:
        self._recent: deque[tuple[int, str]] = deque(maxlen=MAX_WAITING)
        self._added = self._tried = self._sent = 0
        self._posts: deque[float] = deque(maxlen=MAX_POSTS)

    def add(self, text: str) -> None:
        """Add a text; a long one is cut."""
        self._added += 1
        short = text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 1]}…"
        self._recent.append((self._added, short))

    def due(self, now: float, *, final: bool) -> str:
        """Return the message to send now, and assume that it is tried; "" for none.

        Args:
            now: monotonic seconds.
            final: the run has ended.
        """
        waiting = [(number, text) for number, text in self._recent.copy() if number > self._sent]
        full = len(self._posts) == MAX_POSTS and now - self._posts[0] < MINUTE_SECONDS
        if not waiting or (not final and (full or waiting[-1][0] == self._tried)):
            return ""
        self._tried = waiting[-1][0]
        self._posts.append(now)
        left_out = waiting[0][0] - self._sent - 1
        before = [f"({counted(left_out, 'earlier message')} left out)"] if left_out else []
        return "\n".join([*before, *(text for _, text in waiting)])

    def accepted(self) -> None:
        """The message tried last has arrived."""
        self._sent = self._tried


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Follows none: a redirected POST would arrive as a GET, without its message."""

    def redirect_request(self, *arguments: Any) -> None:
        """Let it be a failure."""


class Notifier:
    """Sends messages and heartbeats until the run has ended. Without addresses it does nothing.

    Args:
        notify, heartbeat_url: addresses; "" for none.
        run_id: named in each message.
    """

    def __init__(self, notify: str, heartbeat_url: str, run_id: str) -> None:
        self._notify, self._heartbeat_url = notify, heartbeat_url
        self._sender = f"grpo-run {run_id} on {os.uname().nodename}"
        self._outbox = Outbox()
        self._opener = urllib.request.build_opener(_NoRedirect)
        self._failed: set[str] = set()
        self._wake = threading.Event()
        self._ending = self._is_late = False
        self._thread: threading.Thread | None = None

    def start(self, history: History, warn: Callable[[str], None]) -> None:
        """Start the thread.

        Args:
            history: of the run, live. Steps that it has already cause no heartbeat.
            warn: shows one line to the user; called once for each address that fails, from any thread.
        """
        self._warn = warn
        if self._notify or self._heartbeat_url:
            self._thread = threading.Thread(
                target=self._run, args=(history,), daemon=True, name="grpo-run-notifications"
            )
            self._thread.start()

    def tell(self, text: str) -> None:
        """Send a text soon. Does not wait."""
        self._outbox.add(text)
        self._wake.set()

    def end(self, interrupted: Callable[[], bool] = lambda: False) -> None:
        """Wait until the last message has been sent, `END_SECONDS` at most. A heartbeat is not waited for.

        Args:
            interrupted: whether the user wants the command to exit now.
        """
        deadline = time.monotonic() + (END_SECONDS if self._notify else 0.0)
        self._ending = True
        self._wake.set()
        while self._thread is not None and self._thread.is_alive():
            if interrupted() or time.monotonic() > deadline:
                self._is_late = True  # it must not print while Python exits
                if self._notify:
                    self._warn("warning: --notify: the last message has not been answered")
                return
            self._thread.join(0.05)

    def _run(self, history: History) -> None:
        pinged_at, pinged_for = -math.inf, (history.attempts, history.committed_in_attempt)
        final = False
        while not final:
            self._wake.wait(POLL_SECONDS)
            self._wake.clear()
            final = self._ending
            now, commits = time.monotonic(), (history.attempts, history.committed_in_attempt)
            if self._notify and (text := self._outbox.due(now, final=final)):
                text = f"{self._sender}: {text}".encode(errors="replace").decode()
                # as Slack asks for it: <!channel> in the message of an exception would call everybody
                body = json.dumps({"text": html.escape(text, quote=False)}).encode()
                if self._request("--notify", self._notify, body):
                    self._outbox.accepted()
            is_due = commits[1] and commits != pinged_for and now - pinged_at >= MINUTE_SECONDS
            if self._heartbeat_url and is_due and not final:
                pinged_at, pinged_for = now, commits
                self._request("--heartbeat-url", self._heartbeat_url, None)

    def _request(self, option: str, url: str, body: bytes | None) -> bool:
        """Send one request, a POST if there is a body. Returns whether it was accepted."""
        headers = {"User-Agent": "grpo-run", "Content-Type": "application/json"}
        try:
            request = urllib.request.Request(url, body, headers)
            self._opener.open(request, timeout=TIMEOUT_SECONDS).close()
        except Exception as error:  # noqa: BLE001 - whatever a server causes; the next message may arrive
            if option not in self._failed and not self._is_late:
                self._failed.add(option)
                self._warn(f"warning: {option} {without_path(url)}: {_reason(error)}")
            return False
        return True


def _reason(error: Exception) -> str:
    """Say why a request has failed. The text of some errors repeats the address."""
    if isinstance(error, urllib.error.HTTPError):
        return f"status {error.code}"
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or type(cause).__name__
