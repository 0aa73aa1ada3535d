"""Learning guards in a rank: read each step, ask the guards, and end the attempt if they say so.

Raw loss, gradient norm and logged metrics are read at their source, because transformers logs a NaN loss as
0 and a metric only every `logging_steps` steps. A loop shows what the script logs. A trip whose response ends
the attempt is raised as an alarm of the call: all ranks leave before the next optimizer step and before any
save.

When an exact repetition has ended in the same trip, the supervisor orders new seeds (`FreshSeeds`), and the
random generators are reseeded at that step; the order of the data stays.
"""

from __future__ import annotations

import math
import random
import sys
import zlib
from collections.abc import Mapping
from statistics import fmean
from typing import Any

from grpo_run.runtime.features.learning_guards._judge import NOT_FINITE, ObservationHistory, Trip, judge
from grpo_run.runtime.features.learning_guards.events import LearningGuardTripped, Reseeded
from grpo_run.runtime.features.learning_guards.settings import (
    FreshSeeds,
    LearningGuard,
    LearningGuardSettings,
    RankGuards,
)
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import async_grpo_names, trainer_names
from grpo_run.watchdog.causes import Cause
from grpo_run.watchdog.json_values import to_json
from grpo_run.watchdog.observation import Alarm
from grpo_run.watchdog.rank_metrics import LOGGED

_JUDGED = {
    "reward": "reward",
    "zero_variance": "zero_variance_groups",
    "kl": "kl",
    "entropy": "entropy",
    "capped": "truncated_completions",
    "mismatch": "sampling_logp_difference",
}
"""Names of observations, and their rows in `watchdog/rank_metrics.py`."""
METRICS = {
    name: metric.logged_as[0] for name, field in _JUDGED.items() for metric in LOGGED if metric.field == field
} | {"tools": "tools/failure_frequency"}
"""Names of observations, and those under which TRL's GRPO and RLOO collect them. All are means over all
ranks.
"""


class LoggedSteps:
    """What the script logs of the steps of a loop."""

    def __init__(self, session: Session, points: CallPoints) -> None:
        self._session = session
        self._points = points
        self._finite = True
        self._reward: float | None = None

    def note(self, metrics: Mapping[str, float]) -> None:
        """Note what is logged of the step in progress."""
        self._finite &= math.isfinite(metrics.get("loss", 0.0))
        self._reward = metrics.get("reward", self._reward)

    def begin_step(self) -> None:
        """Do nothing: what is logged counts for the step in progress."""

    def take(self) -> dict[str, float]:
        """Return what the step has shown."""
        finite, reward = self._finite, self._reward
        self._finite, self._reward = True, None
        values: dict[str, float] = {}
        # otherwise the weights have not changed: a gradient scaler skips a step that is not finite
        if not finite and self._points.optimized:
            values[NOT_FINITE] = 1.0
        # ranks log rewards of their own, and one rank must judge for all
        if reward is not None and self._session.is_main:
            values["reward"] = reward
        return values


class TrainerSteps:
    """What the step of a trainer that is in progress has shown so far."""

    def __init__(self, trainer: Any, points: CallPoints) -> None:
        self._trainer, self._points = trainer, points
        self._loss_is_finite = True
        self._lengths: dict[str, int] = {}
        self.requests = async_grpo_names.Requests(trainer)

    def begin_step(self) -> None:
        """Note what has been collected for the next log line before this step."""
        table = self._table()
        self._lengths = {name: len(table.get(key, ())) for name, key in METRICS.items()}

    def note_loss(self, loss: Any) -> None:
        """Note the raw loss of a micro-batch."""
        # transformers reads this value next, so reading it here adds no device synchronization
        if hasattr(loss, "isfinite") and not _is_finite(loss):
            self._loss_is_finite = False

    def take(self) -> dict[str, float]:
        """Return what the step has shown."""
        finite, norm = self._loss_is_finite, self._points.gradient_norm()
        self._loss_is_finite = True
        if norm is not None:  # DeepSpeed returns -1 for one that is not finite
            finite &= 0 <= norm < math.inf
        accelerator = self._trainer.accelerator
        # a scaler looks for its scale; without one, DeepSpeed skips such a step too, and its samples would be
        # lost
        if not finite and accelerator.mixed_precision == "fp16" and accelerator.optimizer_step_was_skipped:
            finite = True
        table = self._table()
        values = {} if finite else {NOT_FINITE: 1.0}
        for name, key in METRICS.items():
            new = [one for one in table.get(key, ())[self._lengths.get(name, 0) :] if math.isfinite(one)]
            if new:
                values[name] = fmean(new)
        if (share := self.requests.aborted_share()) is not None:
            values["aborted"] = share
        return values

    def _table(self) -> Mapping[str, list[float]]:
        tables = getattr(self._trainer, trainer_names.METRICS, None)
        found = tables.get("train") if isinstance(tables, Mapping) else None
        return found if isinstance(found, Mapping) else {}


def _is_finite(value: Any) -> bool:
    if value.numel() == 1:
        return math.isfinite(value.item())  # on a CPU torch's three operations take 18 µs, this 0.2 µs
    return bool(value.isfinite().all())


def seed_of(run_id: str, order: FreshSeeds, group: int) -> int:
    """Return the seed of a group of ranks: reproducible, and different for each run, order and group.

    Args:
        group: the rank, or what ranks have in common that must sample alike.
    """
    return zlib.crc32(f"{run_id} {order.number} {group}".encode())


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
ADVICE = {
    LearningGuard.nonfinite: (
        "Check for divisions by 0 and logarithms of 0 in the loss, for a learning rate that is too high, and"
        " for rewards that are not finite."
    ),
    LearningGuard.zero_variance: (
        "Check the reward functions, and whether the prompts are too easy or too hard."
    ),
    LearningGuard.kl: "Lower the learning rate, or raise beta.",
    LearningGuard.entropy: "Check the learning rate, the temperature and the rewards.",
    LearningGuard.reward: (
        "Look at completions from before and after the onset; lower the learning rate if their form has"
        " broken."
    ),
    LearningGuard.capped: (
        "Look at completions: a model that does not stop any more repeats itself, or is rewarded for length."
    ),
    LearningGuard.mismatch: (
        "Look whether vLLM still gets the weights, and with which precision and sampling settings it"
        " generates."
    ),
    LearningGuard.aborted: (
        "Look whether the server still answers in time: at its log, its load, and what lies between."
    ),
    LearningGuard.tools: (
        "Look whether what the tools use is there, and whether the model still calls them as they are"
        " declared."
    ),
}


def alarm_of(trip: Trip) -> Alarm:
    """Return what the supervisor is told of a trip that ends the attempt."""
    return Alarm(
        cause=str(Cause.nonfinite if trip.guard is LearningGuard.nonfinite else Cause.learning_collapse),
        step=trip.step,
        sentence=trip.sentence,
        signature=f"guard:{trip.guard}:step{trip.step}",
        advice=(
            ADVICE[trip.guard],
            "To continue from before the onset: the same command with --fresh --resume-from CHECKPOINT (below"
            f" {trip.onset})" + " and, if it has one, another --run-dir.",
        ),
        details=to_json(trip),
    )


class LearningGuards:
    """The guards of one call."""

    def __init__(self, session: Session, points: CallPoints, steps: LoggedSteps | TrainerSteps) -> None:
        self._session = session
        self._points = points
        self._steps = steps
        self._rules = session.config.of(LearningGuardSettings).rules
        self._history = ObservationHistory()
        self._obeyed: set[int] = set()
        told = RankGuards.model_validate(session.settings.features.get(LearningGuardSettings.NAME) or {})
        self._orders = [one for one in told.fresh_seeds if one.train_call == points.train_call]

    def begin_step(self, step: int) -> None:
        """Use fresh seeds from this step on, if the supervisor has ordered it. Its batches have been read.

        Args:
            step: that begins, counted from 1.
        """
        self._steps.begin_step()
        due = [one for one in self._orders if step >= one.step and one.number not in self._obeyed]
        if not due:
            return
        self._obeyed.update(one.number for one in due)
        newest = max(due, key=lambda one: one.number)
        session, facts = self._session, self._points.facts
        group = session.rank // (facts.ranks_per_engine if facts is not None else 1)
        reseed(seed_of(session.config.run_id, newest, group))
        if session.is_main:
            session.journal.write(Reseeded(rank=0, step=step, order=newest.number))
            session.notify(
                f"step {step} and the following use fresh sampling seeds; the run is no longer equal to an"
                " undisturbed one"
            )

    def end_step(self, step: int) -> None:
        """Judge a finished step: warn of it, or set the alarm of the call."""
        self._history.add(step, self._steps.take())
        for trip in judge(self._history, step, self._rules):
            if trip.response.ends_attempt:
                self._points.alarm = self._points.alarm or alarm_of(trip)
            else:
                self._warn(trip)

    def _warn(self, trip: Trip) -> None:
        if self._session.is_main:
            self._session.journal.write(LearningGuardTripped(rank=0, **to_json(trip)))
            self._session.warn(trip.sentence)

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds, as plain JSON values."""
        return {HISTORY: self._history.as_json(), OBEYED: sorted(self._obeyed)}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned; nothing from a checkpoint without it, or of another format."""
        try:
            self._history = ObservationHistory.from_json(state.get(HISTORY, {}))
            self._obeyed = {int(number) for number in state.get(OBEYED, ())}
        except (TypeError, ValueError) as error:
            self._session.warn_in_journal(f"the learning guards start without their history: {error}")


class LearningGuardsPart(RankFeature):
    """Learning guards at the points of a rank."""

    name = LearningGuardSettings.NAME

    def call(self, session: Session, points: CallPoints) -> None:
        """Judge the steps of a call or loop."""
        steps: LoggedSteps | TrainerSteps
        if points.trainer is not None:
            steps = TrainerSteps(points.trainer, points)
            points.hooks.enter_context(steps.requests.read())
            points.losses.append(steps.note_loss)
        else:
            steps = logged = LoggedSteps(session, points)
            points.logged.append(logged.note)
        guards = LearningGuards(session, points, steps)
        points.step_begins.append(guards.begin_step)
        points.step_ends.append(guards.end_step)
        points.states.append(guards)


PART = LearningGuardsPart()
