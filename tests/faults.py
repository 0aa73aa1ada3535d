"""Fault injection for tests: command-line arguments, and counts of what fired from the journal.

    run = runs(*fault("hang", rank=1, step=3), "--nproc-per-node", "2", script, ...).start()
    run.wait()
    assert fired(run) == Counter({"hang@rank1:step3": 1})

The kinds are `grpo_run.runtime.launch.injections.KINDS`. Hangs in user code, without the injector:
`scripts/hangs.py`.
"""

from __future__ import annotations

from collections import Counter

from support.runs import Run

from grpo_run.runtime.launch.injections import KINDS, Injection
from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


def fault(
    kind: str,
    *,
    rank: int,
    step: int,
    phase: Phase | MemoryPhase | str | None = None,
    seconds: float | None = None,
    rows: int = 0,
    tokens: int = 0,
) -> list[str]:
    """Return the arguments that inject one fault; phase and seconds default to the kind's own.

    Args:
        seconds: duration, for kinds that have one.
        rows: memory runs out whenever more rows are computed at once; 0 for once.
        tokens: the same for tokens, padding included.

    Raises:
        ConfigError: unknown kind, or a value out of range.
    """
    where = KINDS[kind].phases[phase] if type(phase) is str else phase
    made = Injection.of(kind, rank=rank, step=step, phase=where, seconds=seconds, rows=rows, tokens=tokens)
    return ["--inject", str(made)]


def fired(run: Run) -> Counter[str]:
    """Count how often each injection has fired in all attempts, by its canonical text."""
    return Counter(event["injection"] for event in run.events("fault_injected"))
