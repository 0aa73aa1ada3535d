"""Decisions that all ranks take together, for hand-written loops: `any`, `all`, `loop`.

A generation loop that ends on one rank while another goes on deadlocks at the next collective. Here every
rank brings its flag and takes the same answer:

    from grpo_run.trainers import consensus
    for _ in consensus.loop(lambda: not finished()):
        step()

Called by users' scripts, from the main thread. A group of its own carries it, made at the first call, so a vote under
way is not in its way. The call's place in the code travels with the flag: ranks that meet from different lines get an
error that names both. Outside `grpo-run launch` a single process decides alone; several are refused.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from grpo_run.runtime.errors import ConsensusError, UsageError
from grpo_run.trainers.rank.session import CONNECT_SECONDS, Session, current

SITE_BYTES = 256
"""Room for a call's place in the code; a longer one keeps its end."""

_groups: dict[Session, Any] = {}


def any(flag: bool) -> bool:
    """Whether `flag` is true on any rank; every rank must call it at the same line.

    Raises:
        ConsensusError: ranks met here from different lines; names two of them.
    """
    return _most(bool(flag), _site())


def all(flag: bool) -> bool:
    """Whether `flag` is true on all ranks; see `any`."""
    return not _most(not flag, _site())


def loop(more: Callable[[], bool]) -> Iterator[None]:
    """Go round as long as any rank has more to do; a rank that is done goes round idle with the others.

    Args:
        more: asked on every rank before each round.
    """
    site = _site()
    while _most(bool(more()), site):
        yield


def _site() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _most(flag: bool, site: str) -> bool:
    session = current()
    if session is None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError("grpo_run.trainers.consensus needs its ranks started by grpo-run launch")
        return flag
    if session.world_size == 1:
        return flag
    if session not in _groups:
        from grpo_run.trainers.rank.vote_group import connect_vote_group

        _groups[session] = connect_vote_group(
            rank=session.rank,
            world_size=session.world_size,
            prefix="grpo_run/consensus",
            connect_seconds=CONNECT_SECONDS,
            timeout_seconds=session.config.timeouts.vote_seconds,
            on_collective=session.on_collective,
        )
    answers = _groups[session].gather([int(flag), *site.encode()[-SITE_BYTES:].ljust(SITE_BYTES, b"\0")])
    places = [bytes(answer[1:]).rstrip(b"\0").decode(errors="replace") for answer in answers]
    for rank, place in enumerate(places):
        if place != places[0]:
            raise ConsensusError(
                f"ranks decide from different lines: rank 0 at {places[0]}, rank {rank} at {place}"
            )
    return bool(max(answer[0] for answer in answers))
