"""The memory trace of one rank: looks at what is alive after each step, and reports what is kept.

Made by the session under `--memory-trace`, before the script runs, with `trace_memory`.
`runtime/rank/step/events.py` calls `step_ended` after the steps of a Trainer or loop; in a script with
neither, each optimizer step counts as one. Most steps cost one census. Only if tensors of several steps stay
alive, where such tensors are made is recorded in the next steps, and then their holder is looked for.
Everything is held weakly. Decides with `_growth.py` and `_padding.py`; changes nothing.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import wrapt

from grpo_run.runtime.history.memory_findings import NOTICE
from grpo_run.runtime.rank.memory_trace import _finding as finding
from grpo_run.runtime.rank.memory_trace import _growth as growth
from grpo_run.runtime.rank.memory_trace._census import (
    Census,
    Group,
    Ledger,
    Site,
    StorageEntry,
    storage_of,
    take_census,
    tensor_types,
)
from grpo_run.runtime.rank.memory_trace._cycles import (
    CollectedTensors,
    Cycle,
    collections_postponed,
    find_cycle,
)
from grpo_run.runtime.rank.memory_trace._finding import TraceFinding
from grpo_run.runtime.rank.memory_trace._growth import Gain, HolderSizes, LongerTensors, Made
from grpo_run.runtime.rank.memory_trace._holders import Holder, find_holder
from grpo_run.runtime.rank.memory_trace._kept_exceptions import KeptExceptions
from grpo_run.runtime.rank.memory_trace._names import name_of
from grpo_run.runtime.rank.memory_trace._padding import PaddingWatch
from grpo_run.runtime.rank.memory_trace._referrers import running_locals
from grpo_run.runtime.rank.memory_trace._sites import SiteRecorder
from grpo_run.runtime.rank.memory_trace.allocator_history import AllocatorHistory

Suspicion = tuple[Group, str]
"""Tensors that may be kept, and what is suspected."""
Judge = Callable[[StorageEntry, list[StorageEntry], Census], int]
SHARE = 0.7
"""What censuses may take in addition to the time of the steps; if they take more, steps are left out."""
TRACED_STEPS = 3
"""Steps in which sites are recorded for a suspicion."""
TRIED = 18
"""Storages whose holder is looked for, until one is found: some may be of holders that do not grow."""
TRIED_OF_STEP = 6
TRIED_CYCLES = 4
"""The same for cycles: most storages are in none, and each is compared with all references."""
MOST_IN_CYCLES = 64
"""Storages of a group that are counted as held by cycles."""
HOLDERS_A_STEP = 3
"""Holders that are looked for after one step."""
MOST_FINDINGS = 20
"""Alarms of one rank that are reported, and as many notices."""
NOT_AGAIN = 2
"""After a suspicion that came to nothing, so many times more steps must have tensors before the next."""


def trace_memory(
    write: Callable[..., object],
    trains_alone: Callable[[], int | None],
    *,
    history: AllocatorHistory,
    warn: Callable[[str], None],
    free_bytes: Callable[[str], int],
) -> MemoryTrace:
    """Begin to trace the memory of this process. Imports no library: the hooks wait until the script does.

    Args:
        write: takes the fields of a `memory_finding` event.
        trains_alone: returns how many optimizer steps the script has taken with no Trainer and no loop; None
            inside one.
        history: of the CUDA allocator.
        warn: called with one line if the trace itself fails, and ends.
        free_bytes: returns how much memory of a type of device this rank may still take; 0 if that is not
            known.
    """
    directory = os.getcwd()

    def report(found: TraceFinding) -> None:
        subject, sentence = finding.subject(found, directory), finding.sentence(found, directory)
        write(key=found.key, subject=subject, sentence=sentence, **asdict(found))
        if found.kind != NOTICE:  # the only snapshot of a finding is for an alarm
            history.found()

    trace = MemoryTrace(report, history, warn, free_bytes)
    trace.begin()

    def after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
        steps = trains_alone()
        if steps is not None and not sys.modules["torch"].compiler.is_compiling():
            trace.step_ended(steps)

    wrapt.register_post_import_hook(
        lambda module: module.register_optimizer_step_post_hook(after_step), "torch.optim.optimizer"
    )
    wrapt.register_post_import_hook(
        lambda module: trace.padding.watch(module.PreTrainedModel), "transformers.modeling_utils"
    )
    return trace


class MemoryTrace:
    """The trace of one rank. Used by the thread that trains.

    Args:
        report: called with each finding, once.
        history: of the CUDA allocator; begins with the first call of a model, or at the end of the first
            step.
        warn: called with one line if the trace itself fails, and ends.
        free_bytes: returns how much memory of a type of device this rank may still take; 0 if that is not
            known.
        clock: seconds.
    """

    def __init__(
        self,
        report: Callable[[TraceFinding], None],
        history: AllocatorHistory,
        warn: Callable[[str], None],
        free_bytes: Callable[[str], int] = lambda device: 0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.history = history
        self._report, self._warn, self._free_bytes, self._clock = report, warn, free_bytes, clock
        self._ledger = Ledger()
        self._collected = CollectedTensors(self._step_of, self._site_of)
        self._exceptions = KeptExceptions()
        self._longer = LongerTensors()
        self._sizes: dict[object, HolderSizes] = defaultdict(HolderSizes)
        self.padding = PaddingWatch(lambda: self._step + 1, self._site_of, self.observe, history.begin)
        self._step = self._steps_left = self._rollouts = 0
        self._recorder: SiteRecorder | None = None
        self._wanted: set[Suspicion] = set()
        self._traced: dict[Suspicion, int] = defaultdict(int)
        self._needed: dict[Suspicion, int] = {}
        self._emitted: dict[bool, set[str]] = {True: set(), False: set()}
        """Keys of the findings that were reported, of notices and of alarms."""
        self._ended_at: float | None = None
        self._debt = 0.0
        """Seconds of the last census that its share of the time has not covered yet."""
        self._active = True

    def begin(self) -> None:
        """Watch collections from now on."""
        self._collected.begin()

    def end(self) -> None:
        """Trace no longer: the trace has failed, or this process was forked from the rank."""
        self._active = False
        self.history.end()
        self._collected.end()
        self._end_recorder()

    def observe(self, look: Callable[..., object], *arguments: Any) -> None:
        """Call a function that only looks. If it raises, the trace ends with a warning."""
        if not self._active:
            return
        try:
            look(*arguments)
        except Exception as error:  # noqa: BLE001 - the script's run is worth more than its trace
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            self._warn(
                "--memory-trace has failed and ends; the run goes on:"
                f" {type(error).__name__}: {error} ({where})"
            )
            self.end()

    def step_ended(self, step: int, *, generated: bool = False, last_step: int = 0) -> None:
        """Look at the memory after a step.

        Args:
            step: its number.
            generated: the trainer has generated a rollout in it.
            last_step: of the training; 0 if not known.
        """
        self._steps_left = max(0, last_step - step)
        if not self._active:
            self._end_recorder()  # that was not possible in the operator in which the trace has failed
        elif "torch" in sys.modules:
            self.observe(self._look_at_step, step, generated)

    def _end_recorder(self) -> None:
        if self._recorder is not None and self._recorder.end():
            self._recorder = None

    def _look_at_step(self, step: int, generated: bool) -> None:
        self.history.begin()
        began = self._clock()
        self._step = step
        self._rollouts += generated
        if self._ended_at is not None:
            self._debt -= SHARE * (began - self._ended_at)
        if self._debt <= 0:
            # a census allocates enough to make Python collect, and would free a cycle while it holds the
            # tensors of it
            with collections_postponed():
                self._look(step)
        self._ended_at = self._clock()

    def _look(self, step: int) -> None:
        if self._recorder is not None and not self._recorder.end():
            return  # inside a mode of the script's own
        sites = self._recorder.sites if self._recorder is not None else {}
        began = self._clock()
        self._collected.kinds = kinds = tensor_types(sys.modules["torch"])
        census = take_census(kinds)
        self._ledger.observe(step, census, sites)
        self._debt = self._clock() - began
        self._recorder = None
        self._wanted = set()
        self._look_at_exceptions(census)
        self._look_at_collected()
        self._look_at_growth(census)
        self._look_at_longer_tensors(census)
        self._look_at_padding()
        del census
        for suspicion in self._wanted:
            self._traced[suspicion] += 1
        if self._wanted:
            recorder = SiteRecorder({group for group, _ in self._wanted}, self.observe)
            if recorder.begin():
                self._recorder = recorder

    def _want_sites(self, of: Suspicion) -> bool:
        """Record sites in the next step, unless that was done often enough. Returns whether it will be."""
        if self._traced[of] >= TRACED_STEPS:
            return False
        self._wanted.add(of)
        return True

    def _step_of(self, key: int) -> int:
        """Return the step in which a storage was made; the one in progress if it is new."""
        entries = self._ledger.of([key])
        return entries[0].born if entries else self._step + 1

    def _site_of(self, key: int) -> Site | None:
        """Return where a storage was made, if that was recorded in its step or is recorded in this one."""
        recorded = self._recorder.sites.get(key) if self._recorder is not None else None
        return recorded or next((one.site for one in self._ledger.of([key])), None)

    def _look_at_growth(self, census: Census) -> None:
        """Look for mistakes once tensors of a few steps stay alive, and for holders that grow after more."""
        saved = {key for _, kept in census.graphs for key in kept}
        for group, entries in self._ledger.groups():
            by_graphs = [one for one in entries if one.key in saved]
            self._search((group, "graph"), by_graphs, growth.ENOUGH, self._judge_graph, census)
            self._search((group, "cycle"), entries, growth.ENOUGH, self._judge_cycle, census)
            self._search((group, "growth"), entries, growth.LOOKED_AT, self._judge_growth, census)

    def _search(
        self, of: Suspicion, entries: list[StorageEntry], enough: int, judge: Judge, census: Census
    ) -> None:
        """Judge what holds storages, once those of enough steps are alive and it is known where they are
        from.

        Args:
            judge: looks at one storage, and returns of how many steps its holder has some; 0 if none was
                found.
        """
        needed = self._needed.get(of)
        for _ in range(HOLDERS_A_STEP):
            entries = [one for one in entries if not one.settled]
            births = self._steady_births(one.born for one in entries)
            if len(births) < (needed or growth.SUSPICIOUS):
                return
            waiting = self._want_sites(of) and all(one.site is None for one in entries)
            if len(births) < (needed or enough) or waiting:
                return
            tried = self._oldest(entries, births, census)[: TRIED_CYCLES if of[1] == "cycle" else TRIED]
            held = next((found for one in tried if (found := judge(one, entries, census))), 0)
            more = growth.MORE * held if held else NOT_AGAIN * len(births)
            self._needed[of] = max(growth.ENOUGH, int(more))
            self._traced[of] = 0
            if not held:
                return

    def _steady_births(self, births: Iterable[int]) -> list[int]:
        return growth.steady_births(births, first=self._ledger.first, now=self._step)

    def _oldest(self, entries: list[StorageEntry], births: list[int], census: Census) -> list[StorageEntry]:
        """Return the oldest after the first steps: what was only passing through has been freed since."""
        tried: list[StorageEntry] = []
        starts: set[int] = set()
        for one in sorted(entries, key=lambda one: one.born):
            if one.born < births[0]:
                continue
            # no list of them may stay: it would be found among their referrers
            start = next(map(id, self._tensors_of(one, census)), None)
            alike = sum(other.born == one.born for other in tried)
            if start is not None and start not in starts and alike < TRIED_OF_STEP and len(tried) < TRIED:
                starts.add(start)
                tried.append(one)
        return tried

    def _judge_graph(self, one: StorageEntry, entries: list[StorageEntry], census: Census) -> int:
        """Report the graph that has saved a storage and those of enough other steps."""
        found = self._holder_of(one, growth.ENOUGH, census)
        if found is None:
            return 0
        holder, held = found
        direct = {storage._cdata for tensor in holder.tensors if (storage := storage_of(tensor)) is not None}
        saved = [one for one in held if one.key not in direct]
        if 2 * sum(one.bytes for one in saved) <= sum(one.bytes for one in held):
            return 0  # most of it is kept by itself
        if not holder.limited:
            self._emit(finding.of_holder(holder, saved, "graph", {}))
        return _settle(held)

    def _judge_growth(self, one: StorageEntry, entries: list[StorageEntry], census: Census) -> int:
        """Report the holder of a storage and those of many other steps, if it still grows."""
        found = self._holder_of(one, growth.LOOKED_AT, census)
        if found is None:
            return 0
        holder, held = found
        gain = self._sizes[holder.same].look(self._step, [(one.born, one.bytes) for one in held])
        steps = len({one.born for one in held})
        if gain is not None and steps >= growth.GROWING and not holder.limited:
            device = max(held, key=lambda one: one.bytes).device
            kind, details = self._kind_of(gain, device)
            self._emit(finding.of_holder(holder, held, kind, details))
        return _settle(held)

    def _kind_of(self, gain: Gain, device: str) -> tuple[str, dict[str, Any]]:
        """Return the kind of growth, with its figures if it is an alarm."""
        left, free = self._steps_left, self._free_bytes(device)
        if not gain.outgrows(steps_left=left, free_bytes=free):
            return NOTICE, {}
        rate = gain.gained_bytes // gain.steps
        return "growth", {"bytes_a_step": rate, "steps_left": left, "free_bytes": free}

    def _holder_of(
        self, one: StorageEntry, enough: int, census: Census
    ) -> tuple[Holder, list[StorageEntry]] | None:
        """Return the nearest object that holds a storage and those of enough steps, and all it holds."""
        graphs = {id(root): kept for root, kept in census.graphs}

        def entries_of(tensors: Iterable[Any]) -> list[StorageEntry]:
            keys: set[int] = set()
            for tensor in tensors:
                keys.update(graphs.get(id(tensor), ()))
                storage = storage_of(tensor)
                if storage is not None:
                    keys.add(storage._cdata)
            return self._ledger.of(keys)

        def holds_enough(tensors: list[Any]) -> bool:
            births = {other.born for other in entries_of(tensors) if other.group == one.group}
            return len(self._steady_births(births)) >= enough

        start = self._tensors_of(one, census)
        ours = {*census.identities(), id(graphs)}
        holder = find_holder(start, holds_enough, self._collected.kinds, ours)
        return (holder, entries_of(holder.tensors)) if holder is not None else None

    def _tensors_of(self, entry: StorageEntry, census: Census) -> list[Any]:
        """Return the tensors through which a storage is held: its own, and that whose graph has saved it."""
        roots = [root for root, kept in census.graphs if entry.key in kept]
        return roots + [
            one for one in census.tensors.get(entry.key, ()) if all(one is not root for root in roots)
        ]

    def _judge_cycle(self, one: StorageEntry, entries: list[StorageEntry], census: Census) -> int:
        """Report the cycle that alone holds a storage."""
        cycle = self._cycle_of(one, census)
        if cycle is None:
            return 0
        alike = [other for other in entries[:MOST_IN_CYCLES] if self._cycle_of(other, census) == cycle]
        self._emit(finding.of_cycle(cycle, alike))
        return _settle(alike)

    def _cycle_of(self, entry: StorageEntry, census: Census) -> Cycle | None:
        start = self._tensors_of(entry, census)
        return find_cycle(start[0], {*census.identities(), id(start)}) if start else None

    def _look_at_longer_tensors(self, census: Census) -> None:
        if self._step < self._ledger.first + growth.FIRST_STEPS:
            return
        made = {one.key: one for one in self._ledger.made_in(self._step)}
        for longer in self._longer.step_ended(
            self._step, [Made(one.key, one.group, one.shape, one.bytes) for one in made.values()]
        ):
            entry = made[longer.made.key]
            if longer.steps >= growth.GROWING - TRACED_STEPS:
                self._want_sites((entry.group, "longer"))
            if longer.steps < growth.GROWING or longer.steps % growth.ENOUGH:
                continue
            kind, details = self._kind_of(longer.gain(self._step), entry.device)
            for tensor in census.tensors.get(entry.key, ())[:1]:
                name = name_of(tensor, running_locals(), census.identities())
                if name is not None:
                    self._emit(finding.of_longer(longer, entry, name, kind, details))

    def _look_at_collected(self) -> None:
        for group, collected in list(self._collected.groups.items()):
            if len(collected.steps) < growth.SUSPICIOUS:
                continue
            waiting = self._want_sites((group, "collected")) and collected.site is None
            for cycle in collected.proved if not waiting else ():
                self._emit(finding.of_collected(cycle, group, collected))

    def _look_at_exceptions(self, census: Census) -> None:
        found = self._exceptions.step_ended(self._step, census, self._ledger, self._collected.kinds)
        for one in self._exceptions.suspicious:
            one.settled = True
            self._want_sites((one.group, "traceback"))
        for kept in found:
            self._emit(finding.of_exception(kept))

    def _look_at_padding(self) -> None:
        found = self.padding.found(self._rollouts)
        if found is not None and not (found.made is None and self._want_sites((found.group, "padding"))):
            self._emit(finding.of_padding(found))

    def _emit(self, found: TraceFinding) -> None:
        """Report a finding, unless one of the same kind with the same holder and line was reported."""
        emitted = self._emitted[found.kind == NOTICE]
        if found.key not in emitted and len(emitted) < MOST_FINDINGS:
            emitted.add(found.key)
            self._report(found)


def _settle(entries: list[StorageEntry]) -> int:
    """Note that it is known what holds some storages. Returns of how many steps they are."""
    for one in entries:
        one.settled = True
    return len({one.born for one in entries})
