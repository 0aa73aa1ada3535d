"""The unit tests run as on another machine: in another time zone, with another umask and home directory, and
on a machine that has been up for another time.

Each session draws these conditions and names them in pytest's header; `--elsewhere SEED` repeats a draw, and
`--elsewhere 0` leaves the machine as it is. A test that depends on one of them fails here, and not only on a
user's machine. Registered by `conftest.py` for sessions with unit tests only, because other tests start
processes that would not see the shifted clock.
"""

from __future__ import annotations

import os
import random
import tempfile
import time

import pytest

from support import workers

OPTION = "--elsewhere"
ZONES = ("UTC", "Pacific/Kiritimati", "America/St_Johns", "Asia/Kathmandu", "Pacific/Pago_Pago")
UMASKS = (0o022, 0o002, 0o077)
UPTIMES_SECONDS = (9.0, 894.0, 12_345.0, 90 * 86_400.0)


class Elsewhere:
    """The conditions of one session.

    Args:
        seed: of the draw, the same in all workers.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        draw = random.Random(seed)
        self.zone, self.umask = draw.choice(ZONES), draw.choice(UMASKS)
        self.uptime_seconds = draw.choice(UPTIMES_SECONDS)

    def pytest_report_header(self) -> str:
        """Name the conditions."""
        return (
            f"elsewhere: time zone {self.zone}, umask {self.umask:03o}, clock at {self.uptime_seconds:g} s, a"
            f" new home directory ({OPTION} {self.seed} repeats it)"
        )

    def pytest_sessionstart(self) -> None:
        """Move there."""
        os.environ["TZ"] = self.zone
        time.tzset()
        os.umask(self.umask)
        self._home = tempfile.TemporaryDirectory(prefix="home-")
        os.environ["HOME"] = self._home.name
        os.environ.pop("XDG_STATE_HOME", None)
        shift = self.uptime_seconds - time.monotonic()
        monotonic, monotonic_ns = time.monotonic, time.monotonic_ns
        time.monotonic = lambda: monotonic() + shift
        time.monotonic_ns = lambda: monotonic_ns() + int(shift * 1e9)

    def pytest_sessionfinish(self) -> None:
        """Remove the home directory."""
        self._home.cleanup()


def register(config: pytest.Config) -> None:
    """Draw the conditions of a session of unit tests."""
    if hasattr(config, "workerinput"):
        seed = config.workerinput.get("elsewhere", 0)
    else:
        given = config.getoption(OPTION)
        seed = random.SystemRandom().randrange(1, 10_000) if given is None else given
    if seed and workers.only_unit_tests(config):
        config.pluginmanager.register(Elsewhere(seed))
        config.pluginmanager.register(_Workers(seed))


class _Workers:
    """Gives every worker the same seed."""

    def __init__(self, seed: int) -> None:
        self._seed = seed

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: object) -> None:
        """Called in the controller for each worker."""
        node.workerinput["elsewhere"] = self._seed  # type: ignore[attr-defined]
