"""Checkpoints that a real trainer wrote, with manifests. Imports torch and transformers: import it inside a
test.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from grpo_run.runtime.checkpoints.manifest import FORMAT_LIBRARIES, Identity, TrainCall, write_manifest
from grpo_run.runtime.rank.trainer_facts import TrainerFacts
from grpo_run.runtime.upstream.versions import installed_versions


class Sum(torch.nn.Module):
    """A linear model of eight inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 1)

    def forward(self, numbers: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the squared error of the predicted sum."""
        return {"loss": ((self.layer(numbers).squeeze(-1) - labels) ** 2).mean()}


class Samples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """A dataset of 32 rows."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        numbers = torch.arange(8, dtype=torch.float32) + index
        return {"numbers": numbers, "labels": numbers.sum()}


class Publish(TrainerCallback):
    """Writes the manifest after transformers has written the checkpoint."""

    def __init__(self, trainer: Any, call: TrainCall) -> None:
        self.trainer, self.call = trainer, call

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the manifest as the guard does."""
        identity = Identity(
            run_id="run-1", train_call=self.call, step=state.global_step, world_size=1,
            versions=installed_versions(FORMAT_LIBRARIES),
            **TrainerFacts.of(self.trainer, 1).manifest_fields,
        )  # fmt: skip
        write_manifest(Path(args.output_dir) / identity.folder, identity)


def train(folder: Path, *, steps: int, save_steps: int) -> None:
    """Train a linear model, and write a checkpoint every `save_steps` steps."""
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, save_steps=save_steps, per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[], disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(model=Sum(), args=arguments, train_dataset=Samples())
    call = TrainCall(ordinal=1, trainer_class="Trainer", output_dir=str(folder))
    trainer.add_callback(Publish(trainer, call))
    trainer.train()
