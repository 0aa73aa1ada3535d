"""The faults that `--inject` can cause in a rank, one function per kind.

Called by `rank.py`, which decides when. Faults stand for mistakes in the user's own script, so the
watchdog treats this file's frames as the user's; each kind has its own function, so that a stack names the
kind. Memory runs out in `_exhaustion.py`, because that is a trainer's mistake. Nothing here draws a
random number or changes the model: a recovered run ends with the weights of a run without faults.
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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from grpo_run.runtime.errors import ConfigError
from grpo_run.runtime.features.injections._exhaustion import exhaust_memory, exhaust_memory_in_nccl
from grpo_run.runtime.launch.injections import Injection
from grpo_run.watchdog.observation import Phase

ELEMENTS, OTHER_ELEMENTS = 7, 5
"""Sizes of the tensors in matching and in mismatched collectives."""


class InjectedFault(Exception):
    """An injected exception.

    It replaces whatever a user's script may raise, so it is not an error of grpo-run's.
    """


@dataclass(kw_only=True)
class FaultContext:
    """What the faults of one rank act on."""

    rank: int
    world_size: int
    trainer: Any = None
    """The trainer of the current `train()` call; None in a loop."""
    end_call: Callable[[], None] | None = None
    """Ends the current `train()` call or loop at the end of the step, on this rank alone."""
    other_group: Any = None
    """A second process group of all ranks, for `mismatch-group`."""
    open_phases: Callable[[], tuple[Phase, ...]] = tuple
    """Returns the phases that are open on the board, the outermost first."""


def _kill(context: FaultContext, injection: Injection) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _raise(context: FaultContext, injection: Injection) -> NoReturn:
    raise InjectedFault(f"injected into rank {injection.rank}: {injection}")


def _hang(context: FaultContext, injection: Injection) -> None:
    _sleep(injection.seconds)


def _stop(context: FaultContext, injection: Injection) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _hold_interpreter(context: FaultContext, injection: Injection) -> None:
    # catastrophic backtracking: the match tries 2**100 partitions before it fails
    re.match(r"(a+)+$", "a" * 100 + "b")


def _wait_for_lock(context: FaultContext, injection: Injection) -> None:
    lock = threading.Lock()
    lock.acquire()
    lock.acquire(timeout=-1 if math.isinf(injection.seconds) else injection.seconds)


def _mismatched_operation(context: FaultContext, injection: Injection) -> None:
    distributed = require_distributed(context)
    own = _ones(ELEMENTS)
    distributed.all_gather([_ones(ELEMENTS) for _ in range(context.world_size)], own)


def _mismatched_shape(context: FaultContext, injection: Injection) -> None:
    # smaller than on the other ranks: Gloo aborts the rank with the smaller buffer, NCCL hangs
    require_distributed(context).all_reduce(_ones(OTHER_ELEMENTS))


def _mismatched_group(context: FaultContext, injection: Injection) -> None:
    assert context.other_group is not None, "`Injector.taking_part` is entered before training"
    require_distributed(context).all_reduce(_ones(ELEMENTS), group=context.other_group)


def _skip(context: FaultContext, injection: Injection) -> None:
    require_distributed(context)  # raises the same error as on the ranks that make the call


def _exit(context: FaultContext, injection: Injection) -> NoReturn:
    sys.exit(0)


def _return_early(context: FaultContext, injection: Injection) -> None:
    assert context.end_call is not None, "`Injector.taking_part` is entered before training"
    context.end_call()


def _slow(context: FaultContext, injection: Injection) -> None:
    time.sleep(injection.seconds)


def _slow_generation(context: FaultContext, injection: Injection) -> None:
    assert context.trainer is not None, "`Injector.taking_part` is entered before training"

    def slow_forward_pass(module: Any, arguments: Any) -> None:
        if Phase.generate in context.open_phases():
            time.sleep(injection.seconds)
        else:
            hook.remove()

    hook = context.trainer.model.register_forward_pre_hook(slow_forward_pass)


def _hang_at_exit(context: FaultContext, injection: Injection) -> None:
    def exit_handler() -> None:
        _sleep(injection.seconds)

    atexit.register(exit_handler)


FAULTS: dict[str, Callable[[FaultContext, Injection], None]] = {
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
    "exit": _exit,
    "return": _return_early,
    "slow": _slow,
    "slow-generation": _slow_generation,
    "exit-hang": _hang_at_exit,
    "oom": exhaust_memory,
    "oom-nccl": exhaust_memory_in_nccl,
}
"""The function of each kind, in the order of `injection.KINDS`."""


def common_collective(context: FaultContext) -> None:
    """Make the collective that all ranks make at one place, so that the rank that deviates can be
    identified."""
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
        time.sleep(3600.0)
    time.sleep(seconds)


def _ones(elements: int) -> Any:
    """Return a tensor on the device that the default process group's backend requires."""
    import torch

    on_device = "nccl" in str(torch.distributed.get_backend())
    return torch.ones(elements, device="cuda" if on_device else "cpu")
