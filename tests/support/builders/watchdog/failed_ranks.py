"""Exits and errors of ranks."""

from __future__ import annotations

from typing import Any

from grpo_run.watchdog.observation import Exit, RankError


def make_error(**changes: Any) -> RankError:
    """An exception of the user's script, raised at wall time 1000 s."""
    fields: dict[str, Any] = {
        "type": "ZeroDivisionError", "message": "division by zero",
        "traceback": "Traceback (most recent call last): ...",
        "location": ("/home/user/train.py", 12, "reward"), "wall_time": 1000.0,
    }  # fmt: skip
    return RankError(**(fields | changes))


def make_exit(rank: int, **changes: Any) -> Exit:
    """A rank that exited first, with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": 0}
    if changes.get("signal") is not None:
        fields["exit_code"] = None
    return Exit(**(fields | changes))
