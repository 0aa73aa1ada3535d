"""Decisions of all ranks together, for loops that a script writes itself: `any`, `all`, `while_any`.

If one rank ends a generation loop while another continues, the next collective never completes. With these
functions every rank contributes its own flag and receives the same answer, so that all ranks leave
together:

    from grpo_run.trainers import consensus

    for _ in consensus.while_any(lambda: not finished()):
        step()

Call them from the main thread, on every rank at the same line. Each call sends its function and source line
along: ranks at different calls raise `ConsensusError`, and none takes an answer meant for another line.
They also work outside `grpo-run launch`, on torch's default group (`runtime/rank/consensus.py`). Importing
this module does not import torch.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

from grpo_run.runtime.errors import UsageError
from grpo_run.runtime.rank.consensus import CallSite, ConsensusCall, Turns, agree, exchange
from grpo_run.runtime.rank.rollouts import limits

__all__ = ["all", "any", "while_any"]

_calls = 0
"""Number of calls that this process has made."""


def any(flag: object) -> bool:
    """Return whether `flag` is true on any rank. Collective: every rank must call it at the same line.

    Args:
        flag: of this rank; what `bool()` makes of it is sent.

    Raises:
        ConsensusError: ranks are at different calls; the error names both. Raised on every rank.
        UsageError: called from another thread than the main one, or in one of several processes that no
            process group connects.
    """
    return _decide(_site("any", flag), flag)


def all(flag: object) -> bool:
    """Return whether `flag` is true on all ranks. Collective, with the argument and the errors of `any`."""
    return _decide(_site("all", flag), flag)


def while_any(more: Callable[[], bool]) -> Iterator[None]:
    """Iterate while any rank has more to do, on every rank equally often. Collective, with the errors of
    `any`.

    A rank that has nothing left to do iterates with the others, so that it takes part in their collectives.
    `while consensus.any(not done):` is the same for a flag that is at hand. A rank must not leave the loop on
    its own: decide with `any` or `all` whether all ranks do.

    Args:
        more: called on every rank before each iteration; returns whether this rank has more to do.
    """
    if not callable(more):
        raise UsageError(
            "consensus.while_any takes a function, which it calls before each iteration:"
            " `while_any(lambda: not done)`. For a flag, write `while consensus.any(not done):`"
        )
    return _iterate(_site("while_any", more), more)


def _iterate(site: CallSite, more: Callable[[], bool]) -> Iterator[None]:
    iteration, turns = 1, Turns()
    try:
        while True:
            flag = bool(more()) and not limits.out_of_time(iteration)
            turns.show(flag)
            if not _decide(site, flag, iteration):
                return
            yield
            iteration += 1
    finally:
        turns.end()


def _site(function: str, argument: object) -> CallSite:
    """Return the line that called the public function which calls this one."""
    caller = sys._getframe(2)
    return CallSite.of(function, caller.f_code, caller.f_lineno)


def _decide(site: CallSite, flag: object, iteration: int = 0) -> bool:
    """Take part in one decision of all ranks and return it."""
    global _calls
    if threading.current_thread() is not threading.main_thread():
        raise UsageError(
            f"{site.text} was called in thread {threading.current_thread().name!r}: consensus functions work"
            " in the main thread only, because the calls of several threads have no order that ranks could"
            " share"
        )
    call = ConsensusCall(site=site, flag=bool(flag), ordinal=_calls + 1, iteration=iteration)
    answers = exchange(call)
    _calls += 1
    return call.flag if answers is None else agree(call, answers)
