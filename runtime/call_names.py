"""How messages name a `train()` call or a hand-written loop of a run.

Used wherever a call appears in a message. Pure.
"""

from __future__ import annotations

LOOP = "loop"
"""The class that is recorded for a hand-written loop, where a `train()` call has its trainer's."""


def call_kind(trainer_class: str) -> str:
    """Return what a call is: `train() call` or `loop`."""
    return LOOP if trainer_class == LOOP else "train() call"


def call_title(ordinal: int, trainer_class: str, directory: str | None = None) -> str:
    """Return the name of a call: `train() call 1 (GRPOTrainer)` or `loop 1`.

    Args:
        ordinal: its number in the run.
        directory: its output directory, to name that too.
    """
    where = f"in {directory}" if directory is not None else ""
    if trainer_class == LOOP:
        return f"{LOOP} {ordinal}" + (f" ({where})" if where else "")
    return f"train() call {ordinal} ({' '.join(filter(None, (trainer_class, where)))})"
