"""Does to this rank what `--inject` asked for: the faults themselves, and when they come.

The session makes one `Injector` in a rank of a run that has injections; the slot calls it at every phase entry.
What is about to be done is in the journal, and on disk, before it is done. Faults stand for the user's own
mistakes, so their frames count as the user's. Nothing here draws a random number or touches the model: a run that
healed ends with the weights of a run that was never hurt. What may be asked for is `runtime.launch.injection`.
"""

from __future__ import annotations

import atexit
import functools
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, Protocol

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.launch.injection import AFTER_STEP, KINDS, Injection, check, remaining
from grpo_run.trainers import upstream
from grpo_run.trainers.patches import override_attributes
from grpo_run.watchdog.observation import Phase

FIRST_COMMON_STEP = 2
ELEMENTS, OTHER_ELEMENTS = 7, 5


class InjectedFault(Exception):
    """Stands for whatever a user's script may raise; no error of ours."""


class EventLog(Protocol):
    """The part of `runtime.record.journal.Journal` that is needed."""

    def write(self, event: str, *, rank: int | None = None, step: int | None = None, **fields: Any) -> object:
        """Append one event."""

    def sync(self) -> None:
        """Put it on disk."""


class Injector:
    """Watches this rank's phases and fires what is due. Used by the thread that trains.

    Args:
        injections: the run's, all of them, for every rank: most collective faults need the others' part.
        fired: canonical texts of those that have fired in earlier attempts, as this node's journal knows them.

    Raises:
        ConfigError: an injection that cannot happen among `world_size` ranks.
    """

    def __init__(
        self,
        injections: Sequence[Injection],
        *,
        rank: int,
        world_size: int,
        journal: EventLog,
        fired: Collection[str] = (),
    ) -> None:
        check(injections, world_size)
        self.rank = rank
        self.world_size = world_size
        self.trainer: Any = None
        self.other_group: Any = None
        self.hooks: list[Any] = []
        """Handles of forward hooks that are to go when generation ends."""
        self._all = tuple(injections)
        self._armed = list(remaining(injections, fired))
        self._journal = journal
        self._common_step: dict[Phase, int] = {}

    def prepare(self, maximum: Callable[[int], int]) -> None:
        """Agree with all ranks on what has fired, and build the second group where one is needed; collective.

        Called by every rank before a `train()` call's loop, once `torch.distributed` is there. A rank knows what has
        fired from its own node's journal only, and ranks that disagreed would wait for one another for ever.

        Args:
            maximum: the highest of all ranks' numbers, outside the script's process groups.
        """
        self._common_step.clear()
        self._armed = [injection for injection in self._all if not maximum(int(injection not in self._armed))]
        if self.other_group is None and any(i.kind == "mismatch-group" for i in self._armed):
            self.other_group = _distributed(self).new_group()

    @contextmanager
    def attached(self, trainer: Any) -> Iterator[None]:
        """Inject faults into `trainer` for the length of the block; a slowed model is restored after generation."""
        self.trainer = trainer
        generate = getattr(trainer, upstream.GENERATE, None)
        if generate is None or not any(i.kind == "slow-generation" for i in self._armed):
            yield
            return

        @functools.wraps(generate)
        def generate_then_restore(*args: Any, **kwargs: Any) -> Any:
            try:
                return generate(*args, **kwargs)
            finally:
                while self.hooks:
                    self.hooks.pop().remove()

        with override_attributes(trainer, **{upstream.GENERATE: generate_then_restore}):
            yield

    def on_phase(self, phase: Phase, step_under_way: int) -> None:
        """Fire what is due at this phase entry; returns at once when nothing is.

        Args:
            step_under_way: the optimizer step being worked on, one above the last one taken.

        Raises:
            InjectedFault: that was asked for.
            SystemExit: that was asked for.
            ConfigError: a collective was asked for and the script has no process group of several ranks.
        """
        step = step_under_way - 1 if phase in AFTER_STEP else step_under_way
        here = [injection for injection in self._armed if injection.phase is phase]
        if not here:
            return
        due = [injection for injection in here if injection.step == step]
        common = [injection for injection in here if KINDS[injection.kind].common]
        part = next((injection for injection in common if injection.step == step), None)
        # once a step: a phase may be entered several times, and the history is to look like one call a step
        first_entry = self._common_step.get(phase) != step
        if part is not None:
            self._common_step[phase] = step
            if part.rank != self.rank:
                self._armed.remove(part)
                _common(self)
        elif first_entry and any(FIRST_COMMON_STEP <= step < injection.step for injection in common):
            self._common_step[phase] = step
            _common(self)
        own = [injection for injection in due if injection.rank == self.rank]
        for injection in sorted(own, key=lambda injection: not KINDS[injection.kind].arms):
            self._fire(injection)

    def _fire(self, injection: Injection) -> None:
        self._armed.remove(injection)
        self._journal.write(
            "fault_injected",
            rank=self.rank,
            step=injection.step,
            kind=injection.kind,
            injection=str(injection),
            phase=injection.phase.name,
        )
        self._journal.sync()
        DEEDS[injection.kind](self, injection)


def _kill(injector: Injector, injection: Injection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(injector: Injector, injection: Injection) -> NoReturn:
    raise InjectedFault(f"rank {injection.rank} was asked to raise this: {injection}")


def _hang(injector: Injector, injection: Injection) -> None:
    _sleep(injection.seconds)


def _stop(injector: Injector, injection: Injection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_interpreter(injector: Injector, injection: Injection) -> None:
    # two to the power of the length: every split of the letters is tried before the match fails
    re.match(r"(a+)+$", "a" * 100 + "b")


def _wait_for_lock(injector: Injector, injection: Injection) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=-1 if math.isinf(injection.seconds) else injection.seconds)


def _mismatched_operation(injector: Injector, injection: Injection) -> None:
    distributed = _distributed(injector)
    own = _ones(ELEMENTS)
    distributed.all_gather([_ones(ELEMENTS) for _ in range(injector.world_size)], own)


def _mismatched_shape(injector: Injector, injection: Injection) -> None:
    # fewer than the others': Gloo then aborts this rank (of two sizes, the rank with the smaller buffer), NCCL hangs
    _distributed(injector).all_reduce(_ones(OTHER_ELEMENTS))


def _mismatched_group(injector: Injector, injection: Injection) -> None:
    assert injector.other_group is not None, "prepare() is called before training"
    _distributed(injector).all_reduce(_ones(ELEMENTS), group=injector.other_group)


def _skip(injector: Injector, injection: Injection) -> None:
    _distributed(injector)  # the same refusal as on the ranks that do call it


def _extra(injector: Injector, injection: Injection) -> None:
    _distributed(injector).all_reduce(_ones(ELEMENTS))


def _common(injector: Injector) -> None:
    """The call that all ranks make at a place, so that the one which departs from it can be told from the others."""
    _distributed(injector).all_reduce(_ones(ELEMENTS))


def _exit(injector: Injector, injection: Injection) -> NoReturn:
    sys.exit(0)


def _return_early(injector: Injector, injection: Injection) -> None:
    assert injector.trainer is not None, "attached() is entered before training"
    # nothing but the beginning of a train() call takes this back
    injector.trainer.control.should_training_stop = True


def _slow(injector: Injector, injection: Injection) -> None:
    time.sleep(injection.seconds)


def _slow_generation(injector: Injector, injection: Injection) -> None:
    assert injector.trainer is not None, "attached() is entered before training"

    def slow_forward_pass(module: Any, arguments: Any) -> None:
        time.sleep(injection.seconds)

    injector.hooks.append(injector.trainer.model.register_forward_pre_hook(slow_forward_pass))


def _stuck_data(injector: Injector, injection: Injection) -> None:
    _sleep(injection.seconds)


def _stuck_checkpoint(injector: Injector, injection: Injection) -> None:
    _sleep(injection.seconds)


def _hang_at_exit(injector: Injector, injection: Injection) -> None:
    def exit_handler() -> None:
        _sleep(injection.seconds)

    atexit.register(exit_handler)


def _ignore_term(injector: Injector, injection: Injection) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


DEEDS: dict[str, Callable[[Injector, Injection], None]] = {
    "kill": _kill,
    "exception": _raise,
    "hang": _hang,
    "stop": _stop,
    "gil": _hold_interpreter,
    "lock": _wait_for_lock,
    "mismatch-operation": _mismatched_operation,
    "mismatch-shape": _mismatched_shape,
    "mismatch-group": _mismatched_group,
    "skip": _skip,
    "extra": _extra,
    "exit": _exit,
    "return": _return_early,
    "slow": _slow,
    "slow-generation": _slow_generation,
    "data": _stuck_data,
    "checkpoint": _stuck_checkpoint,
    "exit-hang": _hang_at_exit,
    "ignore-term": _ignore_term,
}
"""A function of its own for every kind, so that a stack says which it is."""


def _sleep(seconds: float) -> None:
    while math.isinf(seconds):
        time.sleep(3600.0)
    time.sleep(seconds)


def _distributed(injector: Injector) -> Any:
    """`torch.distributed`, ready.

    Raises:
        ConfigError: the script has no process group of several ranks.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError("--inject: a collective was asked for, but torch.distributed is not initialized")
    if injector.world_size < 2:
        raise ConfigError("--inject: a collective was asked for, but the run has one rank only")
    return distributed


def _ones(elements: int) -> Any:
    """A tensor where the default group's backend wants it; its values are nobody's."""
    import torch

    on_device = "nccl" in str(torch.distributed.get_backend())
    return torch.ones(elements, device="cuda" if on_device else "cpu")
