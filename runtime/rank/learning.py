"""The learning guards of one call in one rank: read each step, raise alarms, agree on the response.

Raw loss, gradient norm and logged metrics are read at their source, because transformers logs a NaN loss as
0 and a metric only every `logging_steps` steps; `read_steps` wraps two public methods for the length of a
`train()` call and changes nothing. After each step the guards (`watchdog/learning_guards.py`) are asked.
Rank 0 reports an alarm whose response is a warning. Any other alarm goes into the step's vote, which the
rank collects at once: when all ranks know, `act` raises `GuardTripped` on each of them, before the next
optimizer step and before any save.

When an exact repetition has ended in the same alarm, the supervisor orders new seeds (`FreshSeeds`), and
the random generators are reseeded at that step; the order of the data stays. Created by
`runtime/rank/hooks/train_call.py` and `runtime/rank/loops/run.py`; called by `runtime/rank/step/`.
"""

from __future__ import annotations

import functools
import math
import random
import sys
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import fmean
from typing import Any

from grpo_run.runtime.errors import GuardTripped
from grpo_run.runtime.history.events import LearningGuardTripped, Reseeded
from grpo_run.runtime.history.recovery import FreshSeeds
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.rank.vote import Flags, VoteResult
from grpo_run.runtime.upstream import tensor_files, trainer_names
from grpo_run.runtime.upstream.patches import override_attributes
from grpo_run.watchdog.learning_guards import judge
from grpo_run.watchdog.learning_observations import ObservationHistory, StepValues
from grpo_run.watchdog.learning_rules import Alarm, Trip
from grpo_run.watchdog.rank_metrics import LOGGED

_JUDGED = {
    "reward": "reward",
    "zero_variance": "zero_variance_groups",
    "kl": "kl",
    "entropy": "entropy",
    "capped": "truncated_completions",
}
"""Names of `StepValues`, and their rows in `watchdog/rank_metrics.py`."""
METRICS = {
    name: metric.logged_as[0] for name, field in _JUDGED.items() for metric in LOGGED if metric.field == field
}
"""Names of `StepValues`, and those under which TRL's GRPO and RLOO collect them. All are means over all
ranks.
"""


class StepReader:
    """What the step in progress has shown so far."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._loss_is_finite = True
        self._norm: Any = None
        self._lengths: dict[str, int] = {}

    def begin_step(self) -> None:
        """Note what has been collected for the next log line before this step."""
        table = self._table()
        self._lengths = {name: len(table.get(key, ())) for name, key in METRICS.items()}

    def note_loss(self, loss: Any) -> None:
        """Note the raw loss of a micro-batch."""
        # transformers reads this value next, so reading it here adds no device synchronization
        if hasattr(loss, "isfinite") and not _is_finite(loss):
            self._loss_is_finite = False

    def note_norm(self, norm: Any) -> None:
        """Note the norm of the gradient, which may still be computed on the device."""
        self._norm = norm

    def take(self) -> StepValues:
        """Return what the step has shown."""
        finite, norm = self._loss_is_finite, self._norm
        self._loss_is_finite, self._norm = True, None
        if finite and norm is not None:
            finite = _is_valid_norm(norm)
        accelerator = self._trainer.accelerator
        # a scaler looks for its scale; without one, DeepSpeed skips such a step too, and its samples would be
        # lost
        if not finite and accelerator.mixed_precision == "fp16" and accelerator.optimizer_step_was_skipped:
            finite = True
        table = self._table()
        values: dict[str, float] = {}
        for name, key in METRICS.items():
            new = [one for one in table.get(key, ())[self._lengths.get(name, 0) :] if math.isfinite(one)]
            if new:
                values[name] = fmean(new)
        return StepValues(finite=finite, **values)

    def _table(self) -> Mapping[str, list[float]]:
        tables = getattr(self._trainer, trainer_names.METRICS, None)
        found = tables.get("train") if isinstance(tables, Mapping) else None
        return found if isinstance(found, Mapping) else {}


@contextmanager
def read_steps(trainer: Any, reader: StepReader) -> Iterator[None]:
    """Pass the losses and the norms of the gradient to the reader for the length of the block."""
    training_step, accelerator = trainer.training_step, trainer.accelerator
    clip = accelerator.clip_grad_norm_

    @functools.wraps(training_step)
    def step(*args: Any, **kwargs: Any) -> Any:
        loss = training_step(*args, **kwargs)
        reader.note_loss(loss)
        return loss

    @functools.wraps(clip)
    def clip_and_note(*args: Any, **kwargs: Any) -> Any:
        norm = clip(*args, **kwargs)
        reader.note_norm(norm)
        return norm

    with (
        override_attributes(trainer, training_step=step),
        override_attributes(accelerator, clip_grad_norm_=clip_and_note),
    ):
        yield


def _is_finite(value: Any) -> bool:
    if value.numel() == 1:
        return math.isfinite(value.item())  # on a CPU torch's three operations take 18 µs, this 0.2 µs
    return bool(value.isfinite().all())


def _is_valid_norm(norm: Any) -> bool:
    """Whether a norm is finite. DeepSpeed returns -1 for one that is not."""
    if not hasattr(norm, "isfinite"):
        return math.isfinite(norm) and norm >= 0
    local = tensor_files.local_part(norm)
    return bool(_is_finite(local)) and bool((local >= 0).all())


_SEEDS = 2**32


def seed_of(run_id: str, order: FreshSeeds, group: int) -> int:
    """Return the seed of a group of ranks: reproducible, and different for each run, order and group.

    Args:
        group: the rank, or what ranks have in common that must sample alike.
    """
    return zlib.crc32(f"{run_id} {order.number} {group}".encode()) % _SEEDS


def reseed(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch, on all devices."""
    random.seed(seed)
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        numpy.random.seed(seed)
    if torch is not None:
        torch.manual_seed(seed)


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
        self._history = ObservationHistory()
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
            self._session.journal.write(Reseeded(rank=0, step=step, order=newest.number))
            self._session.notify(
                f"step {step} and the following use fresh sampling seeds; the run is no longer equal to an"
                " undisturbed one"
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
                LearningGuardTripped(
                    rank=0,
                    step=alarm.step,
                    guard=str(alarm.guard),
                    response=str(self._rules.response(alarm.guard)),
                    onset=alarm.onset,
                    sentence=alarm.sentence,
                )
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
            self._history = ObservationHistory.from_json(state.get(HISTORY, {}))
            self._obeyed = {int(number) for number in state.get(OBEYED, ())}
        except (TypeError, ValueError) as error:
            self._session.warn_in_journal(f"the learning guards start without their history: {error}")
