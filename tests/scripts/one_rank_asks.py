"""A plain TRL SFT script: in each of several trainings, something of one rank alone asks to stop or to save.

With `--on-all`, the same is asked for on all ranks, at the step at which it takes effect on all otherwise.
Writes `asked.json`: of each training the last step, a digest of the weights, and the checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import os
from typing import Any

import tiny
from datasets import IterableDataset
from safetensors.torch import save
from transformers import EarlyStoppingCallback, TrainerCallback
from trl import SFTConfig, SFTTrainer

STEP = 3
AFTER_THE_NEXT_STEP = ("stop", "save", "evaluate")
KINDS = (*AFTER_THE_NEXT_STEP, "metric", "data", "epoch")
RANK = int(os.environ["RANK"])
SAMPLES_PER_STEP = 4 * int(os.environ["WORLD_SIZE"])


class Asks(TrainerCallback):
    """Asks the trainer for something once, on rank 1 or on all."""

    def __init__(self, kind: str, step: int, on_all: bool) -> None:
        self.kind = kind
        self.step = step
        self.here = on_all or RANK == 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.here and state.global_step == self.step:
            names = {"stop": "should_training_stop", "save": "should_save", "evaluate": "should_evaluate"}
            if self.kind in names:
                setattr(control, names[self.kind], True)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self.here and self.kind == "epoch":
            control.should_training_stop = True


class OwnMetric(EarlyStoppingCallback):
    """Early stopping by a metric that each rank computes for itself."""

    def __init__(self, on_all: bool) -> None:
        super().__init__(early_stopping_patience=1)
        self.improves = RANK == 0 and not on_all

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **kwargs: Any) -> None:
        better = self.improves or state.global_step < STEP
        own = {**metrics, "eval_loss": 1e6 * state.global_step if better else -1e6}
        super().on_evaluate(args, state, control, own, **kwargs)


def train(kind: str, arguments: Any) -> dict[str, Any]:
    """Train once, and return what came of it."""
    output_dir = arguments.output_dir / kind
    tokenizer = tiny.tokenizer()
    step = STEP + (arguments.on_all and kind in AFTER_THE_NEXT_STEP)
    settings = {
        **tiny.settings(arguments), "output_dir": str(output_dir), "save_steps": 100, "max_length": 32,
        **({"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss",
            "greater_is_better": True} if kind == "metric" else {}),
        **({"max_steps": -1, "num_train_epochs": 2} if kind == "epoch" else {}),
        **({"accelerator_config": {"dispatch_batches": False}} if kind == "data" else {}),
    }  # fmt: skip
    data: Any = tiny.texts((STEP if kind == "epoch" else 12) * SAMPLES_PER_STEP)
    if kind == "data":  # rank 0 has a batch more
        longer = RANK == 0 and not arguments.on_all
        data = IterableDataset.from_generator(lambda: iter(tiny.texts((STEP + longer) * SAMPLES_PER_STEP)))
    trainer = SFTTrainer(
        model=tiny.model(len(tokenizer), arguments.seed),
        args=SFTConfig(**settings),
        train_dataset=data,
        eval_dataset=tiny.texts(4),
        processing_class=tokenizer,
        callbacks=[OwnMetric(arguments.on_all) if kind == "metric" else Asks(kind, step, arguments.on_all)],
    )
    trainer.train()
    state = trainer.accelerator.get_state_dict(trainer.model_wrapped)
    return {
        "step": trainer.state.global_step,
        "weights": hashlib.sha256(
            save({name: state[name].contiguous() for name in sorted(state)})
        ).hexdigest(),
        "checkpoints": sorted(path.name for path in output_dir.glob("checkpoint-*")),
        "evaluated": [line["step"] for line in trainer.state.log_history if "eval_loss" in line],
    }


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--on-all", action="store_true")
    parser.add_argument("--kinds", nargs="*", default=list(KINDS))
    arguments = parser.parse_args()
    found = {kind: train(kind, arguments) for kind in arguments.kinds}
    if RANK == 0:
        (arguments.output_dir / "asked.json").write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
