"""The programs by name and by what may be proved of them, and what they are made of."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable

LONG_SECONDS = 100_000.0
SHORT_SECONDS = 40.0
"""Longer than the test looks."""

PROGRAMS: dict[str, Callable[[], object]] = {}
HUNG: list[str] = []
"""Programs that nothing alive can wake."""
UNTIL_LATER: list[str] = []
"""Programs in which nothing happens before `LONG_SECONDS` have passed."""
UNTIL_SOON: list[str] = []
"""Programs in which nothing happens for at most `SHORT_SECONDS`."""
ALIVE: list[str] = []
"""Programs of which nothing may be proved."""


def program(names: list[str]) -> Callable[[Callable[[], object]], Callable[[], object]]:
    """Add a program to these names."""

    def add(function: Callable[[], object]) -> Callable[[], object]:
        names.append(function.__name__)
        PROGRAMS[function.__name__] = function
        return function

    return add


def in_thread(function: Callable[..., object], *arguments: object) -> threading.Thread:
    """Call the function in a daemon thread."""
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    thread.start()
    return thread


def sleeper(seconds: float, **options: object) -> subprocess.Popen[bytes]:
    """Start a child that sleeps."""
    return subprocess.Popen(["sleep", str(int(seconds))], **options)  # type: ignore[call-overload,no-any-return]


def fork(child: Callable[[], object]) -> int:
    """Fork a child that calls the function and exits."""
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(0)
    return pid
