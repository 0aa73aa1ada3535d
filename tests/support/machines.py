"""Draws a machine for each run of the unit tests, so that a test that depends on the machine fails at once.

Drawn are uptime, host name, time zone, locale, home and umask. They are shown in pytest's header, or at the
end of a quiet run, with the option that draws them again. The clock and the host name are moved in
namespaces of the kernel, for pytest-xdist's workers and all that they start: without workers, or where
namespaces are not permitted, they stay. What the user's shell says of terminal and network is hidden from
all tests.
"""

from __future__ import annotations

import os
import random
import re
import shlex
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from support import workers

HOME = Path(__file__).parents[2] / "build" / "home"
"""A home without anything of the user, kept for what libraries write into it once."""
VARIABLES: tuple[tuple[dict[str, str | None], ...], ...] = (
    ({"TZ": None}, {"TZ": "UTC0"}, {"TZ": "<+14>-14"}, {"TZ": "NST3:30NDT,M3.2.0,M11.1.0"}),
    ({}, {"LC_ALL": "C"}, {"LC_ALL": "POSIX"}, {"LC_ALL": "C.UTF-8"}),
    ({}, {"HOME": None}, {"HOME": str(HOME)}),
)
"""Of each, one is drawn; None removes a variable."""
UMASKS = (0o022, 0o002, 0o027, 0o077)
HOSTS = ("localhost", "node-17", "a.host.of.example", "x" * 63)
OF_THE_USER = re.compile("(NO_|FORCE_)COLOR|TERM|COLORTERM|COLUMNS|LINES|[a-z]+_proxy|[A-Z]+_PROXY")
"""Variables that rich and urllib read."""
SHOWN = pytest.StashKey[str]()


class Machine:
    """What one seed draws."""

    def __init__(self, seed: int) -> None:
        generator = random.Random(seed)
        self.seed = seed
        self.uptime_seconds = int(10 ** generator.uniform(0, 8))  # as often of one digit as of eight
        self.host, self.umask = generator.choice(HOSTS), generator.choice(UMASKS)
        drawn = [generator.choice(choices) for choices in VARIABLES]
        self.variables = {name: value for one in drawn for name, value in one.items()}

    def apply(self) -> None:
        """Change this process and what it starts: all but the clock and the host name."""
        HOME.mkdir(parents=True, exist_ok=True)
        os.umask(self.umask)
        for name, value in self.variables.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        time.tzset()

    def move_workers(self, config: pytest.Config) -> bool:
        """Start the workers in namespaces of their own; return False without workers or the permission."""
        offset = self.uptime_seconds - int(time.clock_gettime(time.CLOCK_BOOTTIME))
        clocks = [f"--monotonic={offset}", f"--boottime={offset}"]
        command = ["unshare", "--uts", "--time", *clocks, "--fork", "--kill-child"]
        tried = subprocess.run(["sh", "-c", shlex.join([*command, "true"])], stderr=subprocess.DEVNULL)
        if tried.returncode or not getattr(config.option, "tx", None):
            return False
        python = shlex.join([*command, sys.executable])
        config.option.tx = [f"popen//python={python}" for _ in config.option.tx]
        config.option.host = self.host
        return True

    def text(self, *, moved: bool) -> str:
        """Say what was drawn and how to draw it again."""
        parts = (
            [f"up for {self.uptime_seconds} s, host {self.host}"] if moved else ["own clock and host name"]
        )
        parts += [
            f"no {name}" if value is None else f"{name}={value}" for name, value in self.variables.items()
        ]
        return f"machine: {', '.join(parts)}, umask {self.umask:03o} (again with --machine {self.seed})"


def configure(config: pytest.Config) -> None:
    """Draw a machine if only unit tests are asked for. In a moved worker, name the host."""
    if hasattr(config, "workerinput"):
        if host := getattr(config.option, "host", None):
            socket.sethostname(host)
        return
    seed = config.option.machine
    if seed == 0 or not workers.only_unit_tests(config):
        return
    machine = Machine(seed or random.SystemRandom().randint(1, 99_999))
    machine.apply()
    config.stash[SHOWN] = machine.text(moved=machine.move_workers(config))


def pytest_sessionstart() -> None:
    """Hide the user's terminal and network."""
    for name in filter(OF_THE_USER.fullmatch, list(os.environ)):
        del os.environ[name]


def pytest_report_header(config: pytest.Config) -> str | None:
    """Show the machine."""
    return config.stash.get(SHOWN, None)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Show the machine if there was no header."""
    if config.option.verbose < 0 and SHOWN in config.stash:
        terminalreporter.write_line(config.stash[SHOWN])
