"""Fault injection for tests: words for a run's command line, and what fired, counted from its journal.

    run = runs(*fault("hang", rank=1, step=3), "--nproc-per-node", "2", script, ...).start()
    run.wait()
    assert fired(run) == Counter({"hang@rank1:step3": 1})

The kinds are `grpo_run.runtime.launch.injection.KINDS`; faults of user code, without our injector, are `scripts/hurt.py`.
"""

from __future__ import annotations

from collections import Counter

from support.runs import Run

from grpo_run.runtime.launch.injection import Injection
from grpo_run.watchdog.observation import Phase


def fault(
    kind: str, *, rank: int, step: int, phase: Phase | str | None = None, seconds: float | None = None
) -> list[str]:
    """The flag that injects one fault; what is not given is the kind's own.

    Args:
        seconds: how long it lasts, for the kinds that have a length.

    Raises:
        ConfigError: no such kind, or out of range.
    """
    where = Phase[phase] if isinstance(phase, str) else phase
    return ["--inject", str(Injection.of(kind, rank=rank, step=step, phase=where, seconds=seconds))]


def fired(run: Run) -> Counter[str]:
    """How often each injection has fired so far, over all attempts, by canonical text."""
    return Counter(event["injection"] for event in run.events("fault_injected"))
