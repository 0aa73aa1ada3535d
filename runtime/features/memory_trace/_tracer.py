"""The memory trace of one rank: looks at what is alive after each step, and reports what is kept.

Made by `rank.py`. Most steps cost one census. Only if tensors of several steps stay alive, where tensors are
made is recorded in the next steps, and then their holder is looked for. Everything is held weakly.
`_finding.py` has the rule; changes nothing.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from grpo_run.runtime.features.memory_trace import _finding as finding
from grpo_run.runtime.features.memory_trace._census import (
    Census,
    Ledger,
    StorageEntry,
    take_census,
    tensor_types,
)
from grpo_run.runtime.features.memory_trace._finding import HolderSizes
from grpo_run.runtime.features.memory_trace._holders import find_holder
from grpo_run.runtime.features.memory_trace._sites import SiteRecorder
from grpo_run.runtime.features.memory_trace.events import NOTICE, MemoryFound

SHARE = 0.7
"""What the trace may take in addition to the time of the steps, as CPU time of its thread, which does not
depend on what else the machine does; if it takes more, steps are left out."""
TRACED_STEPS = 3
"""Steps in which sites are recorded before a holder is looked for."""
TRIED = 18
"""Storages whose holder is looked for until one is found: some may have none."""
MOST_FINDINGS = 20
"""Alarms of one rank that are reported, and as many notices."""


class MemoryTrace:
    """The trace of one rank. Used by the thread that trains.

    Args:
        report: called with each finding, once.
        warn: called with one line if the trace itself fails, and ends.
        free_bytes: returns how much memory of a type of device this rank may still take; 0 if that is not
            known.
    """

    def __init__(
        self,
        report: Callable[[MemoryFound], None],
        warn: Callable[[str], None],
        free_bytes: Callable[[str], int] = lambda device: 0,
    ) -> None:
        self._report, self._warn, self._free_bytes = report, warn, free_bytes
        self._directory = os.getcwd()
        self._ledger = Ledger()
        self._sizes: dict[object, HolderSizes] = defaultdict(HolderSizes)
        self._kinds: frozenset[type] = frozenset()
        self._step = self._steps_left = 0
        self._recorder: SiteRecorder | None = None
        self._recorded: dict[int, int] = defaultdict(int)
        """By the steps that a search needs, in how many steps sites were recorded since it last was made."""
        self._emitted: dict[bool, set[str]] = {True: set(), False: set()}
        """Keys of the findings that were reported, of notices and of alarms."""
        self._ended_at = time.perf_counter()
        self._debt = 0.0
        """CPU seconds of the last census, and of a search that has found nothing, that their share of the
        time has not covered yet.
        """
        self._active = True

    def end(self) -> None:
        """Trace no longer: the trace has failed, or this process was forked from the rank."""
        self._active = False
        self._end_recorder()

    def observe(self, look: Callable[..., object], *arguments: Any) -> None:
        """Call a function that only looks. If it raises, the trace ends with a warning."""
        if not self._active:
            return
        try:
            look(*arguments)
        except Exception as error:  # noqa: BLE001 - the script's run is worth more than its trace
            place = traceback.extract_tb(error.__traceback__)[-1]
            self._warn(
                f"--memory-trace has failed and ends; the run goes on: {type(error).__name__}: {error}"
                f" ({os.path.basename(place.filename)}:{place.lineno})"
            )
            self.end()

    def step_ended(self, step: int, last_step: int = 0) -> None:
        """Look at the memory after a step.

        Args:
            step: its number.
            last_step: of the training; 0 if not known.
        """
        self._step, self._steps_left = step, max(0, last_step - step)
        if not self._active:
            self._end_recorder()  # that was not possible in the operator in which the trace has failed
        elif "torch" in sys.modules:
            self.observe(self._look_at_step)

    def _end_recorder(self) -> bool:
        """End to record sites. Returns False inside a mode of the script's own, where that must wait."""
        if self._recorder is not None and not self._recorder.end():
            return False
        self._recorder = None
        return True

    def _look_at_step(self) -> None:
        self._debt -= SHARE * (time.perf_counter() - self._ended_at)
        began = time.thread_time()
        recorder = self._recorder
        if self._debt <= 0 and self._end_recorder():
            self._kinds = tensor_types(sys.modules["torch"])
            census = take_census(self._kinds)
            self._ledger.observe(self._step, census, recorder.site_of if recorder else lambda key: None)
            self._debt = time.thread_time() - began
            saved = {key for _, kept in census.graphs.values() for key in kept}
            of_graphs = self._search(saved, finding.ENOUGH, census)
            if self._search(None, finding.LOOKED_AT, census) or of_graphs:
                recorder = SiteRecorder(self.observe)
                self._recorder = recorder if recorder.begin() else None
        self._ended_at = time.perf_counter()

    def _search(self, keys: set[int] | None, enough: int, census: Census) -> bool:
        """Look for what holds storages, once those of enough steps are alive and it is known where they are
        from.

        Args:
            keys: of the storages; all by default.

        Returns:
            Whether the next step is to record where tensors are made.
        """
        entries = [one for one in self._ledger.later(keys) if not one.settled]
        births = len({one.born for one in entries})
        record = births >= finding.SUSPICIOUS and self._recorded[enough] < TRACED_STEPS
        self._recorded[enough] += record
        if births < enough or (record and all(one.site is None for one in entries)):
            return record
        self._recorded[enough] = 0
        # of each step the largest of each kind; the oldest first, as what was only passing through is gone
        kinds = {(one.born, one.dtype, len(one.shape)): one for one in sorted(entries, key=_bytes)}
        tried = sorted(kinds.values(), key=lambda one: (one.born, -one.bytes))[:TRIED]
        began = time.thread_time()
        if not any(self._judge(one, enough, census) for one in tried):
            self._debt += time.thread_time() - began
            for one in entries:
                one.settled = True
        return False

    def _judge(self, one: StorageEntry, enough: int, census: Census) -> bool:
        """Judge what holds a storage and those of enough steps. Returns whether something does."""

        def holds_enough(tensors: list[Any]) -> bool:
            return len({other.born for other in self._ledger.later(census.held(tensors))}) >= enough

        holder = find_holder(census.above(one.key), holds_enough, self._kinds, census.identities())
        if holder is None:
            return False
        held = self._ledger.later(census.held(holder.tensors))
        for other in held:
            other.settled = True
        gain = self._sizes[holder.same].look(self._step, [(one.born, one.bytes) for one in held])
        direct = census.held(holder.tensors, saved=False)
        saved = [one for one in held if one.key not in direct]
        if holder.limited:
            return True
        if 2 * sum(map(_bytes, saved)) > sum(map(_bytes, held)):
            self._emit(finding.of_holder(holder, saved, "graph", {}, self._directory))
        elif gain is not None and len({one.born for one in held}) >= finding.GROWING:
            free = self._free_bytes(max(held, key=_bytes).device)
            details = gain.outgrows(steps_left=self._steps_left, free_bytes=free)
            kind = "growth" if details else NOTICE
            self._emit(finding.of_holder(holder, held, kind, details, self._directory))
        return True

    def _emit(self, found: MemoryFound) -> None:
        """Report a finding, unless one of the same kind with the same holder and line was reported."""
        emitted = self._emitted[found.kind == NOTICE]
        if found.key not in emitted and len(emitted) < MOST_FINDINGS:
            emitted.add(found.key)
            self._report(found)


def _bytes(one: StorageEntry) -> int:
    return one.bytes
