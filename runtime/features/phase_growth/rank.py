"""Phase growth in a rank: measures what the phases of a step cost in rank 0 of a trainer's call.

The slot's writer announces each change of phase, so the time of a phase is without the phases inside it.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from grpo_run.runtime.features.phase_growth._watch import BLOCK_STEPS, CONTROL_PHASES, GrowthWatch
from grpo_run.runtime.features.phase_growth.events import GrowthFound
from grpo_run.runtime.history.events import PhaseCosts
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session

SHOWN_STEPS = 100
"""Steps whose mean costs are journaled."""


class PhaseMeter:
    """What phases cost in one `train()` call, on rank 0."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._watch = GrowthWatch()
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._shown: defaultdict[str, float] = defaultdict(float)
        self._tokens = self._context = 0
        self._taken = -1  # the first step includes compilation and connections

    def changed(self) -> None:
        """Another phase runs from now on."""
        now, name = time.perf_counter(), self._session.slot.running_name
        if name in CONTROL_PHASES or (name is not None and "." in name):
            self._seconds[name] += now - self._since
        self._since = now

    def record_pass(self, arguments: Mapping[str, Any]) -> None:
        """Count the tokens of a forward pass, and these times their length."""
        if (tokens := arguments.get("input_ids")) is not None:
            self._tokens += tokens.numel()
            self._context += tokens.numel() * tokens.shape[-1]

    def step_ends(self, step: int) -> None:
        """Add a block of steps at its end, and say what has grown."""
        self.changed()
        self._taken += 1
        if self._taken % BLOCK_STEPS:
            return
        seconds, work = self._seconds, (self._tokens, self._context)
        self._seconds, self._tokens, self._context = defaultdict(float), 0, 0
        if not self._taken:
            return
        place: dict[str, Any] = {"rank": 0, "step": step, "train_call": self._session.slot.train_call}
        for name, spent in seconds.items():
            self._shown[name] += spent
        if self._taken % SHOWN_STEPS == 0:
            shown = {name: round(total / SHOWN_STEPS, 6) for name, total in self._shown.items()}
            self._session.journal.write(PhaseCosts(seconds=shown, **place))
            self._shown.clear()
        growth = self._watch.add({name: total / BLOCK_STEPS for name, total in seconds.items()}, work)
        if growth is not None:
            factor = growth.now / growth.before
            sentence = (
                f"steps get slower: {'callback' if '.' in growth.phase else 'phase'} {growth.phase} takes"
                f" {factor:.1f} times as long for the same work as at the beginning, {growth.now:.2g} s in"
                f" place of {growth.before:.2g} s, and still rises"
            )
            found = GrowthFound(phase=growth.phase, factor=round(factor, 3), sentence=sentence, **place)
            self._session.journal.write(found)
            self._session.warn(sentence)


class PhaseGrowthPart(RankFeature):
    """Phase growth at the points of a rank."""

    def call(self, session: Session, points: CallPoints) -> None:
        """Measure the steps of a trainer, on rank 0."""
        if points.trainer is None or not session.is_main:
            return
        meter = PhaseMeter(session)
        session.on_phase_change.append(meter.changed)
        points.hooks.callback(session.on_phase_change.remove, meter.changed)
        points.forward_passes.append(meter.record_pass)
        points.step_ends.append(meter.step_ends)


PART = PhaseGrowthPart()
