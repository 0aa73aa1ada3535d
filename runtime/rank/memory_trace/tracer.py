"""The memory trace of one rank: looks at what is alive after each step, and reports what is kept without need.

Made by `attach.py` under `--memory-trace`. `runtime/rank/step/events.py` calls `step_ended` after the steps of a Trainer or loop; in a script
with neither, each optimizer step counts as one. Most steps cost one census. Only if tensors of several steps stay alive, where
such tensors are made is recorded in the next steps, and then their holder is looked for. Everything is held weakly. Decides with
`growing/` and `padding.py`; changes nothing.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from grpo_run.runtime.rank.memory_trace import growth, making
from grpo_run.runtime.rank.memory_trace.allocator_history import AllocatorHistory
from grpo_run.runtime.rank.memory_trace.census import Census, Group, storage_of, take_census, tensor_types
from grpo_run.runtime.rank.memory_trace.collected import CollectedTensors
from grpo_run.runtime.rank.memory_trace.containers import Containers
from grpo_run.runtime.rank.memory_trace.cycles import Cycle, find_cycle
from grpo_run.runtime.rank.memory_trace.dropped_graphs import DroppedGraphs
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding
from grpo_run.runtime.rank.memory_trace.garbage import collections_postponed
from grpo_run.runtime.rank.memory_trace.holders import Holder, find_holder
from grpo_run.runtime.rank.memory_trace.kept_exceptions import KeptExceptions
from grpo_run.runtime.rank.memory_trace.ledger import Ledger, StorageEntry
from grpo_run.runtime.rank.memory_trace.longer_tensors import GrowingTensors, Grown
from grpo_run.runtime.rank.memory_trace.names import name_of
from grpo_run.runtime.rank.memory_trace.padding import PaddingWatch
from grpo_run.runtime.rank.memory_trace.referrers import running_locals
from grpo_run.runtime.rank.memory_trace.script_files import user_files
from grpo_run.runtime.rank.memory_trace.sites import Site, SiteRecorder
from grpo_run.runtime.rank.memory_trace.sources import Variable
from grpo_run.runtime.rank.memory_trace.tensor_bounds import is_length_bounded
from grpo_run.watchdog.evidence.source import is_user_file

SHARE = 0.7
"""What censuses may take in addition to the time of the steps; if they take more, steps are left out."""
TRACED_STEPS = 3
"""Steps in which sites are recorded for a suspicion."""
TRIED = 18
"""Storages whose holder is looked for, until one is found: a group may also have storages of holders that do not grow."""
TRIED_OF_STEP = 6
MOST_IN_CYCLES = 64
"""Storages of a group that are counted as held by cycles."""
HOLDERS_A_STEP = 3
"""Holders that are looked for after one step."""
MOST_FINDINGS = 20
"""Findings of one rank that are reported."""
NOT_AGAIN = 2
"""After a suspicion that came to nothing, tensors of so many times more steps must be alive before the next."""


class MemoryTrace:
    """The trace of one rank. Used by the thread that trains.

    Args:
        report: called with each finding, once.
        history: of the CUDA allocator; begins with the first call of a model, or at the end of the first step.
        warn: called with one line if the trace itself fails, and ends.
        clock: seconds.
    """

    def __init__(
        self,
        report: Callable[[TraceFinding], None],
        history: AllocatorHistory,
        warn: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._report = report
        self._warn = warn
        self.history = history
        self._clock = clock
        self._ledger = Ledger()
        self._collected = CollectedTensors(self._step_of, self._note_cycle)
        self._cycle_sites: dict[Group, Site] = {}
        self._dropped = DroppedGraphs()
        self._containers = Containers()
        self._growing = GrowingTensors()
        self.padding = PaddingWatch(
            lambda: self._step + 1, self._site_of, self.observe, history.begin, self._dropped.called
        )
        self._step = 0
        self._rollouts = 0
        self._recorder: SiteRecorder | None = None
        self._wanted: set[Group] = set()
        self._traced: dict[Group, int] = defaultdict(int)
        self._needed: dict[Group, int] = {}
        self._exceptions = KeptExceptions()
        self._epochs: dict[Variable | None, tuple[int, list[StorageEntry]]] = {}
        self._reported: set[Any] = set()
        self._emitted: set[str] = set()
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
        """Call a function that only looks. If it raises, the trace ends with a warning, and the script goes on."""
        if not self._active:
            return
        try:
            look(*arguments)
        except Exception as error:  # noqa: BLE001 - the script's run is worth more than its trace
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{os.path.basename(place.filename)}:{place.lineno}"
            self._warn(
                f"--memory-trace has failed and ends; the run goes on: {type(error).__name__}: {error} ({where})"
            )
            self.end()

    def step_ended(self, step: int, *, generated: bool = False) -> None:
        """Look at the memory after a step.

        Args:
            step: its number.
            generated: the trainer has generated a rollout in it.
        """
        if not self._active:
            self._end_recorder()  # that was not possible in the operator in which the trace has failed
        elif "torch" in sys.modules:
            self.observe(self._look_at_step, step, generated)

    def _end_recorder(self) -> None:
        if self._recorder is not None and self._recorder.end():
            self._recorder = None

    def _look_at_step(self, step: int, generated: bool) -> None:
        self.history.begin()
        dropped = self._dropped.step_ended(step)
        if dropped is not None:
            self._emit(making.of_dropped(dropped))
        began = self._clock()
        self._step = step
        self._rollouts += generated
        if self._ended_at is not None:
            self._debt -= SHARE * (began - self._ended_at)
        if self._debt <= 0:
            # a census allocates enough to make Python collect, and would free a cycle while it holds the tensors of it
            with collections_postponed():
                self._look(step)
        self._ended_at = self._clock()

    def _look(self, step: int) -> None:
        if self._recorder is not None and not self._recorder.end():
            return  # inside a mode of the script's own
        recorded = self._recorder
        sites = recorded.sites if recorded is not None else {}
        began, torch = self._clock(), sys.modules["torch"]
        self._collected.kinds = tensor_types(torch)
        census = take_census(torch)
        self._ledger.observe(step, census, sites)
        self._debt = self._clock() - began
        self._recorder = None
        self._wanted = set()
        self._look_at_tracebacks(step, census)
        self._look_at_collected()
        self._look_at_growth(step, census)
        self._look_at_growing_tensors(step, census, recorded)
        self._look_at_padding()
        del census
        for group in self._wanted:
            self._traced[group] += 1
        self._wanted |= self._growing.wanted
        if self._wanted:
            recorder = SiteRecorder(self._wanted, self._ledger.get, self.observe)
            if recorder.begin():
                self._recorder = recorder

    def _want_sites(self, group: Group) -> bool:
        """Record sites in the next step, unless that was done often enough. Returns whether it will be."""
        if self._traced[group] >= TRACED_STEPS:
            return False
        self._wanted.add(group)
        return True

    def _step_of(self, key: int) -> int:
        """Return the step in which a storage was made; the one in progress if it is new."""
        entries = self._ledger.of([key])
        return entries[0].born if entries else self._step + 1

    def _site_of(self, key: int, group: Group) -> Site | None:
        return self._recorder.sites.get(key) if self._recorder is not None else None

    def _look_at_growth(self, step: int, census: Census) -> None:
        first = self._ledger.first
        assert first is not None
        looked = 0
        for group, entries in self._ledger.groups():
            births = growth.steady_births((one.born for one in entries), first=first, now=step)
            if len(births) < self._needed.get(group, growth.SUSPICIOUS):
                continue
            waiting = self._want_sites(group) and all(one.site is None for one in entries)
            while len(births) >= growth.ENOUGH and not waiting and looked < HOLDERS_A_STEP:
                looked += 1
                if not self._judge(entries, births, step, census):
                    break
                entries = [one for one in entries if not one.settled]
                births = growth.steady_births((one.born for one in entries), first=first, now=step)
            else:
                continue
            self._needed[group] = max(growth.ENOUGH, NOT_AGAIN * len(births))
            self._traced[group] = 0

    def _judge(self, entries: list[StorageEntry], births: list[int], step: int, census: Census) -> bool:
        """Find who holds one of some storages, and report it if it grows. Returns whether a holder was found.

        The oldest after the first steps are tried: what was only passing through has been freed since.
        """
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
        return any(self._judge_holder_of(one, step, census) for one in tried) or any(
            self._judge_cycle_of(one, entries, census) for one in tried
        )

    def _judge_holder_of(
        self, newest: StorageEntry, step: int, census: Census, below: frozenset[int] = frozenset()
    ) -> bool:
        """Find who holds a storage and tensors of enough other steps, and report it if it grows. Returns whether it was found.

        Args:
            below: storages in a holder that ends with its epoch; one above it is looked for, which may keep those of all epochs.
        """
        first = self._ledger.first
        assert first is not None
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
            births = {
                one.born for one in entries_of(tensors) if one.group == newest.group and one.key not in below
            }
            return len(growth.steady_births(births, first=first, now=step)) >= growth.ENOUGH

        start = self._tensors_of(newest, census)
        kinds = tensor_types(sys.modules["torch"])
        holder = find_holder(start, holds_enough, kinds, {*census.identities(), id(graphs)})
        if holder is None:
            return False
        held = entries_of(holder.tensors)
        # a list in a dictionary of lists has grown enough later than the dictionary, and is the same variable
        same = {holder.identity, holder.name.variable if holder.name is not None else None} - {None}
        # links of a chain that has grown since
        longer = holder.name is None and any(one.reported for one in held)
        direct = {storage._cdata for tensor in holder.tensors if (storage := storage_of(tensor)) is not None}
        kept = making.kept_by(held, direct)
        kind = self._containers.judge(
            holder, held, kept, entries_of, sys.modules["torch"], first=first, now=step, above=bool(below)
        )
        if kind == "filling":
            self._emit_once(
                (kind, holder.name or holder.identity), making.of_holder(holder, held, direct, kind)
            )
        elif kind is not None and not longer and self._reported.isdisjoint(same):
            self._reported |= same
            self._emit(making.of_holder(holder, held, direct, kind))
        told = longer or not self._reported.isdisjoint(same)
        for one in held:
            one.settled = True
            one.reported = one.reported or told
        newest.settled = True
        if kind is None and holder.made_anew and not below:
            self._note_epoch(holder, held)
            inside = frozenset(one.key for one in held)
            del holder, start  # which would be found among the referrers
            self._judge_holder_of(newest, step, census, inside)
        return True

    def _note_epoch(self, holder: Holder, held: list[StorageEntry]) -> None:
        """Remember what the container of an epoch holds. What is alive in a later one has outlived it, and is looked at again."""
        same = holder.name.variable if holder.name is not None else None
        identity, earlier = self._epochs.get(same, (holder.identity, []))
        if identity != holder.identity:
            for one in earlier:
                one.settled = False
        self._epochs[same] = holder.identity, held

    def _tensors_of(self, entry: StorageEntry, census: Census) -> list[Any]:
        """Return the tensors through which a storage is held: its own, and that whose graph has saved it."""
        roots = [root for root, kept in census.graphs if entry.key in kept]
        return roots + [
            one for one in census.tensors.get(entry.key, ()) if all(one is not root for root in roots)
        ]

    def _judge_cycle_of(self, newest: StorageEntry, entries: list[StorageEntry], census: Census) -> bool:
        cycle = self._cycle_of(newest, census)
        if cycle is None:
            return False
        alike = [one for one in entries[:MOST_IN_CYCLES] if self._cycle_of(one, census) == cycle]
        for one in alike:
            one.settled = True
        self._emit_once(("cycle", cycle.kind, cycle.file), making.of_cycle(cycle, alike))
        return True

    def _cycle_of(self, entry: StorageEntry, census: Census) -> Cycle | None:
        start = self._tensors_of(entry, census)
        return find_cycle(start[0], {*census.identities(), id(start)}) if start else None

    def _look_at_growing_tensors(self, step: int, census: Census, recorded: SiteRecorder | None) -> None:
        first = self._ledger.first
        assert first is not None
        origins = recorded.origins if recorded is not None else {}
        for grown in self._growing.step_ended(
            step, first, self._ledger.entries(), origins, recorded=recorded is not None
        ):
            self._judge_growing(grown, census)

    def _judge_growing(self, grown: Grown, census: Census) -> None:
        """Report a tensor that has a name in the script, unless code bounds it that has not had the time to."""
        for tensor in census.tensors.get(grown.entry.key, ()):
            name = name_of(tensor, running_locals(), census.identities())
            if name is None:
                continue
            variable = name.variable
            bounded = not is_user_file(variable.file) or is_length_bounded(variable, user_files())
            if not bounded or self._growing.has_grown(grown) >= growth.ENOUGH_IF_BOUNDED:
                key = ("growing_tensor", name.variable)
                self._emit_once(key, making.of_growing_tensor(grown, name, type(tensor).__name__))
            self._growing.judged(grown, bounded=bounded)
            return
        self._growing.judged(grown, bounded=True)

    def _look_at_collected(self) -> None:
        for group, collected in list(self._collected.groups.items()):
            if len(collected.steps) < growth.SUSPICIOUS:
                continue
            self._want_sites(group)
            for cycle, steps in collected.cycles.items():
                if len(collected.steps) >= growth.ENOUGH and len(steps) >= 2:
                    finding = making.of_collected(cycle, group, collected, self._cycle_sites.get(group))
                    self._emit_once(("cycle", cycle.kind, cycle.file), finding)

    def _note_cycle(self, group: Group, key: int) -> None:
        site = self._site_of(key, group)
        if site is not None:
            self._cycle_sites[group] = site

    def _look_at_tracebacks(self, step: int, census: Census) -> None:
        for kept in self._exceptions.step_ended(step, census, self._ledger):
            for group in kept.groups:
                self._want_sites(group)
            if kept.finding is not None:
                self._emit_once(("traceback", kept.place), kept.finding)

    def _look_at_padding(self) -> None:
        found = self.padding.found(self._rollouts)
        if found is None:
            return
        if found.made is None and self._want_sites(found.group):
            return
        self._emit_once(("padding", found.width), making.of_padding(found))

    def _emit_once(self, key: Any, finding: TraceFinding) -> None:
        if key not in self._reported:
            self._reported.add(key)
            self._emit(finding)

    def _emit(self, finding: TraceFinding) -> None:
        """Report a finding, unless one of another object with the same holder and line was reported."""
        if finding.key not in self._emitted and len(self._emitted) < MOST_FINDINGS:
            self._emitted.add(finding.key)
            self._report(finding)
