"""A stand-in for a TRL trainer in its loop, and helpers that begin, save and restore its exact state."""

from __future__ import annotations

import json
from collections import defaultdict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from grpo_run.runtime.rank.exact.format import rank_state_path
from grpo_run.runtime.rank.exact.state import ExactState


class Trainer:
    """The attributes of a TRL trainer in its loop that the exact state reads or sets."""

    def __init__(self, **changes: Any) -> None:
        self.args = SimpleNamespace(
            steps_per_generation=2, gradient_accumulation_steps=1, device=torch.device("cpu"),
            sync_ref_model=False, dataloader_num_workers=0, dataloader_persistent_workers=False,
        )  # fmt: skip
        self.num_iterations = 2
        self.state = SimpleNamespace(global_step=3, max_steps=9, epoch=0.5)
        self.control = SimpleNamespace(should_training_stop=False)
        data: Any = range(6)
        loader = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 2, drop_last=False))
        self.callback_handler = SimpleNamespace(train_dataloader=loader, callbacks=[])
        self.reward_funcs: list[Any] = []
        self.model = torch.nn.Linear(1, 1)
        self.ref_model: Any = None
        self._step = 0
        self._buffered_inputs: Any = None
        self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
        self._logs: dict[str, Any] = {
            "prompt": deque(maxlen=4), "images": deque(maxlen=4),
            "rewards": defaultdict(lambda: deque(maxlen=4)),
        }  # fmt: skip
        self._pending_extra_logs: Any = defaultdict(list)
        self._pending_metrics: Any = defaultdict(list)
        self._tr_loss = torch.tensor(0.0)
        self._total_loss_scalar = 0.0
        self._globalstep_last_logged = self._initial_global_step = self.state.global_step
        self.loaded_rng: list[str] = []
        self.finalized: list[float] = []
        vars(self).update(changes)

    def _load_rng_state(self, checkpoint: str) -> None:
        self.loaded_rng.append(checkpoint)

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> str:
        self.finalized.append(start_time)
        return "result"


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Begun:
    """Begins the exact state of `train()` calls; `warned` collects the warnings."""

    def __init__(self) -> None:
        self.warned: list[str] = []

    def __call__(
        self,
        trainer: Any,
        resumed_from: Path | None = None,
        rank: int = 0,
        world_size: int = 1,
        **options: Any,
    ) -> ExactState:
        made = ExactState(trainer, rank=rank, world_size=world_size, warn=self.warned.append, **options)
        made.begin(resumed_from)
        return made

    def again(self, trainer: Any, folder: Path, fresh: Any = None) -> Any:
        """Save the state of one trainer, restore it into a new one, and return that."""
        self(trainer).save(folder)
        fresh = fresh or Trainer()
        self(fresh, folder)
        return fresh


def read_json(folder: Path, rank: int = 0) -> dict[str, Any]:
    value: dict[str, Any] = json.loads(rank_state_path(folder, rank).read_text())
    return value
