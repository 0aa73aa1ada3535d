"""What the report of a run and the live page both show of it, as JSON values.

Called by `reports/run_contents.py`, `live/view.py` and `grpo-run status`. Texts are cut and freed of control
characters here, for pages, the terminal, Markdown and JSON alike. Pure.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_run.dashboards.clean_text import clean
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.runtime.history.status import RunStatus
from grpo_run.watchdog.memory.phase_memory import RankMemory

MAX_LABEL = 200


def facts_of(status: RunStatus, until: float | None = None) -> dict[str, Any]:
    """Return where a run stands, and its faults.

    Args:
        status: one reading.
        until: seconds since the epoch, for a run that is live; else the time of its last event counts.
    """
    history = status.history
    return {
        "run_id": clean(status.run_id, MAX_LABEL),
        "state": status.state,
        "step": history.step,
        "target_steps": history.target_steps,
        "attempts": history.attempts,
        "goodput": history.goodput(until),
        "incidents": list(map(_fault, history.recoveries)),
    }


def _fault(recovery: Recovery) -> dict[str, Any]:
    """One fault. `folder` is the name of its evidence; None if it has none."""
    return {
        "at": recovery.at,
        "train_call": recovery.train_call,
        "attempt": recovery.attempt,
        "step": recovery.step,
        "rank": recovery.rank,
        "cause": clean(recovery.cause, MAX_LABEL),
        "sentence": clean(recovery.sentence or recovery.cause),
        "action": clean(recovery.action, MAX_LABEL).replace("_", " "),
        "reason": clean(recovery.reason),
        "detection_seconds": recovery.detection_seconds,
        "recovery_seconds": recovery.recovery_seconds,
        "repeated_steps": recovery.lost_steps,
        "from_checkpoint": recovery.from_checkpoint,
        "gave_up": recovery.gave_up,
        "folder": clean(Path(recovery.incident).name, MAX_LABEL) if recovery.incident else None,
    }


def memory_of(memory: RankMemory | None) -> dict[str, Any] | None:
    """Return the memory of a rank in bytes: of its device, or on the host without one; None if it was not
    measured. `phase` is the one that the most was measured in.
    """
    if memory is None or not memory.readings:
        return None
    by_phase = {
        phase.name: one.peak_allocated_bytes if memory.has_device else one.peak_resident_bytes
        for phase, one in memory.phases.items()
    }
    now = memory.allocated_bytes if memory.has_device else memory.resident_bytes
    peaks = (*by_phase.values(), memory.peak_allocated_bytes if memory.has_device else now)
    return {
        "where": "device" if memory.has_device else "host",
        "now_bytes": now,
        "peak_bytes": max(peaks),
        "phase": max(by_phase, key=lambda name: by_phase[name], default=""),
        "by_phase": by_phase,
        "capacity_bytes": memory.capacity_bytes or None,
    }
