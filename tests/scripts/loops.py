"""A hand-written training loop over a tiny model: `for`, `for` over data, or `while`; one rank, DDP or FSDP2.

Each rank appends a line per step to `rank{R}.jsonl`: step, loss, a random number of every generator, the
samples. Writes `weights.sha256` at the end. Imports neither transformers nor TRL. Run it with `python`,
`torchrun` or `grpo-run launch`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler, RandomSampler, get_worker_info

from grpo_run.trainers import loop

WIDTH, SAMPLES = 16, 22


class Samples(Dataset[Any]):
    """Numbered samples, with noise from a global generator of the rank; workers add none."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        sample = torch.full((WIDTH,), index / SAMPLES)
        return index, sample + torch.randn(WIDTH) / 100 if get_worker_info() is None else sample


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--form", choices=("for", "data", "while"), default="for")
    parser.add_argument("--mode", choices=("none", "ddp", "fsdp2"), default="none")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--keep-workers", action="store_true")
    parser.add_argument("--save-every", type=int)
    parser.add_argument("--save-total-limit", type=int)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument(
        "--accumulate", type=int, default=1, help="steps of the loop for one of the optimizer"
    )
    parser.add_argument(
        "--leave-after", type=int, help="leave the loop by `break` after as many steps of this process"
    )
    parser.add_argument(
        "--kill-behind", action="store_true", help="the last rank kills itself in the second loop, once"
    )
    parser.add_argument("--twice", action="store_true", help="a second loop follows")
    return parser.parse_args()


class Training:
    """Model, optimizer and what a loop changes."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        torch.manual_seed(3)
        np.random.seed(4)
        random.seed(5)
        model: Any = torch.nn.Sequential(
            torch.nn.Linear(WIDTH, 32), torch.nn.Dropout(0.1), torch.nn.GELU(), torch.nn.Linear(32, 32),
            torch.nn.BatchNorm1d(32), torch.nn.Linear(32, WIDTH),
        )  # fmt: skip
        if arguments.mode == "ddp":
            model = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=0.002)
        elif arguments.mode == "fsdp2":
            from torch.distributed.fsdp import fully_shard

            model = torch.nn.Sequential(
                *(layer for layer in model if not isinstance(layer, torch.nn.BatchNorm1d))
            )
            for layer in model:
                if isinstance(layer, torch.nn.Linear):
                    fully_shard(layer)
            fully_shard(model)
        self.rank = int(os.environ.get("RANK", "0"))
        self.arguments = arguments
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, arguments.steps)
        self.generator = torch.Generator().manual_seed(100 + self.rank)
        self.state: dict[str, Any] = {
            "model": self.model, "optimizer": self.optimizer, "scheduler": self.scheduler,
            "generator": self.generator, "total": 0.0, "history": [],
        }  # fmt: skip
        self.history = self.state["history"]
        torch.manual_seed(1000 + self.rank)

    def loader(self) -> DataLoader[Any]:
        data = Samples()
        sampler: Any = RandomSampler(data)
        if dist.is_initialized() and dist.get_world_size() > 1:
            sampler = DistributedSampler(data, shuffle=True, seed=7)
        workers = self.arguments.workers
        return DataLoader(
            data, batch_size=4, sampler=sampler, num_workers=workers,
            persistent_workers=bool(workers and self.arguments.keep_workers),
        )  # fmt: skip

    def batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        indices = torch.randint(SAMPLES, (4,), generator=self.generator)
        return indices, indices[:, None] / SAMPLES + torch.randn(4, WIDTH) / 100

    def step(self, step: int, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        indices, samples = batch
        if step % self.arguments.accumulate == 0:
            self.optimizer.zero_grad()
        loss = (self.model(samples) - samples.flip(1)).square().mean()
        loss.backward()
        if (step + 1) % self.arguments.accumulate == 0:
            self.optimizer.step()
            self.scheduler.step()
        self.state["total"] += loss.item()
        self.history.append(int(indices.sum()))
        line = {
            "step": step, "loss": loss.item(), "total": self.state["total"], "samples": indices.tolist(),
            "rate": self.scheduler.get_last_lr()[0], "history": len(self.history),
            "random": [random.random(), float(np.random.rand()), float(torch.rand(()))],
        }  # fmt: skip
        with open(self.arguments.output_dir / f"rank{self.rank}.jsonl", "a") as file:
            file.write(json.dumps(line) + "\n")
        time.sleep(self.arguments.step_seconds)


def iterate(training: Training, arguments: argparse.Namespace, folder: Path) -> Iterator[int]:
    """Take the steps in the form that was asked for."""
    settings: dict[str, Any] = {
        "state": training.state, "output_dir": folder,
        "save_every": arguments.save_every, "save_total_limit": arguments.save_total_limit,
    }  # fmt: skip
    if arguments.form == "while":
        run = loop.begin(**settings)
        while run.step < arguments.steps and not run.ended:
            training.step(run.step, training.batch())
            step = run.step
            run.commit(step)
            yield step
        run.end()
        return
    data = training.loader() if arguments.form == "data" else None
    steps: Any = loop.steps(arguments.steps, **settings, **({"data": data} if data is not None else {}))
    for taken, item in enumerate(steps, 1):  # not in `state`, as the patience of many scripts
        step, batch = item if data is not None else (item, training.batch())
        training.step(step, batch)
        if taken == arguments.leave_after:
            break
        yield step


def kill_once(training: Training) -> None:
    """Kill the last rank, when all ranks have left the first loop."""
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    if world_size > 1:
        dist.barrier()
    marker = training.arguments.output_dir / "killed"
    if training.rank == world_size - 1 and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if world_size > 1:
        dist.barrier()


def main() -> None:
    arguments = parse()
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    if arguments.mode != "none":
        dist.init_process_group("gloo")
    training = Training(arguments)
    for _ in iterate(training, arguments, arguments.output_dir):
        pass
    if arguments.twice:
        for _ in iterate(training, arguments, arguments.output_dir / "second"):
            if arguments.kill_behind:
                kill_once(training)
    digest = hashlib.sha256()
    state = training.model.state_dict()
    for name in sorted(state):
        value = state[name]
        value = value.full_tensor() if hasattr(value, "full_tensor") else value
        digest.update(value.numpy().tobytes())
    digest.update(repr((training.state["total"], training.history, torch.rand(3))).encode())
    if training.rank == 0:
        (arguments.output_dir / "weights.sha256").write_text(digest.hexdigest() + "\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
