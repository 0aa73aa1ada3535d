"""Phase growth in a rank: measures what the phases of a step cost in rank 0 of a trainer's call.

The slot's writer announces each change of phase, so the time of a phase is without the phases inside it.
After each block of steps of a view the medians go to `_watch.py`, which decides, with a few counts that are
cheap to take: hooks, threads, open files, Python's memory blocks, garbage collection, log entries.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import msgspec

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.features.phase_growth._watch import (
    CONTROL_PHASES,
    LATER,
    SOON,
    Block,
    GrowthWatch,
    medians,
)
from grpo_run.runtime.history.events import PhaseCosts
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import torch_names


class StepCosts:
    """What this rank has spent since the last look.

    Args:
        slot: its writer tells which phase runs.
        functions: the seconds that each reward function has taken so far.
    """

    def __init__(self, slot: SlotWriter, functions: Mapping[str, float]) -> None:
        self._slot = slot
        self._functions = functions
        self._functions_before = dict(functions)
        self._since = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By phase, and by callback: without the phases inside it."""
        self.passes = self.tokens = self.context = 0
        """Forward passes of the model, the tokens that they were given, and these times their length."""

    def changed(self) -> None:
        """Another phase runs from now on."""
        now = time.perf_counter()
        if (running := self._slot.running_name) is not None:
            self.seconds[running] += now - self._since
        self._since = now

    def record_pass(self, arguments: Mapping[str, Any]) -> None:
        """Count a forward pass, by the arguments that the model is given."""
        self.passes += 1
        if (tokens := arguments.get("input_ids")) is not None:
            count = tokens.numel()
            self.tokens += count
            self.context += count * tokens.shape[-1]

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what phases and reward functions have taken since the last call."""
        self.changed()
        before, self._functions_before = self._functions_before, dict(self._functions)
        functions = {
            name: now - since
            for name, now in self._functions_before.items()
            if now > (since := before.get(name, 0.0))
        }
        seconds, self.seconds = self.seconds, defaultdict(float)
        return seconds, functions


class _Step(NamedTuple):
    """What phases and reward functions have taken in a step, and what was done by its end."""

    seconds: Mapping[str, float]
    functions: Mapping[str, float]
    work: tuple[int, ...]
    collection_seconds: float
    ended_at: float


class GrowthMeter:
    """Blocks of steps of one `train()` call, on rank 0.

    Args:
        trainer: whose model and log are counted.
        costs: of the rank.
    """

    def __init__(self, trainer: Any, session: Session, costs: StepCosts) -> None:
        self._trainer = trainer
        self._session = session
        self._slot = session.slot
        self._costs = costs
        model = trainer.model
        # once, because it takes longer than counting; replaced by adapters before the call begins
        self._hooked = [*model.named_modules(), *model.named_parameters()]
        self._watches: list[GrowthWatch] = []
        self._steps: deque[_Step] = deque(maxlen=LATER.block_steps + 1)
        self._taken = 0
        self._collection_seconds = self._collection_began = 0.0

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Within the block, garbage collection is measured."""

        def collects(phase: str, info: Any) -> None:
            if phase == "start":
                self._collection_began = time.perf_counter()
            else:
                self._collection_seconds += time.perf_counter() - self._collection_began

        gc.callbacks.append(collects)
        try:
            yield
        finally:
            gc.callbacks.remove(collects)

    def step_ends(self, step: int) -> None:
        """Add a finished step, and say what has grown at the end of a block."""
        phases, functions = self._costs.take()
        seconds = {name: one for name, one in phases.items() if name in CONTROL_PHASES or "." in name}
        done = self._work_done(), self._collection_seconds, time.perf_counter()
        self._steps.append(_Step(seconds, functions, *done))
        if not self._watches:  # the first step includes compilation and connections
            found: set[str] = set()
            target = self._slot.target_steps
            self._watches = [GrowthWatch(step, target, view, found) for view in (SOON, LATER)]
            return
        self._taken += 1
        if due := [watch for watch in self._watches if self._taken % watch.view.block_steps == 0]:
            counts = self._counts()
            for watch in due:
                self._add_block(watch, step, *counts)

    def _add_block(self, watch: GrowthWatch, step: int, counts: Mapping[str, float], most_hooks: str) -> None:
        block = self._block(step, watch.view.block_steps, counts, most_hooks)
        place: dict[str, Any] = {"rank": 0, "step": step, "train_call": self._slot.train_call}
        if watch.view is LATER:
            costs = {name: round(seconds, 6) for name, seconds in block.seconds.items()}
            self._session.journal.write(PhaseCosts(seconds=costs, **place))
        growth = watch.add(block)
        if growth is not None:
            self._session.journal.write(msgspec.structs.replace(growth, **place))
            self._session.warn(growth.sentence)

    def _block(self, step: int, steps: int, counts: Mapping[str, float], most_hooks: str) -> Block:
        before, *block = list(self._steps)[-steps - 1 :]
        last = block[-1]
        passes, tokens, context, generated, rewarded = (
            now - then for now, then in zip(last.work, before.work, strict=True)
        )
        seconds = medians(one.seconds for one in block)
        collected = last.collection_seconds - before.collection_seconds
        return Block(
            last_step=step,
            seconds=seconds,
            shares={name: sum(name in one.seconds for one in block) / steps for name in seconds},
            # attention costs as many tokens as come before, of which rollouts show only the mean
            work=(passes, tokens, context, generated, generated**2 / max(1, rewarded), rewarded),
            functions=medians(one.functions for one in block),
            counts={**counts, "collection": collected / max(1e-9, last.ended_at - before.ended_at)},
            most_hooks=most_hooks,
        )

    def _work_done(self) -> tuple[int, ...]:
        costs, slot = self._costs, self._slot
        return costs.passes, costs.tokens, costs.context, slot.tokens_generated, slot.rewards_scored

    def _counts(self) -> tuple[dict[str, float], str]:
        hooks = [torch_names.count_hooks(one) for _, one in self._hooked]
        most = max(range(len(hooks)), key=hooks.__getitem__, default=0)
        counts: dict[str, float] = {
            "hooks": sum(hooks),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "objects": sys.getallocatedblocks(),
            "log": len(self._trainer.state.log_history),
        }
        return counts, self._hooked[most][0] or type(self._hooked[most][1]).__name__


class PhaseGrowthPart(RankFeature):
    """Phase growth at the points of a rank."""

    def call(self, session: Session, points: CallPoints) -> None:
        """Measure the steps of a trainer, on rank 0."""
        if points.trainer is None or not session.is_main:
            return
        costs = StepCosts(session.slot, session.reward_seconds)
        meter = GrowthMeter(points.trainer, session, costs)
        session.on_phase_change.append(costs.changed)
        points.hooks.callback(session.on_phase_change.remove, costs.changed)
        points.hooks.enter_context(meter.measuring())
        points.forward_passes.append(costs.record_pass)
        points.step_ends.append(meter.step_ends)


PART = PhaseGrowthPart()
