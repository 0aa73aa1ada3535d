"""Starts the stand-in server in a test, talks to it, and looks into it. Imports neither torch nor numpy."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.rollout_server.plants import VARIABLE
from support.runs import SCRIPTS, free_port

HERE = Path(__file__).parent
PROGRAM = HERE / "server.py"
SCRIPT = SCRIPTS / "server_grpo.py"
READY_SECONDS = 60.0


class StandIn:
    """A server in a session of its own.

    Args:
        folder: of the test; the model and the server's output are in it.
        port: a free one by default.
        plants: what `plants.Plants` says.
    """

    def __init__(self, folder: Path, *, port: int | None = None, **plants: Any) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.output = folder / "server.out"
        with open(self.output, "ab") as output:
            self.process = subprocess.Popen(
                command(folder, self.port),
                env={**os.environ, VARIABLE: json.dumps(plants)}, stdout=output, stderr=output,
                stdin=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip

    def ready(self) -> StandIn:
        """Wait until it answers, and return it."""
        deadline = time.monotonic() + READY_SECONDS
        while self.health() != 200:
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.01)
        return self

    def environment(self) -> dict[str, str]:
        """Return what lets the ranks of `SCRIPT` use this server."""
        return {"TEST_ROLLOUT_SERVER": self.url, "TEST_ROLLOUT_GROUP_PORT": str(free_port())}

    def health(self) -> int:
        """Return the status of `/health`, 0 if nobody listens."""
        try:
            return self.ask("/health")[0]
        except (ConnectionError, urllib.error.URLError):
            return 0

    def ask(self, route: str, body: Any = None, *, seconds: float = 30.0) -> tuple[int, Any]:
        """Return status and content of an answer; POST if there is a body.

        Raises:
            TimeoutError: no answer.
        """
        data = None if body is None else json.dumps(body).encode()
        try:
            with urllib.request.urlopen(self.url + route, data, timeout=seconds) as response:
                status, content = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, content = error.code, error.read()
        except urllib.error.URLError as error:
            if isinstance(error.reason, TimeoutError):
                raise error.reason from error
            raise
        with contextlib.suppress(ValueError):
            return status, json.loads(content)
        return status, content.decode()

    def look(self) -> dict[str, Any]:
        """Return what the engine says about itself."""
        found: dict[str, Any] = self.ask("/stand_in")[1]
        return found

    def plant(self, **changes: Any) -> None:
        """Plant something from now on."""
        status, answer = self.ask("/stand_in", changes)
        assert status == 200, answer

    def close(self) -> None:
        """Kill both processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def command(folder: Path, port: int) -> list[str]:
    """Return the command line of a server; write its model to a folder of the test."""
    model = folder / "base"
    if not model.exists():
        code = "import pathlib, sys, support.rollout_server.model as m; m.write(pathlib.Path(sys.argv[1]))"
        subprocess.run([sys.executable, "-c", code, str(model)], cwd=HERE.parents[1], check=True)
    return [sys.executable, str(PROGRAM), str(model), "--host", "127.0.0.1", "--port", str(port)]


@contextlib.contextmanager
def stand_in(folder: Path, **options: Any) -> Iterator[StandIn]:
    """Start a server, wait until it answers, and kill it at the end."""
    made = StandIn(folder, **options)
    try:
        yield made.ready()
    finally:
        made.close()
