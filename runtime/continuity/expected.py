"""What a restart resumes from, according to the run's record: one phrase for the reason of the restart.

Called by the recovery policy. What the ranks then do is decided by `trainers/resuming` and journaled as
`train_resumed`. Pure.
"""

from __future__ import annotations

from pathlib import Path

from grpo_run.runtime.continuity.own_training import OwnTraining
from grpo_run.runtime.continuity.train_calls import TrainCalls


def expected_start(
    calls: TrainCalls, own: OwnTraining, *, trained: bool, now: float, in_memory: bool = True
) -> str:
    """Return from where the next attempt continues.

    Args:
        own: what the script trains by itself.
        trained: steps were committed in this run, although its calls may not be known on this node.
        now: seconds since the epoch.
        in_memory: a snapshot in memory is loaded from there; one that could not be is written to disk first.
    """
    if not len(calls) and not trained and own.seen:
        return own.restart(now)
    if not len(calls):
        return "from the checkpoint that rank 0 chooses" if trained else "from the start of the script"
    call = calls.interrupted
    if call is None:
        return "from the start of the script; its finished train() calls are restored"
    which = f" of train() call {call.ordinal}" if call.ordinal > 1 else ""
    if call.saved and call.checkpoint is None:
        return f"from the snapshot of step {call.saved}{which} {'in memory' if in_memory else 'on disk'}"
    if call.checkpoint is not None:
        return f"from {Path(call.checkpoint).name}{which}"
    return f"from step 0{which}, because no checkpoint or snapshot of it exists yet"
