"""Which reward function has failed: a rank has hung in it, by its stacks, or it has raised, by the traceback.
Called by `_hangs.py`, and by `fault.py` for exits. Does no I/O.

A function is found by the frame of ours that calls it. An exception that says that a time limit has expired
counts as a hang: the function's own limit has ended what would not have returned.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from grpo_run.watchdog.causes import is_expired_limit
from grpo_run.watchdog.evidence.source import OUR_ROOT
from grpo_run.watchdog.evidence.stacks import Stack, main_stack
from grpo_run.watchdog.observation import Phase, RankError
from grpo_run.watchdog.verdict import RewardFunction

CALLER_FILE = f"{OUR_ROOT}/runtime/rank/hooks/_reward_functions.py"
CALLER = "called_in_rank"
"""A function of that file whose next inner frame is a reward function."""
EVERY_FUNCTION = RewardFunction(file="", function="*")
"""It is an async one, and none of them runs at present: it cannot be told which one does not return."""
_FUTURES = "concurrent/futures/_base.py"
_TRACEBACK_FRAME = re.compile(r'^  File "(.*)", line \d+, in (.+)$', re.MULTILINE)


def hung_reward(stacks: Iterable[Sequence[Stack]]) -> RewardFunction | None:
    """Return the function that ranks have hung in; None if there is none, or if there are several.

    Args:
        stacks: of each rank that hangs in a reward.
    """
    found = {function for threads in stacks if (function := _of_rank(threads)) is not None}
    return found.pop() if len(found) == 1 else None


def raised_reward(error: RankError | None, phase: str | None) -> RewardFunction | None:
    """Return the function that has raised; None if no reward function has.

    One that has raised because a time limit has expired counts as not having returned in time.

    Args:
        error: that ended the rank; None if it left none.
        phase: name of the phase in which it was raised.
    """
    if error is None or phase != Phase.reward.name:
        return None
    timed_out = is_expired_limit((error.type, *error.bases))
    frames = _TRACEBACK_FRAME.findall(error.traceback)
    for (file, name), called in zip(reversed(frames[:-1]), reversed(frames[1:]), strict=True):
        if (file, name) == (CALLER_FILE, CALLER):
            return RewardFunction(file=called[0], function=called[1], raised=not timed_out)
    return None


def _of_rank(threads: Sequence[Stack]) -> RewardFunction | None:
    for stack in threads:
        for inner, frame in zip(stack.frames, stack.frames[1:], strict=False):
            if (frame.file, frame.function) == (CALLER_FILE, CALLER):
                return RewardFunction(file=inner.file, function=inner.function)
    main = main_stack(threads)
    waits = main is not None and any(
        frame.file.endswith(_FUTURES) and frame.function == "result" for frame in main.frames[:3]
    )
    return EVERY_FUNCTION if waits else None
