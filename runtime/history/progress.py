"""How a run gets on: commits, step times, failures, lost checkpoints. Pure.

A step is committed when all ranks have voted after its optimizer step. `runtime/rank/saving/_cadence.py`
computes the snapshot interval from the failure rate. Called by `history.py` in the order of the journal, and
by the supervisor at each poll. Times are passed in. Does not know why a step was slow.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from grpo_run.runtime.history.events import (
    CheckpointFailed,
    CheckpointPublished,
    CheckpointRejected,
    StepCommitted,
)
from grpo_run.watchdog.observation import Slot
from grpo_run.watchdog.stalls.durations import Histogram


@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest step that every rank has voted on.

    Args:
        train_call: ordinal of its `train()` call.
        step: the committed step.
        resumed_step: the step that the call resumed from.
        target_steps: number of steps of the call.
        voted_at_seconds: when the last rank voted, on the monotonic clock.
        tokens, completions: that the ranks of the board have generated in this attempt.
    """

    train_call: int
    step: int
    resumed_step: int
    target_steps: int
    voted_at_seconds: float
    tokens: int = 0
    completions: int = 0

    def as_event(self, *, wall_time: float, now_seconds: float) -> StepCommitted:
        """Return its journal event.

        Args:
            wall_time: now, in seconds since the epoch.
            now_seconds: now, on the monotonic clock.
        """
        return StepCommitted(
            step=self.step,
            train_call=self.train_call,
            target_steps=self.target_steps,
            committed_at=wall_time - (now_seconds - self.voted_at_seconds),
            tokens=self.tokens or None,
            completions=self.completions or None,
        )


def newest_commit(slots: Mapping[int, Slot | None], world_size: int) -> Commit | None:
    """Return the newest commit; None if a slot cannot be read or ranks are in different `train()` calls.

    Args:
        slots: of this node's ranks.
        world_size: number of ranks on all nodes.
    """
    readings = [slot for slot in slots.values() if slot is not None]
    if len(readings) < len(slots) or not readings:
        return None
    call = min(slot.train_call for slot in readings)
    if any(slot.train_call != call for slot in readings) or call == 0:
        return None
    # if the board shows all ranks, a vote that each has begun commits the step; otherwise only the vote's
    # result does
    complete = len(readings) == world_size
    return Commit(
        train_call=call,
        step=min(slot.voted_step for slot in readings)
        if complete
        else max(slot.committed_step for slot in readings),
        resumed_step=readings[0].resumed_step,
        target_steps=readings[0].target_steps,
        voted_at_seconds=max(slot.voted_at_seconds for slot in readings),
        tokens=sum(slot.tokens_generated for slot in readings),
        completions=int(sum(slot.completions for slot in readings)),
    )


PRIOR_FAILURE_SECONDS = 4 * 3600.0
"""Assumed before the run has shown otherwise: one failure in four hours. The 16,384 GPUs of Llama 3's
pre-training failed about as often (arXiv:2407.21783, section 3.3.4: 466 interruptions in 54 days are one in
2.8 hours), so it is pessimistic for 64 GPUs.
"""


def mean_time_between_failures(elapsed_seconds: float, failures: int) -> float:
    """Return the mean time between failures in seconds: the run's history plus one prior observation.

    Args:
        elapsed_seconds: duration of the run, over all attempts.
        failures: number of interruptions.
    """
    return (elapsed_seconds + PRIOR_FAILURE_SECONDS) / (failures + 1)


MOST_COMMITS = 2000
"""Commits that are kept. If there are more, pairs of the older half are joined."""
RECENT_COMMITS = 20
"""Commits whose median is the present step time."""
MIN_COMMITS = 3
"""The first step of an attempt includes compilation and connections; the median of three leaves it out."""


@dataclass
class StepTimes:
    """Durations of the steps that were committed and not repeated later. Times are wall clock seconds."""

    _commits: list[tuple[int, int, int, float]] = field(default_factory=list)
    """(train call, step, steps since the commit before, seconds since it); old ones are joined."""
    durations: Histogram = field(default_factory=Histogram)
    """Of all committed steps, those that were done again too."""
    _last: tuple[int, int, float] | None = None

    def interrupt(self) -> None:
        """Do not count the time until training begins again: the ranks are started."""
        self._last = None

    def begin(self, call: int, step: int, at: float) -> None:
        """Training begins or resumes after `step`; the steps after it are done again."""
        self._commits = [known for known in self._commits if known[:2] <= (call, step)]
        self._last = (call, step, at)

    def commit(self, call: int, step: int, at: float) -> None:
        """Count a committed step. Fast steps are not all observed: a commit may stand for several."""
        last = self._last
        if last is not None and last[0] == call and step > last[1]:
            steps = step - last[1]
            self._commits.append((call, step, steps, at - last[2]))
            if len(self._commits) > MOST_COMMITS:
                self._join_pairs()
            self.durations = self.durations.with_value((at - last[2]) / steps, steps)
        self._last = (call, step, at)

    def _join_pairs(self) -> None:
        older, self._commits = self._commits[: MOST_COMMITS // 2], self._commits[MOST_COMMITS // 2 :]
        joined: list[tuple[int, int, int, float]] = []
        for number, (call, step, steps, seconds) in enumerate(older):
            if number % 2 and joined[-1][0] == call:
                _, _, steps_before, seconds_before = joined.pop()
                steps, seconds = steps + steps_before, seconds + seconds_before
            joined.append((call, step, steps, seconds))
        self._commits[:0] = joined

    def gained_seconds(self, call: int, step: int) -> float:
        """Return how long the steps beyond a position take at their median duration, in seconds."""
        gained = [
            (min(steps, reached - step) if ordinal == call else steps, seconds / steps)
            for ordinal, reached, steps, seconds in self._commits
            if (ordinal, reached) > (call, step)
        ]
        if not gained:
            return 0.0
        return sum(steps for steps, _ in gained) * median(seconds for _, seconds in gained)

    def typical_seconds(self, call: int) -> float | None:
        """Return the median duration of a step over the last commits of a `train()` call; None until
        known.
        """
        recent = [
            seconds / steps
            for ordinal, _, steps, seconds in self._commits[-RECENT_COMMITS:]
            if ordinal == call
        ]
        return median(recent) if len(recent) >= MIN_COMMITS else None


MAX_NAMED = 3
"""Lost checkpoints in one sentence."""


@dataclass(kw_only=True)
class _Lost:
    path: str
    reason: str
    newer: set[int] = field(default_factory=set)


@dataclass(kw_only=True)
class LostCheckpoints:
    """Checkpoints that the script scheduled and that will never be on its disk: skipped or refused.

    One that `save_total_limit` would have deleted by now is not missed, unless it is the best one, nor is one
    that the run has saved since, after it went back.
    """

    _lost: dict[tuple[int, int], _Lost] = field(default_factory=dict)

    def apply_failed(self, event: CheckpointFailed | CheckpointRejected) -> None:
        """A checkpoint could not be saved; only one that is `lost` is not tried again."""
        if event.lost:
            position = event.train_call or 0, event.step or 0
            self._lost[position] = _Lost(path=event.path, reason=str(event.reason))

    def apply_published(self, event: CheckpointPublished) -> None:
        """A checkpoint is on disk, or a snapshot of the run."""
        if not event.scheduled or not self._lost:
            return
        call, step = event.train_call or 0, event.step
        self._lost.pop((call, step), None)
        best, keeps = event.best or "", event.keeps
        best_step = best.rpartition("-")[2]
        for (lost_call, lost_step), lost in list(self._lost.items()):
            if lost_call != call or lost_step >= step:
                continue
            lost.newer.add(step)
            # an older best one is kept beside the newer ones
            kept = len(lost.newer) + (best_step.isdecimal() and int(best_step) < lost_step)
            if keeps and kept >= keeps and lost.path.rpartition("/")[2] != best:
                del self._lost[lost_call, lost_step]

    @property
    def sentence(self) -> str:
        """Which are missing, and why; empty if none is."""
        if not self._lost:
            return ""
        missing = [self._lost[key] for key in sorted(self._lost)]
        names = ", ".join(lost.path for lost in missing[:MAX_NAMED])
        more = f" and {len(missing) - MAX_NAMED} more" if len(missing) > MAX_NAMED else ""
        are = "is" if len(missing) == 1 else "are"
        return f"{names}{more}, which the script scheduled, {are} not on disk: {missing[0].reason}"
