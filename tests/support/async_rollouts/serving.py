"""Starts the server of this folder for a test."""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager

from support.async_rollouts import server
from support.runs import free_port


@contextmanager
def serving() -> Iterator[str]:
    """Yield the address of a server that answers without a model."""
    port = free_port()
    process = subprocess.Popen([sys.executable, server.__file__, str(port)])
    deadline = time.monotonic() + 30
    try:
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                    break
            except (urllib.error.URLError, ConnectionError):
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.02)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)
