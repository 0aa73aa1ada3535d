"""Decides when the faults of `--inject` happen in this rank.

The session creates one `Injector` per rank of a run with injections, and the board slot calls it at every
phase entry. Each fault is journaled, and the journal synced to disk, before the fault happens.
`injected_faults.py` implements the faults; `runtime/launch/` parses and describes them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from grpo_run.runtime.event import Event
from grpo_run.runtime.history.events import FaultInjected
from grpo_run.runtime.launch.injections import KINDS, Injection, armed, check
from grpo_run.runtime.rank.injected_exhaustion import Places
from grpo_run.runtime.rank.injected_faults import FAULTS, FaultContext, common_collective, require_distributed
from grpo_run.runtime.upstream import trainer_names
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import PHASES_AFTER_STEP, Phase

FIRST_COMMON_STEP = 2
"""First step in which all ranks make the common collective of a phase."""
UNMARKED_PHASES = (Phase.reward, Phase.score)
"""Phases that happen somewhere in the body of a hand-written loop's step; their faults happen at its
start."""


class EventLog(Protocol):
    """The part of `runtime.history.journal.Journal` that the injector uses."""

    def write(self, event: Event) -> object:
        """Append one event."""

    def sync(self) -> None:
        """Write it to disk."""


class Injector:
    """Injects the faults that are due at this rank's phase entries. Used by the training thread only.

    Args:
        injections: all injections of the run, for every rank: in most collective faults the other ranks take
            part.
        fired: canonical texts of the injections that fired in earlier attempts, according to this node's
            journal.
        open_phases: returns the phases that are open on the board, the outermost first.
        step: returns the optimizer step in progress, one above the last completed step.

    Raises:
        ConfigError: an injection is impossible with `world_size` ranks.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        *,
        rank: int,
        world_size: int,
        journal: EventLog,
        fired: Collection[str] = (),
        open_phases: Callable[[], tuple[Phase, ...]] = tuple,
        step: Callable[[], int] = lambda: 0,
    ) -> None:
        check(injections, world_size)
        self._context = FaultContext(rank=rank, world_size=world_size, open_phases=open_phases)
        self._all = tuple(injections)
        self._armed = list(armed(injections, fired))
        self._journal = journal
        self._common_step: dict[Phase, int] = {}
        self._step = step

    def prepare(self, maximum: Callable[[int], int]) -> None:
        """Agree with all ranks on what has fired, and create the second process group if needed. Collective.

        Every rank calls it before a `train()` call, once `torch.distributed` is initialized. A rank knows
        only from its own node's journal what has fired; ranks that disagreed would wait for each other
        forever.

        Args:
            maximum: returns the largest of all ranks' values, without the script's process groups.
        """
        self._common_step.clear()
        self._armed = [injection for injection in self._all if not maximum(int(injection not in self._armed))]
        if self._context.other_group is None and any(i.kind == "mismatch-group" for i in self._armed):
            self._context.other_group = require_distributed(self._context).new_group()

    def attached(self, trainer: Any) -> AbstractContextManager[None]:
        """Let faults act on `trainer` for the length of the block."""
        return self._attached(functools.partial(_leave_training, trainer), [trainer.model], trainer)

    def attached_to_loop(
        self, end_loop: Callable[[], None], modules: Iterable[Any]
    ) -> AbstractContextManager[None]:
        """Let faults act on a hand-written loop for the length of the block.

        Args:
            end_loop: ends it at the end of the step, on this rank alone.
            modules: its models.
        """
        return self._attached(end_loop, modules, None)

    def _attached(
        self, end_call: Callable[[], None], modules: Iterable[Any], trainer: Any
    ) -> AbstractContextManager[None]:
        self._context.trainer, self._context.end_call = trainer, end_call
        if not any(KINDS[one.kind].takes_rows and one.rank == self._context.rank for one in self._armed):
            return nullcontext()
        return Places(self._exhaust_memory, self._context.open_phases).watched(modules, trainer)

    def on_body(self, current_step: int) -> None:
        """Inject what is due in the body of a hand-written loop's step, which does not mark its phases."""
        for phase in UNMARKED_PHASES:
            self.on_phase(phase, current_step)

    def _exhaust_memory(self, phase: MemoryPhase, rows: float, tokens: float) -> None:
        """Let memory run out if that is due in this phase, in which so many rows and tokens are computed at
        once."""
        step = self._step()
        for injection in tuple(self._armed):
            here = injection.rank == self._context.rank and injection.phase is phase
            if here and (
                step >= injection.step and injection.exceeded_by(rows, tokens)
                if injection.recurs
                else step == injection.step
            ):
                self._fire(injection)

    def on_phase(self, phase: Phase, current_step: int) -> None:
        """Inject what is due at this phase entry, if anything.

        Args:
            current_step: the optimizer step in progress, one above the last completed step.

        Raises:
            InjectedFault: as requested.
            SystemExit: as requested.
            ConfigError: a collective is requested, and the script has no process group of several ranks.
        """
        if phase is Phase.optimizer:
            self._exhaust_memory(MemoryPhase.optimizer, math.inf, math.inf)
        step = current_step - 1 if phase in PHASES_AFTER_STEP else current_step
        here = [injection for injection in self._armed if injection.phase is phase]
        if not here:
            return
        due = [injection for injection in here if injection.step == step]
        common = [injection for injection in here if KINDS[injection.kind].collective]
        deviation = next((injection for injection in common if injection.step == step), None)
        # a phase may be entered several times in a step; the common collective is made at the first entry
        # only
        first_entry = self._common_step.get(phase) != step
        if deviation is not None:
            self._common_step[phase] = step
            if deviation.rank != self._context.rank:
                self._armed.remove(deviation)
                common_collective(self._context)
        elif first_entry and any(FIRST_COMMON_STEP <= step < injection.step for injection in common):
            self._common_step[phase] = step
            common_collective(self._context)
        own = [injection for injection in due if injection.rank == self._context.rank]
        for injection in sorted(own, key=lambda injection: not KINDS[injection.kind].arms):
            self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        if not injection.recurs:
            self._armed.remove(injection)
        self._journal.write(
            FaultInjected(
                rank=self._context.rank,
                step=injection.step,
                kind=injection.kind,
                injection=str(injection),
                phase=injection.phase.name,
            )
        )
        self._journal.sync()
        FAULTS[injection.kind](self._context, injection)


def _leave_training(trainer: Any) -> None:
    """Let this rank alone leave its `train()` call after the present step, without asking the others."""
    after_step = getattr(trainer, trainer_names.AFTER_STEP)

    def leave(*args: Any, **kwargs: Any) -> Any:
        result = after_step(*args, **kwargs)
        trainer.control.should_training_stop = True
        return result

    setattr(trainer, trainer_names.AFTER_STEP, leave)
