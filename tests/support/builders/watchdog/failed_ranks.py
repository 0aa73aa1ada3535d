"""Exits and errors of ranks, and the verdict on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grpo_run.watchdog.diagnosis.exits import diagnose_exits
from grpo_run.watchdog.observation import Exit, RankError, Slot
from grpo_run.watchdog.verdict import Verdict
from support.builders.watchdog.slots import make_slot

PEER_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4182"
)


def make_error(**changes: Any) -> RankError:
    """An exception of the user's script, raised at wall time 1000 s."""
    fields: dict[str, Any] = {
        "type": "ZeroDivisionError", "message": "division by zero",
        "traceback": "Traceback (most recent call last): ...",
        "location": ("/home/user/train.py", 12, "reward"), "wall_time": 1000.0,
    }  # fmt: skip
    return RankError(**(fields | changes))


def peer_error(**changes: Any) -> RankError:
    """What a rank raises when a peer of its collective is gone."""
    return make_error(**({"type": "RuntimeError", "message": PEER_GONE} | changes))


def make_exit(rank: int, **changes: Any) -> Exit:
    """A rank that exited first, with code 1."""
    fields: dict[str, Any] = {"rank": rank, "pid": 100 + rank, "exit_code": 1, "signal": None, "order": 0}
    if changes.get("signal") is not None:
        fields["exit_code"] = None
    return Exit(**(fields | changes))


def diagnose(*exits: Exit, slots: Mapping[int, Slot | None] | None = None, **known: Any) -> Verdict:
    """The verdict on these failed ranks of a run at step 7.

    Args:
        slots: of all ranks; by default, each up to the highest that failed is in step 8.
        known: further arguments of `diagnose_exits`.
    """
    if slots is None:
        slots = {rank: make_slot(rank) for rank in range(max(exit.rank for exit in exits) + 1)}
    return diagnose_exits(exits, slots, **({"best_position": (1, 7)} | known))
