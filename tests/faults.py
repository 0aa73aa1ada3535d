"""Fault injection for tests: command-line arguments, and counts of what fired from the journal.

    run = runs(*fault("hang", rank=1, step=3), "--nproc-per-node", "2", script, ...).start()
    run.wait()
    assert fired(run) == Counter({"hang@rank1:step3": 1})

`grpo-run launch --inject help` lists the kinds. Hangs in user code, without injections: `scripts/hangs.py`.
"""

from __future__ import annotations

from collections import Counter

from support.runs import Run

from grpo_run.watchdog.memory.shortage import MemoryPhase
from grpo_run.watchdog.observation import Phase


def fault(
    kind: str, *, rank: int, step: int, phase: Phase | MemoryPhase | str | None = None, **limits: float
) -> list[str]:
    """Return the arguments that inject one fault; phase and seconds default to the kind's own.

    Args:
        limits: `seconds`, a duration, for kinds that have one; `rows` or `tokens`: memory runs out whenever
            more are computed at once.
    """
    where = [] if phase is None else [f"phase={phase if type(phase) is str else phase.name}"]
    words = [
        f"{kind}@rank{rank}:step{step}",
        *where,
        *(f"{name}={number}" for name, number in limits.items()),
    ]
    return ["--inject", ":".join(words)]


def fired(run: Run) -> Counter[str]:
    """Count how often each injection has fired in all attempts, by its canonical text."""
    return Counter(event["injection"] for event in run.events("fault_injected"))
