"""Factories for errors and exits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from grpo_run.watchdog.observation import Exit, RankError


@pytest.fixture
def make_error() -> Callable[..., RankError]:
    """An exception of the user's script, raised at wall time 1000 s."""

    def make(**changes: Any) -> RankError:
        fields: dict[str, Any] = {
            "type": "ZeroDivisionError",
            "message": "division by zero",
            "traceback": "Traceback (most recent call last): ...",
            "location": ("/home/user/train.py", 12, "reward"),
            "wall_time": 1000.0,
        }
        return RankError(**(fields | changes))

    return make


@pytest.fixture
def make_exit() -> Callable[..., Exit]:
    """A rank that exited first, with code 1."""

    def make(rank: int, **changes: Any) -> Exit:
        fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": 0}
        if changes.get("signal") is not None:
            fields["exit_code"] = None
        return Exit(**(fields | changes))

    return make
