"""Exits and errors of ranks, for the diagnosis of a failure."""

from __future__ import annotations

from collections.abc import Callable

from grpo_run.watchdog.observation import Exit, RankError, Slot

MakeExit = Callable[..., Exit]
MakeError = Callable[..., RankError]
MakeSlot = Callable[..., Slot]

PEER_GONE = (
    "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:4182"
)


def peer_error(make_error: MakeError, **changes: object) -> RankError:
    """What a rank raises when a peer of its collective is gone."""
    return make_error(**({"type": "RuntimeError", "message": PEER_GONE} | changes))
