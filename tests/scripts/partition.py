"""Record on every rank what the rank holds, which shows that a parallelism mode takes effect.

`grpo.py --record-partition` adds the callback. After the first optimizer step it writes
`partition-rank{r}.json` beside the checkpoints, with counts of elements, not bytes.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback


def optimizer_elements(optimizer: Any) -> int:
    """Count the elements of Adam's first moments on this rank: one per parameter element that it updates."""
    total = 0
    for state in optimizer.state.values():
        moment = state["exp_avg"]
        total += (moment.to_local() if isinstance(moment, DTensor) else moment).numel()
    return total


def parameter_facts(model: torch.nn.Module) -> dict[str, Any]:
    """Return global and local element counts, and how parameters are stored between steps."""
    total = local = sharded = unavailable = 0
    for parameter in model.parameters():
        status = getattr(parameter, "ds_status", None)
        if status is not None:
            total += int(parameter.ds_numel)
            local += parameter.data.numel()
            unavailable += status.name == "NOT_AVAILABLE"
        elif isinstance(parameter, DTensor):
            total += math.prod(parameter.shape)
            local += parameter.to_local().numel()
            sharded += parameter.to_local().shape != parameter.shape
        else:
            total += parameter.numel()
            local += parameter.numel()
    return {
        "parameters": sum(1 for _ in model.parameters()),
        "elements": total,
        "local_elements": local,
        "sharded_dtensors": sharded,
        "zero_not_available": unavailable,
    }


class RecordPartition(TrainerCallback):
    """Writes `partition-rank{r}.json` at the end of the run's first step (the first after a resume, too)."""

    def __init__(self, trainer: Any, output_dir: Path) -> None:
        self.trainer = trainer
        self.output_dir = output_dir
        self.written = False

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **named: Any) -> None:
        if self.written:
            return
        self.written = True
        accelerator = self.trainer.accelerator
        engine = self.trainer.model_wrapped
        optimizer = named["optimizer"]
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        facts = {
            "distributed_type": accelerator.distributed_type.value,
            "wrapped": type(engine).__name__,
            "world_size": accelerator.num_processes,
            "zero_stage": stage()
            if callable(stage := getattr(engine, "zero_optimization_stage", None))
            else None,
            "optimizer": type(optimizer).__name__,
            "optimizer_elements": optimizer_elements(optimizer),
            **parameter_facts(accelerator.unwrap_model(engine)),
        }
        path = self.output_dir / f"partition-rank{accelerator.process_index}.json"
        path.write_text(json.dumps(facts, indent=2) + "\n")
