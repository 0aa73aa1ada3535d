"""A call in a daemon thread whose result may never arrive: GPU drivers and py-spy can hang."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


class BackgroundCall:
    """A function running in a daemon thread. `result` is None until it has returned.

    Args:
        function: returns something other than None.
        arguments: its arguments.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result: Any = None
        self.started = time.monotonic()
        self._thread = threading.Thread(target=self._run, args=(function, *arguments), daemon=True)
        self._thread.start()

    def _run(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.result = function(*arguments)

    def join(self, deadline: float) -> None:
        """Wait until the function has returned, at most until `deadline` (monotonic seconds)."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
