"""Real trainers of TRL on the tiny model of the scripts, which train on the CPU in milliseconds."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from support.runs import SCRIPTS


def tiny() -> Any:
    """Return the module that the scripts share."""
    sys.path.insert(0, str(SCRIPTS))
    try:
        return importlib.import_module("tiny")
    finally:
        sys.path.remove(str(SCRIPTS))


def tiny_trainer(kind: str, folder: Path, *, rows: int = 8, peft: Any = None, **settings: Any) -> Any:
    """Return a trainer that has not trained.

    Args:
        kind: `GRPO`, `RLOO` or `SFT`.
        folder: for its output.
        rows: of its data set.
        peft: configuration of adapters; None for none.
        settings: of its configuration; `reward_funcs` is the trainer's.
    """
    import torch
    import trl

    torch.set_num_threads(1)  # more only wait for one another with tensors of this size
    shared = tiny()
    tokenizer, rewards = shared.tokenizer(), settings.pop("reward_funcs", [len])
    rollouts = {"num_generations": 4, "max_completion_length": 6, "beta": 0.0} if kind != "SFT" else {}
    common = {
        "output_dir": str(folder), "per_device_train_batch_size": 8, "use_cpu": True, "bf16": False,
        "activation_checkpointing": False, "report_to": [], "disable_tqdm": True,
    }  # fmt: skip
    return getattr(trl, f"{kind}Trainer")(
        model=shared.model(len(tokenizer), 11), processing_class=tokenizer, peft_config=peft,
        args=getattr(trl, f"{kind}Config")(**{**common, **rollouts, **settings}),
        train_dataset=shared.texts(rows) if kind == "SFT" else shared.prompts(rows),
        **({} if kind == "SFT" else {"reward_funcs": rewards}),
    )  # fmt: skip
