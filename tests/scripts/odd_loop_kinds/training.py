"""What all odd loops train: a small model, with its optimizer and what the steps have logged."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_run.trainers import loop

STEPS, WIDTH = 7, 8


class Training:
    """A model, its optimizer, and what the steps have logged."""

    def __init__(self, output_dir: Path, *, ddp: bool) -> None:
        torch.manual_seed(1)
        np.random.seed(2)
        random.seed(3)
        self.ddp = ddp
        self.folder = output_dir
        self.plain = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 16), torch.nn.Dropout(0.2), torch.nn.ReLU(), torch.nn.Linear(16, WIDTH)
        )
        self.model: Any = torch.nn.parallel.DistributedDataParallel(self.plain) if ddp else self.plain
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.05)
        self.logged: list[Any] = []
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "logged": self.logged}
        torch.manual_seed(10 + int(os.environ.get("RANK", "0")))

    def steps(self, n: int = STEPS, *, name: str = "loop", **settings: Any) -> Any:
        """Begin a loop."""
        return loop.steps(n, state=self.state, output_dir=self.folder / name, **settings)

    def loss(self, batch: torch.Tensor | None = None) -> torch.Tensor:
        """The loss of a random batch."""
        batch = torch.randn(4, WIDTH) if batch is None else batch
        return (self.model(batch) - batch.flip(1)).square().mean()

    def step(self, batch: torch.Tensor | None = None) -> None:
        """A step of the optimizer."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        self.logged.append(loss.item())
