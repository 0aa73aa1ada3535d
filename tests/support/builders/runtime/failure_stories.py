"""Verdicts, and the history of a run before them, for the decision after a failure."""

from __future__ import annotations

from collections.abc import Sequence

from grpo_run.runtime.history.history import History
from grpo_run.watchdog.causes import Cause, Origin
from grpo_run.watchdog.verdict import Verdict
from support.journal import as_events


def verdict(
    *,
    cause: Cause = Cause.signal,
    signature: str = "killed",
    deterministic: bool = False,
    starting: bool = False,
    origin: Origin = Origin.code,
    final: str = "",
) -> Verdict:
    """A verdict with the fields that the policy reads."""
    return Verdict(
        cause=cause, culprits=(1,), step=7, phase=None, confidence="proved", sentence="It failed.",
        signature=signature, deterministic=deterministic, starting=starting, origin=origin, final=final,
    )  # fmt: skip


def history(story: Sequence[str], *, trained: bool = True) -> History:
    """Return a history: `!name` is an incident with that signature, a number a published checkpoint."""
    records: list[dict[str, object]] = [{"event": "run_started", "time": 0.0}]
    if trained:
        records.append({"event": "step_committed", "time": 1.0, "step": 1, "train_call": 1})
    for word in story:
        if word.startswith("!"):
            records.append({"event": "incident", "cause": "x", "step": 7, "signature": word[1:]})
        else:
            records.append({"event": "checkpoint_published", "step": int(word), "train_call": 1, "path": "p"})
    return History.of(as_events(records))


KILLED = verdict()
BUG = verdict(cause=Cause.exception, signature="KeyError@train.py:3:step7", deterministic=True)
STALL = verdict(cause=Cause.generation_stall, signature="generation_stall@train.py:3:step7")
SLOW_JUDGE = verdict(cause=Cause.reward_stall, signature="reward_stall@train.py:3:step7")
NO_START = verdict(
    cause=Cause.startup_failure, signature="ImportError@train.py:1:step0", deterministic=True, starting=True
)
