"""Drive Chromium over its DevTools protocol, for pages that change while they are open."""

from __future__ import annotations

import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

START_SECONDS = 60.0


class Page:
    """One page. `console` has its errors and warnings, `requests` every address that it has asked for."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._numbers = itertools.count(1)
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol, and note the events that come before its answer."""
        number = next(self._numbers)
        self._connection.send(json.dumps({"id": number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._connection.recv(timeout=START_SECONDS))
            if message.get("id") == number:
                assert "error" not in message, message
                return dict(message["result"])
            self._note(message.get("method"), message.get("params", {}))

    def _note(self, method: str | None, event: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.console.append(str(event["exceptionDetails"].get("exception", event)))
        elif method == "Runtime.consoleAPICalled" and event["type"] in ("error", "warning"):
            self.console.append(str(event["args"]))
        elif method == "Log.entryAdded" and event["entry"]["level"] in ("error", "warning"):
            self.console.append(str(event["entry"]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(event["request"]["url"])

    def show(self, *, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the page and its color scheme."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)

    def open(self, url: str) -> None:
        """Go to an address, and wait until its scripts have been run."""
        self.call("Page.navigate", url=url)
        blank = "===" if url == "about:blank" else "!=="
        self.wait(f"location.href {blank} 'about:blank' && document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """Return the value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def wait(self, expression: str, seconds: float = 20.0) -> Any:
        """Wait until an expression is true, and return its value."""
        ends = time.monotonic() + seconds
        while not (found := self.value(expression)):
            text = self.value("document.body ? document.body.innerText : ''")
            assert time.monotonic() < ends, f"not true within {seconds} s: {expression}; {text[:1500]}"
            time.sleep(0.05)
        return found


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """Run Chromium without a network but this machine's.

    Args:
        folder: for its profile.
    """
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    assert found is not None, "Chromium is not installed; run tests/support/install-chromium.sh"
    profile = folder / "profile"
    process = subprocess.Popen(
        [
            found, "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
            "--hide-scrollbars", f"--user-data-dir={profile}",
            "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
            "--remote-debugging-port=0", "about:blank",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        ends = time.monotonic() + START_SECONDS
        port_file = profile / "DevToolsActivePort"
        while not port_file.is_file() or not port_file.read_text().strip():
            assert process.poll() is None, "Chromium has ended"
            assert time.monotonic() < ends, "Chromium has not started"
            time.sleep(0.05)
        port = port_file.read_text().split()[0]
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/json") as answer:
            (page,) = [one for one in json.load(answer) if one["type"] == "page"]
        with connect(page["webSocketDebuggerUrl"], max_size=None) as connection:
            yield Page(connection)
    finally:
        process.terminate()
        process.wait(START_SECONDS)
