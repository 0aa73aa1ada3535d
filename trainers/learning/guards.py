"""The learning guards of one call in one rank: their history, their alarms, and the response of all ranks.

After each step the rank adds what the step has shown and asks the guards. An alarm whose response is a warning is
reported by rank 0. Any other goes into the step's vote, and the rank collects that vote at once: when all ranks know,
`act` raises `GuardTripped` on each of them, before the next optimizer step and before any save. Created by
`hooks/train_call.py` and `loops/run.py`; called by `calls/`.
"""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.errors import GuardTripped
from grpo_run.trainers.learning.fresh_seeds import reseed, seed_of
from grpo_run.trainers.rank.session import Session
from grpo_run.trainers.rank.vote import Flags, VoteResult
from grpo_run.watchdog.learning.alarm import Alarm, Trip
from grpo_run.watchdog.learning.judging import judge
from grpo_run.watchdog.learning.observations import History, StepValues

HISTORY, OBEYED = "history", "fresh_seeds"
"""Keys of the state in a checkpoint."""


class LearningGuards:
    """The guards of one call.

    Args:
        train_call: the number of the call in the run.
        sampling_group: the rank, or the number of the group of ranks that must draw the same random numbers.
    """

    def __init__(self, session: Session, train_call: int, *, sampling_group: int) -> None:
        self._session = session
        self._rules = session.config.guards
        self._sampling_group = sampling_group
        self._history = History()
        self._obeyed: set[int] = set()
        self._orders = [one for one in session.settings.fresh_seeds if one.train_call == train_call]
        self._trip: Trip | None = None

    def begin_step(self, step: int) -> None:
        """Use fresh seeds from this step on, if the supervisor has ordered it. Its batches have been read.

        Args:
            step: that begins, counted from 1.
        """
        due = [one for one in self._orders if step >= one.step and one.number not in self._obeyed]
        if not due:
            return
        self._obeyed.update(one.number for one in due)
        newest = max(due, key=lambda one: one.number)
        reseed(seed_of(self._session.config.run_id, newest, self._sampling_group))
        if self._session.is_main:
            self._session.journal.write("reseeded", rank=0, step=step, order=newest.number)
            self._session.notify(
                f"step {step} and the following use fresh sampling seeds; the run is no longer equal to an undisturbed one"
            )

    def end_step(self, step: int, values: StepValues) -> Flags:
        """Judge a finished step; return what to vote on."""
        self._history.add(step, values)
        for alarm in judge(self._history, step, self._rules):
            response = self._rules.response(alarm.guard)
            if not response.ends_attempt:
                self._warn(alarm)
            elif self._trip is None:
                self._trip = Trip.of(alarm, response)
        return Flags(nonfinite=not values.finite, tripped=self._trip is not None)

    def act(self, result: VoteResult) -> None:
        """End the attempt if all ranks have agreed to.

        Raises:
            GuardTripped: a guard whose response ends the attempt has tripped, on this rank or on another one.
        """
        if not result.flags.tripped:
            return
        raise GuardTripped(self._trip)  # None if only another rank has seen it, which says what it is

    def _warn(self, alarm: Alarm) -> None:
        session = self._session
        if session.is_main:
            session.journal.write(
                "guard_tripped",
                rank=0,
                step=alarm.step,
                guard=str(alarm.guard),
                response=str(self._rules.response(alarm.guard)),
                onset=alarm.onset,
                sentence=alarm.sentence,
            )
            session.warn(alarm.sentence)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as plain JSON values."""
        return {HISTORY: self._history.as_json(), OBEYED: sorted(self._obeyed)}

    def load(self, state: Any) -> None:
        """Restore what `state` returned; nothing from a checkpoint without it, or of another format."""
        if not isinstance(state, dict):
            return
        try:
            self._history = History.from_json(state.get(HISTORY, {}))
            self._obeyed = {int(number) for number in state.get(OBEYED, ())}
        except (TypeError, ValueError) as error:
            self._session.warn_in_journal(f"the learning guards start without their history: {error}")
