"""Measure what the phases of a step cost in rank 0, and say when one costs more and more for the same work.

The slot's writer announces each change of phase, so the time of a phase is without the phases inside it.
After each block of steps the medians go to `watchdog/growth.py`, which decides, with a few counts that are
cheap to take: hooks, threads, open files, Python's memory blocks, garbage collection, log entries. What it
finds is printed and journaled once. `runtime/rank/hooks/train_call.py` creates one meter for each call;
`runtime/rank/step/` calls it after each step. Never ends a run, and changes nothing.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

from grpo_run.runtime.board.slot_writer import SlotWriter
from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import GrowthFound, PhaseCosts
from grpo_run.runtime.upstream import torch_names
from grpo_run.watchdog.growth import CONTROL_PHASES, Block, GrowthWatch, PhaseGrowth

BLOCK_STEPS = 100


class StepCosts:
    """What this rank has spent since the last look.

    Args:
        slot: its writer tells which phase runs.
    """

    def __init__(self, slot: SlotWriter) -> None:
        self._slot = slot
        self._since = time.perf_counter()
        self.seconds: defaultdict[str, float] = defaultdict(float)
        """By phase, and by callback: without the phases inside it."""
        self.functions: defaultdict[str, float] = defaultdict(float)
        """By reward function."""
        self.passes = self.tokens = self.context = 0
        """Forward passes of the model, the tokens that they were given, and these times their length."""

    def changed(self) -> None:
        """Another phase runs from now on."""
        now = time.perf_counter()
        if (running := self._slot.running_name) is not None:
            self.seconds[running] += now - self._since
        self._since = now

    def record_pass(self, tokens: Any) -> None:
        """Count a forward pass.

        Args:
            tokens: the model's `input_ids`; None if it has none.
        """
        self.passes += 1
        if tokens is not None:
            count = tokens.numel()
            self.tokens += count
            self.context += count * tokens.shape[-1]

    def take(self) -> tuple[dict[str, float], dict[str, float]]:
        """Return what phases and reward functions have taken since the last call."""
        taken = self.seconds, self.functions
        self.seconds, self.functions = defaultdict(float), defaultdict(float)
        return taken


class GrowthMeter:
    """Blocks of steps of one `train()` call, on rank 0.

    Args:
        trainer: whose model and log are counted.
        slot: of the rank.
        costs: of the rank.
        journal: takes an event.
        warn: takes its sentence.
    """

    def __init__(
        self,
        trainer: Any,
        slot: SlotWriter,
        costs: StepCosts,
        *,
        journal: Callable[[Event], object],
        warn: Callable[[str], None],
    ) -> None:
        self._trainer = trainer
        self._slot = slot
        self._costs = costs
        self._journal = journal
        self._warn = warn
        model = trainer.model
        # once, because it takes longer than counting; replaced by adapters before the call begins
        self._hooked = [*model.named_modules(), *model.named_parameters()]
        self._watch: GrowthWatch | None = None
        self._phases: defaultdict[str, list[float]] = defaultdict(list)
        self._functions: defaultdict[str, list[float]] = defaultdict(list)
        self._steps = 0
        self._work: tuple[float, ...] = ()
        self._collection_seconds = self._collection_began = 0.0
        self._block_began = 0.0

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

    def step_ended(self, step: int) -> None:
        """Add a finished step, and say what has grown at the end of a block."""
        phases, functions = self._costs.take()
        if self._watch is None:  # the first step includes compilation and connections
            self._watch = GrowthWatch(step, self._slot.target_steps, BLOCK_STEPS)
            self._begin_block()
            return
        for name, seconds in phases.items():
            if name in CONTROL_PHASES or "." in name:
                self._phases[name].append(seconds)
        for name, seconds in functions.items():
            self._functions[name].append(seconds)
        self._steps += 1
        if self._steps == BLOCK_STEPS:
            block = self._block(step)
            costs = {name: round(seconds, 6) for name, seconds in block.seconds.items()}
            self._journal(PhaseCosts(rank=0, step=step, train_call=self._slot.train_call, seconds=costs))
            growth = self._watch.add(block)
            self._begin_block()
            if growth is not None:
                self._say(growth, step)

    def _begin_block(self) -> None:
        self._phases.clear()
        self._functions.clear()
        self._steps, self._collection_seconds = 0, 0.0
        self._work, self._block_began = self._work_done(), time.perf_counter()

    def _block(self, step: int) -> Block:
        passes, tokens, context, generated, rewarded = (
            now - before for now, before in zip(self._work_done(), self._work, strict=True)
        )
        counts, most_hooks = self._counts()
        return Block(
            last_step=step,
            seconds={name: median(values) for name, values in self._phases.items()},
            shares={name: len(values) / self._steps for name, values in self._phases.items()},
            # attention costs as many tokens as come before, of which rollouts show only the mean
            work=(passes, tokens, context, generated, generated**2 / max(1, rewarded), rewarded),
            functions={name: median(values) for name, values in self._functions.items()},
            counts=counts,
            most_hooks=most_hooks,
        )

    def _work_done(self) -> tuple[float, ...]:
        costs, slot = self._costs, self._slot
        return costs.passes, costs.tokens, costs.context, slot.tokens_generated, slot.rewards_scored

    def _counts(self) -> tuple[dict[str, float], str]:
        hooks = [torch_names.count_hooks(one) for _, one in self._hooked]
        most = max(range(len(hooks)), key=hooks.__getitem__, default=0)
        counts = {
            "hooks": sum(hooks),
            "threads": len(os.listdir("/proc/self/task")),
            "descriptors": len(os.listdir("/proc/self/fd")),
            "objects": sys.getallocatedblocks(),
            "collection": self._collection_seconds / (time.perf_counter() - self._block_began),
            "log": len(self._trainer.state.log_history),
        }
        return counts, self._hooked[most][0] or type(self._hooked[most][1]).__name__

    def _say(self, growth: PhaseGrowth, step: int) -> None:
        self._journal(
            GrowthFound(
                rank=0,
                step=step,
                train_call=self._slot.train_call,
                phase=growth.phase,
                factor=round(growth.factor, 3),
                since_step=growth.since_step,
                lost_seconds=growth.lost_seconds,
                grew=list(growth.grew),
                sentence=growth.sentence,
            )
        )
        self._warn(growth.sentence)
