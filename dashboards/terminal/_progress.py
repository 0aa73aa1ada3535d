"""The progress line: where a run stands, in one line. Pure; called by `terminal.py`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from grpo_run.runtime.history.history import History
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.observation import RankState, all_returned
from grpo_run.watchdog.text import counted, duration_text, step_time_text

SEPARATOR = " · "
STATE_NOTES = {
    "suspect": "checking a possible hang",
    "collecting": "collecting evidence",
    "stopping": "stopping",
}
"""What the supervisor is doing, in the states in which training may stand still."""


@dataclass(frozen=True, kw_only=True)
class ProgressLine:
    """One state of the progress line.

    Args:
        starting: no step has been committed since the ranks were started, and no rank is waited for.
        parts: the facts in the order of the line, each with its rank among the facts: on a narrow terminal
            those with the highest number are left out first.
        wait: identifies who is waited for and where; None if no rank is.
    """

    starting: bool
    parts: tuple[tuple[int, str], ...]
    wait: Hashable = None

    def text(self, width: int | None = None) -> str:
        """Return the line, without the least important facts if it is longer than `width` columns."""
        parts = list(self.parts)
        while width is not None and len(parts) > 1 and len(_joined(parts)) > width:
            parts.remove(max(parts))
        return _joined(parts)


def progress_line(status: RunStatus) -> ProgressLine:
    """Return the state of the run as one line.

    A wait comes first. Of the newest snapshot in memory and the newest checkpoint, the newer is shown. The
    time left is shown only while steps are being committed. Before the first step there may be nothing to
    say.
    """
    if status.hosts_awaited:
        return ProgressLine(starting=False, parts=((0, status.hosts_awaited),), wait="hosts")
    history, wait = status.history, status.wait
    key = None if wait is None else wait.key
    parts: list[tuple[int, str]] = []
    starting = _starting(status)
    if wait is not None:
        parts.append((0, wait.text))
    elif status.state == "recovering":
        parts.append((0, f"restarting {_ranks(status)}"))
    elif status.state in STATE_NOTES:
        parts.append((0, STATE_NOTES[status.state]))
    if starting is None and history.no_trainer.current and status.state == "running":
        parts.append((1, f"training with no Trainer and no loop on {_ranks(status)}"))
        return ProgressLine(starting=False, parts=tuple(parts), wait=key)
    if starting is not None or not history.step:
        parts += [(1, starting)] if starting is not None else []
        return ProgressLine(starting=wait is None, parts=tuple(parts), wait=key)
    steps = f"step {history.step}"
    parts.append((1, f"{steps}/{history.target_steps}" if history.target_steps else steps))
    seconds, remaining = history.step_seconds(), status.remaining_seconds
    if seconds is not None:
        parts.append((4, step_time_text(seconds)))
    if remaining:
        parts.append((2, f"{duration_text(remaining)} left"))
    if history.reward is not None:
        parts.append((3, f"reward {history.reward:.3f}"))
    elif history.loss is not None:
        parts.append((3, f"loss {history.loss:.3f}"))
    parts.append((5, _ranks(status)))
    parts += [(7, point) for point in _recovery_point(history)]
    recovered = sum(recovery.recovery_seconds is not None for recovery in history.recoveries)
    if recovered:
        parts.append((6, f"{counted(recovered, 'fault')} recovered"))
    return ProgressLine(starting=False, parts=tuple(parts), wait=key)


def _ranks(status: RunStatus) -> str:
    """How many ranks this host has, and of how many."""
    here, all_ranks = len(status.slots), status.history.world_size
    return f"{here} of {counted(all_ranks, 'rank')}" if all_ranks > here else counted(here, "rank")


def _starting(status: RunStatus) -> str | None:
    """What ranks do before the first committed step of an attempt; None from then on."""
    if status.state != "starting":
        return None
    history = status.history
    verb = "restarting" if history.restarting else "starting"
    ranks = _ranks(status)
    slots = [slot for slot in status.slots if slot is not None]
    if len(slots) < len(status.slots) or not slots:
        return f"{verb} {ranks}" + (
            f" after step {history.step}" if history.restarting and history.step else ""
        )
    if all_returned(slots):
        return f"{verb}: the script has run its last line on {ranks}"
    if any(slot.state is not RankState.training for slot in slots):
        return f"{verb}: the script runs on {ranks}"
    newest = max(slots, key=lambda slot: (slot.train_call, slot.step))
    target = f"/{newest.target_steps}" if newest.target_steps else ""
    return f"{verb}: {ranks} in step {newest.step + 1}{target}"


def _recovery_point(history: History) -> list[str]:
    snapshot, checkpoint = history.snapshot_step, history.checkpoint
    if checkpoint is not None and checkpoint.train_call != history.train_call:
        checkpoint = None
    # a snapshot beyond the current step belongs to an earlier train() call
    if (
        snapshot is not None
        and snapshot <= history.step
        and (checkpoint is None or snapshot >= checkpoint.step)
    ):
        return [f"snapshot {snapshot}"]
    return [f"checkpoint {checkpoint.step}"] if checkpoint is not None else []


def _joined(parts: list[tuple[int, str]]) -> str:
    return SEPARATOR.join(text for _, text in parts)
