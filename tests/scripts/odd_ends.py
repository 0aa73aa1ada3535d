"""A plain TRL script (SFT) whose end, or whose use of trainers, is unusual; `--end` says how.

`os-exit` leaves with `os._exit(0)` after training, `inner` trains another model in a callback, `destroyed`
destroys the process group and then frees the trainer; it checks that the launcher keeps the group. Writes
`weights.sha256`.
"""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path
from typing import Any

import tiny
import torch
from sft import trainer_for
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer

ENDS = ("os-exit", "inner", "destroyed")


class TrainInside(TrainerCallback):
    """Trains a small model of its own after every second step, and notes its loss."""

    def __init__(self, root: Path, tokenizer: Any) -> None:
        self.root = root
        self.tokenizer = tokenizer

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step % 2:
            return
        random_state = torch.get_rng_state()
        probe = SFTTrainer(
            model=tiny.model(len(self.tokenizer), state.global_step),
            args=SFTConfig(
                output_dir=str(self.root / "probe"), max_steps=3, save_strategy="no", report_to=[],
                use_cpu=True,
                bf16=False, disable_tqdm=True, per_device_train_batch_size=2, max_length=32,
            ),
            train_dataset=tiny.texts(8),
            processing_class=self.tokenizer,
        )  # fmt: skip
        loss = probe.train().training_loss
        torch.set_rng_state(random_state)
        with open(self.root / "probes.txt", "a") as file:
            file.write(f"{state.global_step} {loss:.6f}\n")


def main() -> None:
    parser = tiny.argument_parser(__doc__)
    parser.add_argument("--end", choices=ENDS, required=True)
    arguments = parser.parse_args()
    arguments.output_dir.mkdir(exist_ok=True)
    tokenizer = tiny.tokenizer()
    model = tiny.model(len(tokenizer), arguments.seed)
    trainer = trainer_for(arguments, arguments.output_dir / "sft", tokenizer, model)
    if arguments.end == "inner":
        trainer.add_callback(TrainInside(arguments.output_dir, tokenizer))
    trainer.train()
    tiny.write_digest(trainer, arguments.output_dir)
    if arguments.end == "os-exit":
        os._exit(0)
    if arguments.end == "destroyed":
        group = weakref.ref(torch.distributed.group.WORLD)
        torch.distributed.destroy_process_group()
        del trainer, model
        gc.collect()
        assert group() is not None, "the last holder of the process group must not be DDP"


if __name__ == "__main__":
    main()
