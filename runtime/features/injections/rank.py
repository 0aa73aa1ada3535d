"""Injections in a rank: decides when each fault is due, and lets it happen.

The board slot calls `Injector.on_phase` at every phase entry of a rank whose run has injections. Each fault
is journaled, and the journal synced to disk, before the fault happens. `_faults.py` implements the faults.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from grpo_run.runtime.features.injections._exhaustion import Places
from grpo_run.runtime.features.injections._faults import FaultContext, common_collective
from grpo_run.runtime.features.injections._injection import Injection, check
from grpo_run.runtime.features.injections.events import FaultInjected
from grpo_run.runtime.features.injections.settings import InjectionSettings, RankInjections
from grpo_run.runtime.rank.points import CallPoints, RankFeature
from grpo_run.runtime.rank.session import Session
from grpo_run.runtime.upstream import trainer_names
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import PHASES_AFTER_STEP, Phase

FIRST_COMMON_STEP = 2
"""First step in which all ranks make the common collective of a phase."""
BODY_PHASES = (Phase.forward_backward, Phase.reward, Phase.score)
"""Phases that happen somewhere in the body of a hand-written loop's step, which marks the first one only; the
faults of all happen at its start.
"""


class Injector:
    """Injects the faults that are due at this rank's phase entries. Used by the training thread only.

    Args:
        session: of the rank.
        injections: all injections of the run, for every rank: in most collective faults the other ranks take
            part.
        fired: canonical texts of the injections that fired in earlier attempts, according to this node's
            journal.

    Raises:
        ConfigError: an injection is impossible with the run's number of ranks.
    """

    def __init__(
        self, session: Session, injections: Sequence[Injection], fired: Collection[str] = ()
    ) -> None:
        check(injections, session.world_size)
        self._session = session
        self._context = FaultContext(
            rank=session.rank, world_size=session.world_size, open_phases=lambda: session.slot.open_phases
        )
        self._all = tuple(injections)
        self._armed = [one for one in injections if one.recurs or str(one) not in fired]
        self._common_step: dict[Phase, int] = {}
        self._in_loop = False

    @contextmanager
    def taking_part(self, call: CallPoints) -> Iterator[None]:
        """Let faults act on a call for the length of the block. Collective: all ranks agree on what has
        fired, and create the second process group if it is needed.

        `torch.distributed` is initialized. A rank knows only from its own node's journal what has fired;
        ranks that disagreed would wait for each other forever.
        """
        maximum = self._session.votes.maximum
        self._common_step.clear()
        self._armed = [injection for injection in self._all if not maximum(int(injection not in self._armed))]
        context = self._context
        self._in_loop = call.trainer is None
        context.trainer = call.trainer
        context.end_call = call.leave_loop or functools.partial(_leave_training, call.trainer)
        places: AbstractContextManager[None] = nullcontext()
        if any(one.kind.takes_rows and one.rank == context.rank for one in self._armed):
            places = Places(self._exhaust_memory, context.open_phases).watched(call.models, call.trainer)
        with places:
            yield

    def _exhaust_memory(self, phase: MemoryPhase, rows: float, tokens: float) -> None:
        """Let memory run out if that is due in this phase, in which so many rows and tokens are computed at
        once.
        """
        step = self._session.slot.step + 1
        for injection in tuple(self._armed):
            here = injection.rank == self._context.rank and injection.phase is phase
            if here and (
                step >= injection.step and injection.exceeded_by(rows, tokens)
                if injection.recurs
                else step == injection.step
            ):
                self._fire(injection)

    def on_phase(self, phase: Phase) -> None:
        """Inject what is due at this phase entry, if anything.

        Raises:
            InjectedFault: as requested.
            SystemExit: as requested.
            ConfigError: a collective is requested, and the script has no process group of several ranks.
        """
        if phase is Phase.optimizer:
            self._exhaust_memory(MemoryPhase.optimizer, math.inf, math.inf)
        for one in BODY_PHASES if self._in_loop and phase is Phase.forward_backward else (phase,):
            self._enter(one)

    def _enter(self, phase: Phase) -> None:
        step = self._session.slot.step + (phase not in PHASES_AFTER_STEP)
        here = [injection for injection in self._armed if injection.phase is phase]
        if not here:
            return
        due = [injection for injection in here if injection.step == step]
        common = [injection for injection in here if injection.kind.collective]
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
        for injection in sorted(own, key=lambda injection: not injection.kind.arms):
            self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        if not injection.recurs:
            self._armed.remove(injection)
        self._session.journal.write(
            FaultInjected(
                rank=self._context.rank,
                step=injection.step,
                kind=injection.name,
                injection=str(injection),
                phase=injection.phase.name,
            )
        )
        self._session.journal.sync()
        self._context.seconds = injection.seconds
        self._context.text = f"injected into rank {injection.rank}: {injection}"
        injection.kind.effect(self._context)


def _leave_training(trainer: Any) -> None:
    """Let this rank alone leave its `train()` call after the present step, without asking the others."""
    after_step = getattr(trainer, trainer_names.AFTER_STEP)

    def leave(*args: Any, **kwargs: Any) -> Any:
        result = after_step(*args, **kwargs)
        trainer.control.should_training_stop = True
        return result

    setattr(trainer, trainer_names.AFTER_STEP, leave)


class InjectionsPart(RankFeature):
    """Injections at the points of a rank."""

    name = InjectionSettings.NAME

    def __init__(self) -> None:
        self._injector: Injector | None = None

    def script_begins(self, session: Session) -> None:
        """Watch the phases of a run that has injections."""
        injections = session.config.of(InjectionSettings).injections
        if not injections:
            return
        told = RankInjections.model_validate(session.settings.features.get(self.name) or {})
        self._injector = Injector(session, injections, told.fired)
        session.slot.on_enter = self._injector.on_phase

    def call(self, session: Session, points: CallPoints) -> None:
        """Let faults act on a call."""
        if self._injector is not None:
            points.hooks.enter_context(self._injector.taking_part(points))


PART = InjectionsPart()
