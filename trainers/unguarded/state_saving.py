"""Detect when a script has saved its own state with `Accelerator.save_state`.

That is progress of the run, and what a stop waits for. Whether the script loads it again is up to the script. Begin and end
of each call are on the board, so that the supervisor ends no rank during one; while it is about to end the ranks, a further
call waits. Calls inside a guarded `train()` belong to the trainer and are left alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

from grpo_run.trainers.rank.session import Session

_WRAPPED = "_grpo_run_state_saving"
HOLD_SECONDS = 10.0
"""How long a call may wait for the end of the ranks. The supervisor decides within a few tenths of a second."""
HOLD_POLL_SECONDS = 0.02


def watch_state_saving(module: Any, session: Session, guarded: Callable[[], bool]) -> None:
    """Wrap `Accelerator.save_state`. A second call has no effect.

    Args:
        module: `accelerate.accelerator`.
        guarded: whether a guarded `train()` call or the loop is running.
    """
    original = module.Accelerator.save_state
    if getattr(original, _WRAPPED, False):
        return

    @functools.wraps(original)
    def save_state(self: Any, *args: Any, **kwargs: Any) -> Any:
        slot = session.slot
        if not session.is_rank or guarded():
            return original(self, *args, **kwargs)
        _wait_while_ranks_are_ended(session)
        slot.save_state_calls += 1
        slot.publish()
        try:
            saved = original(self, *args, **kwargs)
        except BaseException:
            slot.save_state_calls -= 1
            slot.publish()
            raise
        session.journal.write("state_saved", rank=session.rank, path=str(saved or ""))
        slot.save_state_calls += 1
        slot.publish()
        return saved

    setattr(save_state, _WRAPPED, True)
    module.Accelerator.save_state = save_state


def _wait_while_ranks_are_ended(session: Session) -> None:
    deadline = time.monotonic() + HOLD_SECONDS
    while session.board.ends_ranks and time.monotonic() < deadline:
        time.sleep(HOLD_POLL_SECONDS)
