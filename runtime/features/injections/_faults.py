"""The faults that `--inject` can cause in a rank: one entry per kind, with what it does.

An entry is a function in `KINDS`, with the kind's name, a sentence for `--inject help`, and where it happens
by default. Called by `rank.py`, which decides when; `_injection.py` reads the text of the options. Faults
stand for mistakes in the user's own script, so the watchdog treats this file's frames as the user's; each
kind has its own function, so that a stack names the kind. Memory runs out in `_exhaustion.py`, because that
is a trainer's mistake. Nothing here draws a random number or changes the model: a recovered run ends with the
weights of a run without faults.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.injections._exhaustion import exhaust_memory
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase

MEMORY_PHASES = {
    name: MemoryPhase[name] for name in ("generate", "score", "forward", "backward", "optimizer")
}
"""Where memory can run out, by name."""
STEP_PHASES = {name: phase for name, phase in Phase.__members__.items() if phase is not Phase.startup}
"""Where the other faults can happen, by name: in a step."""
ENDLESS_SLEEP_SECONDS = 86_400.0
"""Longer than any deadline: a sleep that ends before one is waited for in the next attempt."""
ELEMENTS, OTHER_ELEMENTS = 7, 5
"""Sizes of the tensors in matching and in mismatched collectives."""


class InjectedFault(Exception):
    """An injected exception.

    It replaces whatever a user's script may raise, so it is not an error of grpo-run's.
    """


@dataclass(kw_only=True)
class FaultContext:
    """What the faults of one rank act on, and what the one that happens says."""

    rank: int
    world_size: int
    trainer: Any = None
    """The trainer of the current `train()` call; None in a loop."""
    end_call: Callable[[], None] | None = None
    """Ends the current `train()` call or loop at the end of the step, on this rank alone."""
    open_phases: Callable[[], tuple[Phase, ...]] = tuple
    """Returns the phases that are open on the board, the outermost first."""
    seconds: float = 0.0
    """How long the fault lasts; infinity for one without end."""
    text: str = ""
    """What an exception says."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultKind:
    """One kind of fault.

    Args:
        sentence: what happens, for `--inject help`.
        phase: where it happens by default.
        effect: lets it happen.
        seconds: default duration; infinity for an unlimited one, None for a kind without a duration.
        fixed_phase: whether any other phase is refused.
        collective: whether it calls torch.distributed, while each other rank makes one all-reduce; it needs a
            second rank.
        arms: whether it returns immediately and takes effect later. Such a fault comes first at its place.
    """

    sentence: str
    phase: Phase | MemoryPhase
    effect: Callable[[FaultContext], None]
    seconds: float | None = None
    fixed_phase: bool = False
    collective: bool = False
    arms: bool = False

    @property
    def phases(self) -> Mapping[str, Phase | MemoryPhase]:
        """The phases in which it can happen, by name. Memory runs out in parts of a step that are one on the
        board.
        """
        return MEMORY_PHASES if self.takes_rows else STEP_PHASES

    @property
    def takes_rows(self) -> bool:
        """Whether it may depend on how many rows are computed at once."""
        return isinstance(self.phase, MemoryPhase)


KINDS: dict[str, FaultKind] = {}
"""All kinds, in the order of `--inject help`."""
Effect = Callable[[FaultContext], None]


def _kind(
    name: str, sentence: str, phase: Phase | MemoryPhase = Phase.reward, **more: Any
) -> Callable[[Effect], Effect]:
    def add(effect: Effect) -> Effect:
        KINDS[name] = FaultKind(sentence=sentence, phase=phase, effect=effect, **more)
        return effect

    return add


def _collective(name: str, sentence: str) -> Callable[[Effect], Effect]:
    return _kind(name, sentence, Phase.forward_backward, collective=True)


@_kind("kill", "the rank sends itself SIGKILL", Phase.forward_backward)
def _kill(context: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@_kind("exception", "the rank raises InjectedFault", Phase.forward_backward)
def _raise(context: FaultContext) -> NoReturn:
    raise InjectedFault(context.text)


@_kind("hang", "the rank sleeps, without end or for `seconds`", seconds=math.inf)
def _hang(context: FaultContext) -> None:
    _sleep(context.seconds)


@_kind("stop", "the rank sends itself SIGSTOP")
def _stop(context: FaultContext) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@_kind("gil", "a regular expression that never returns holds the GIL")
def _hold_interpreter(context: FaultContext) -> None:
    # catastrophic backtracking: the match tries 2**100 partitions before it fails
    re.match(r"(a+)+$", "a" * 100 + "b")


@_kind("lock", "the rank waits for a lock, without end or for `seconds`", seconds=math.inf)
def _wait_for_lock(context: FaultContext) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=-1 if math.isinf(context.seconds) else context.seconds)


@_collective("mismatch-operation", "the rank calls all_gather where the others call all_reduce")
def _mismatched_operation(context: FaultContext) -> None:
    distributed = require_distributed(context)
    own = _ones(ELEMENTS)
    distributed.all_gather([_ones(ELEMENTS) for _ in range(context.world_size)], own)


@_collective("mismatch-shape", "the rank calls all_reduce with a tensor of another size than the others")
def _mismatched_shape(context: FaultContext) -> None:
    # smaller than on the other ranks: Gloo aborts the rank with the smaller buffer, NCCL hangs
    require_distributed(context).all_reduce(_ones(OTHER_ELEMENTS))


@_collective("skip", "the rank skips an all_reduce that the others call")
def _skip(context: FaultContext) -> None:
    require_distributed(context)  # raises the same error as on the ranks that make the call


@_kind("exit", "the rank calls sys.exit(0) during training", Phase.forward_backward)
def _exit(context: FaultContext) -> NoReturn:
    sys.exit(0)


@_kind(
    "return", "the rank alone returns from train(), or leaves its loop, at the end of the step",
    Phase.forward_backward, arms=True,
)  # fmt: skip
def _return_early(context: FaultContext) -> None:
    assert context.end_call is not None, "`Injector.taking_part` is entered before training"
    context.end_call()


@_kind("slow", "the rank sleeps for `seconds` once, then continues; default 1", seconds=1.0)
def _slow(context: FaultContext) -> None:
    time.sleep(context.seconds)


@_kind(
    "slow-generation",
    "every forward pass of the step's generation takes `seconds` longer; default 0.2",
    Phase.generate, seconds=0.2, fixed_phase=True, arms=True,
)  # fmt: skip
def _slow_generation(context: FaultContext) -> None:
    assert context.trainer is not None, "`Injector.taking_part` is entered before training"
    seconds = context.seconds

    def slow_forward_pass(module: Any, arguments: Any) -> None:
        if Phase.generate in context.open_phases():
            time.sleep(seconds)
        else:
            hook.remove()

    hook = context.trainer.model.register_forward_pre_hook(slow_forward_pass)


@_kind(
    "exit-hang", "an exit handler sleeps after the script, without end or for `seconds`",
    Phase.data, seconds=math.inf, arms=True,
)  # fmt: skip
def _hang_at_exit(context: FaultContext) -> None:
    seconds = context.seconds

    def exit_handler() -> None:
        _sleep(seconds)

    atexit.register(exit_handler)


_kind(
    "oom",
    "the rank raises torch.OutOfMemoryError in generate, score, forward, backward or optimizer; with"
    " `rows=N` whenever it computes more than N rows at once, from that step on; with `tokens=N` in forward"
    " or backward, more than N rows times their padded length",
    MemoryPhase.forward,
)(exhaust_memory)


def common_collective(context: FaultContext) -> None:
    """Make the collective that all ranks make at one place, so that the rank that deviates can be
    identified.
    """
    require_distributed(context).all_reduce(_ones(ELEMENTS))


def require_distributed(context: FaultContext) -> Any:
    """Return `torch.distributed`, initialized.

    Raises:
        ConfigError: the script has no process group of several ranks.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        raise ConfigError("--inject: this fault is a collective, but torch.distributed is not initialized")
    if context.world_size < 2:
        raise ConfigError("--inject: this fault is a collective, but the run has only one rank")
    return distributed


def _sleep(seconds: float) -> None:
    while math.isinf(seconds):
        time.sleep(ENDLESS_SLEEP_SECONDS)
    time.sleep(seconds)


def _ones(elements: int) -> Any:
    """Return a tensor on the device that the default process group's backend requires."""
    import torch

    on_device = "nccl" in str(torch.distributed.get_backend())
    return torch.ones(elements, device="cuda" if on_device else "cpu")
