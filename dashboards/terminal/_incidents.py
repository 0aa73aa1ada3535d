"""Faults as text for the terminal: what happened, which rank and line, the action, and the duration of the
recovery.

Reads the run's history and each incident's `verdict.json`. Called by `terminal.py`, which prints the lines.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_run.runtime.features import shown
from grpo_run.runtime.files import short_path
from grpo_run.runtime.history.no_trainer_script import RESTART
from grpo_run.runtime.history.recovery import Recovery
from grpo_run.watchdog.evidence.incident_files import read_verdict
from grpo_run.watchdog.memory.shortage import usage_in
from grpo_run.watchdog.text import counted, rank_names

LABEL_WIDTH = 10
MAX_FILE_CHARACTERS = 40
"""A longer path would be broken inside its line number at 80 columns."""
ACTIONS = {
    "restart": "restart all ranks",
    "restart_from_earlier_checkpoint": "roll back",
    "stop": "stop the run",
    **shown("ACTIONS"),
}


def fault_lines(recovery: Recovery) -> list[str]:
    """Return the lines of one fault: its sentence, then one `label value` line per known fact."""
    verdict = read_verdict(recovery.incident)
    waiting = _still_waiting(verdict, recovery)
    action = ACTIONS.get(recovery.action, recovery.action.replace("_", " "))
    if recovery.reason.startswith(RESTART):
        action = recovery.reason
    elif recovery.reason:
        action = f"{action}: {recovery.reason}"
    facts = {
        "detected": f"after {recovery.detection_seconds:.2f} s"
        if recovery.detection_seconds is not None
        else "",
        "where": _where(verdict, recovery.rank),
        "memory": usage_in(verdict),
        "waiting": rank_names(waiting) if waiting else "",
        "others": _others(recovery),
        "action": action,
        "evidence": short_path(recovery.incident) if recovery.incident else "",
    }
    lines = [f"{label:<{LABEL_WIDTH}}{fact}" for label, fact in facts.items() if fact]
    return [recovery.sentence or recovery.cause, *lines]


def recovered_line(recovery: Recovery, *, faults: int = 1) -> str:
    """Return how long a recovery took and what it cost; call it once `recovery_seconds` is known.

    Args:
        recovery: of the last fault.
        faults: in a row, without a step between them.
    """
    assert recovery.recovery_seconds is not None
    after = "the fault" if faults == 1 else f"the last of {faults} faults"
    if recovery.reason.startswith(RESTART):
        return f"the script trains again, from its beginning, {recovery.recovery_seconds:.2f} s after {after}"
    parts = [f"training continues {recovery.recovery_seconds:.2f} s after {after}"]
    if recovery.from_checkpoint is not None:
        parts.append(f"resumed from step {recovery.from_checkpoint}")
    if recovery.lost_steps is not None:
        parts.append(f"{counted(recovery.lost_steps, 'step')} repeated")
    return ", ".join(parts)


def inspection_line(recovery: Recovery, run_directory: Path) -> str:
    """Return where the evidence of the latest fault is, and the commands that show it."""
    run = short_path(run_directory)
    evidence = f"evidence in {short_path(recovery.incident)}; show it with" if recovery.incident else "see"
    which = " --incident last" if recovery.incident else ""
    return f"{evidence} `grpo-run report {run}{which}`, `grpo-run logs {run}` or `grpo-run status {run}`"


def _where(verdict: Mapping[str, Any], rank: int | None) -> str:
    location = verdict.get("location") or (verdict.get("locations") or {}).get(str(rank))
    if not location:
        return ""
    file = short_path(location["file"])
    if len(file) > MAX_FILE_CHARACTERS:
        file = str(Path("…", *Path(file).parts[-2:]))  # verdict.json has the whole path
    return f"{file}:{location['line']} in {location['function']}"


def _still_waiting(verdict: Mapping[str, Any], recovery: Recovery) -> list[int]:
    failed = {*recovery.lost_connection, *recovery.also_failed}
    return [rank for rank in verdict.get("waiters") or [] if rank not in failed]


def _others(recovery: Recovery) -> str:
    """What happened to the other ranks that failed."""
    if recovery.rank is None:
        return ""
    lost, failed = recovery.lost_connection, recovery.also_failed
    whose = "its" if len(lost) == 1 else "their"
    clauses = [f"{rank_names(failed)} failed too"] if failed else []
    clauses += [f"{rank_names(lost)} lost {whose} connection to rank {recovery.rank}"] if lost else []
    return "; ".join(clauses)
