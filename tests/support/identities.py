"""Identities of checkpoints for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from grpo_run.runtime.checkpoints.manifest import Identity, TrainCall


def identity(output: Path | str = "out", step: int = 5, **changes: Any) -> Identity:
    """Return the identity of `checkpoint-<step>` of run-1 on one rank, of a call that saves to `output`.

    Args:
        changes: fields of `Identity`, or `ordinal` and `trainer_class` of its call.
    """
    call = TrainCall(
        ordinal=changes.pop("ordinal", 1),
        trainer_class=changes.pop("trainer_class", "GRPOTrainer"),
        output_dir=str(output),
    )
    fields = {"run_id": "run-1", "train_call": call, "step": step, "world_size": 1, "versions": {}}
    return Identity(**(fields | changes))
