"""Records of a journal, and the history that their replay makes."""

from __future__ import annotations

from typing import Any

from grpo_run.runtime.history.history import History
from support.journal import as_events


def replay(*records: tuple[float, str, dict[str, Any]]) -> History:
    """Return the history of (time, event, fields)."""
    return History.of(as_events({"time": time, "event": event, **fields} for time, event, fields in records))


def started(time: float) -> tuple[float, str, dict[str, Any]]:
    """A supervisor starts or resumes the run."""
    return time, "run_started", {"run": "run-1"}


def attempt(time: float, number: int = 0) -> tuple[float, str, dict[str, Any]]:
    """Ranks are started."""
    return time, "attempt_started", {"attempt": number}


def train(time: float, step: int = 0, call: int = 1, **fields: Any) -> tuple[float, str, dict[str, Any]]:
    """A `train()` call starts at `step`."""
    call_fields = {"trainer_class": "GRPOTrainer", "output_dir": f"/out/{call}", "target_steps": 100}
    return time, "train_started", {"rank": 0, "step": step, "train_call": call, **call_fields, **fields}


def commit(time: float, step: int, call: int = 1) -> tuple[float, str, dict[str, Any]]:
    """All ranks have voted on `step`."""
    return time, "step_committed", {"step": step, "train_call": call, "committed_at": time}


def published(time: float, step: int, call: int = 1) -> tuple[float, str, dict[str, Any]]:
    """A checkpoint is published."""
    fields = {"step": step, "train_call": call, "path": f"out/checkpoint-{step}", "verified": True}
    return time, "checkpoint_published", fields


def incident(time: float, step: int, **fields: Any) -> tuple[float, str, dict[str, Any]]:
    """A fault is confirmed."""
    return time, "incident", {"step": step, "cause": "signal", "culprit": 1, "signature": "s", **fields}


def restored(time: float, step: int, call: int = 1) -> tuple[float, str, dict[str, Any]]:
    """A call that had finished is restored from its last checkpoint."""
    return time, "train_restored", {"rank": 0, "step": step, "train_call": call}


def ended(time: float, code: int, sentence: str = "") -> tuple[float, str, dict[str, Any]]:
    """The supervisor ends the run."""
    return time, "run_ended", {"exit_code": code, "sentence": sentence}
