"""Journal the rollouts that caps have ended, and find again what a deadline did to them.

A deadline depends on the clock, and a step that is repeated after a fault would end in other weights. So
each rank journals its rollouts while `max_time` is set, and reads these decisions when a `train()` call
begins. With another number of ranks, rollouts are others, and nothing is reapplied. Called by `_capping.py`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from grpo_run.runtime.event import Event
from grpo_run.runtime.features.caps._configuration import CapSettings
from grpo_run.runtime.features.caps._rollout import CAPPED, CappedRollout, DeadlineDecision
from grpo_run.runtime.history.journal import read_newest
from grpo_run.runtime.history.run_directory import RunDirectory
from grpo_run.runtime.rank.session import Session
from grpo_run.watchdog.observation import EndReason

MAX_READ_BYTES = 64 << 20
"""At most the end of a journal is read: the rollouts of some hundred thousand steps. A fault repeats a
few.
"""


class RolloutKey(NamedTuple):
    """Which rollout of a rank."""

    train_call: int
    step: int
    """Optimizer steps done before it."""
    mode: str
    """`train` or `eval`."""
    number: int
    """Among those of this step and mode, from 0."""


class RolloutEnded(Event, kw_only=True):
    """A rollout of a rank has ended: its key, and the fields of `DeadlineDecision`."""

    step: int
    world_size: int
    train_call: int
    mode: str
    number: int
    decoding_steps: int
    timed_out_after: int | None


class CompletionsCapped(Event, kw_only=True, omit_defaults=True):
    """Completions of a rollout that did not end by themselves, by what has ended them."""

    completions: int
    decoding_steps: int
    repetition: int = 0
    deadline: int = 0


def read_decisions(journal: Path, rank: int, world_size: int) -> dict[RolloutKey, DeadlineDecision]:
    """Return this rank's decisions from the run's journal; the newest of each rollout. A missing file has
    none.
    """
    found: dict[RolloutKey, DeadlineDecision] = {}
    for event in read_newest(journal, RolloutEnded, MAX_READ_BYTES):
        if (event.rank, event.world_size) == (rank, world_size):
            key = RolloutKey(event.train_call, event.step, event.mode, event.number)
            found[key] = DeadlineDecision(steps=event.decoding_steps, timed_out_after=event.timed_out_after)
    return found


class RolloutReports:
    """Numbers the rollouts of one call on this rank and reports each.

    Args:
        position: returns the optimizer steps done, and `train` or `eval`.
        train_call: the number of the call.
    """

    def __init__(
        self,
        position: Callable[[], tuple[int, str]],
        session: Session,
        settings: CapSettings,
        train_call: int,
    ) -> None:
        self._position = position
        self._session = session
        self._train_call = train_call
        self._ends_in_time = settings.max_time is not None
        self.key: RolloutKey | None = None
        """Of the rollout that has begun last; None if nothing ends rollouts in time."""
        self._begun: Counter[tuple[int, str]] = Counter()
        self._decided: dict[RolloutKey, DeadlineDecision] = {}
        if self._ends_in_time:
            journal = RunDirectory(path=session.config.run_directory).journal
            self._decided = read_decisions(journal, session.rank, session.world_size)

    def begin(self) -> DeadlineDecision | None:
        """Number the rollout that begins, and return what the deadline did to it in an earlier attempt."""
        if not self._ends_in_time:
            return None
        step, mode = self._position()
        self.key = RolloutKey(self._train_call, step, mode, self._begun[step, mode])
        self._begun[step, mode] += 1
        return self._decided.pop(self.key, None)

    def ended(self, rollout: CappedRollout, key: RolloutKey | None = None) -> None:
        """Report a rollout, by default the one that has begun last."""
        session, reasons = self._session, Counter(rollout.reasons)
        if any(reasons[reason] for reason in CAPPED):
            session.journal.write(
                CompletionsCapped(
                    rank=session.rank,
                    step=self._position()[0],
                    completions=len(rollout.reasons),
                    decoding_steps=rollout.steps,
                    repetition=reasons[EndReason.repetition],
                    deadline=reasons[EndReason.deadline],
                )
            )
        if key := key or self.key:
            session.journal.write(
                RolloutEnded(
                    rank=session.rank,
                    world_size=session.world_size,
                    **key._asdict(),
                    decoding_steps=rollout.steps,
                    timed_out_after=rollout.timed_out_after,
                )
            )
