"""Decisions that all ranks make together, for hand-written training loops: `any`, `all`, `loop`.

If one rank ends a generation loop while another continues, the next collective deadlocks. With these
functions, every rank contributes its own flag and receives the same result:

    from grpo_run.trainers import consensus
    for _ in consensus.loop(lambda: not finished()):
        step()

Called by users' scripts, from the main thread. The functions use a process group of their own, which the
first call creates, so they do not interfere with the step vote. Each call sends its source location along:
ranks that call from different lines get an error that names both. Outside `grpo-run launch`, a single process
gets its own flag back, and several processes get an error.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from grpo_run.runtime.errors import ConsensusError, UsageError
from grpo_run.trainers.rank.session import Session, current

LOCATION_BYTES = 256
"""Size of a source location as sent; a longer one loses its beginning."""

_groups: dict[Session, Any] = {}


def any(flag: bool) -> bool:
    """Return whether `flag` is true on any rank. Collective: every rank must call it at the same line.

    Raises:
        ConsensusError: ranks called from different lines.
        UsageError: the process is one of several that grpo-run did not start.
    """
    return _any_rank(bool(flag), _location())


def all(flag: bool) -> bool:
    """Return whether `flag` is true on all ranks. Collective, with the errors of `any`."""
    return not _any_rank(not flag, _location())


def loop(more: Callable[[], bool]) -> Iterator[None]:
    """Iterate while any rank has more to do. A rank that is done iterates idly with the others. Collective.

    Args:
        more: called on every rank before each iteration; returns whether this rank has more to do.
    """
    location = _location()
    while _any_rank(bool(more()), location):
        yield


def _location() -> str:
    frame = sys._getframe(2)
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


def _any_rank(flag: bool, location: str) -> bool:
    session = current()
    if session is None:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise UsageError(
                "grpo_run.trainers.consensus works between ranks only if grpo-run launch started them"
            )
        return flag
    if session.world_size == 1:
        return flag
    if session not in _groups:
        _groups[session] = session.connect_vote_group("grpo_run/consensus")
    encoded = location.encode()[-LOCATION_BYTES:].ljust(LOCATION_BYTES, b"\0")
    answers = _groups[session].gather([int(flag), *encoded])
    locations = [bytes(answer[1:]).rstrip(b"\0").decode(errors="replace") for answer in answers]
    for rank, other in enumerate(locations):
        if other != locations[0]:
            raise ConsensusError(
                f"ranks called consensus from different lines: rank 0 at {locations[0]}, rank {rank} at {other}"
            )
    return bool(max(answer[0] for answer in answers))
