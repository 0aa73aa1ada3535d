"""Training loop of two ranks, with and without `loop.steps`; rank 0 prints the seconds of each block as JSON.

Run by `benchmarks/loops.py`. A step is one of a small model under DistributedDataParallel, whose backward
pass lets the ranks meet. A round has one block of each kind, and every other round has them in the opposite
order. The first steps of a block do not count: they include the start of a loop, and the first snapshot.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from grpo_run.trainers import loop

SKIPPED_STEPS = 10


def main() -> None:
    """Measure all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    batch = torch.randn(16, 64)
    total = options.steps + SKIPPED_STEPS

    def take(steps: Iterable[int]) -> float:
        """Take the steps, and return the mean seconds of those that count."""
        began = 0.0
        for step in steps:
            if step == SKIPPED_STEPS:
                began = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return (time.perf_counter() - began) / options.steps

    results = []
    with tempfile.TemporaryDirectory() as name:
        folder = [name]
        dist.broadcast_object_list(folder)
        state = {"model": model, "optimizer": optimizer}
        for number in range(options.rounds + 1):
            taken = {}
            for kind in ("plain", "loop") if number % 2 else ("loop", "plain"):
                dist.barrier()
                if kind == "plain":
                    taken[kind] = take(range(total))
                    continue
                steps = loop.steps(total + 1, state=state, output_dir=Path(folder[0], str(number)))
                taken[kind] = take(step for step, _ in zip(steps, range(total), strict=False))
                steps.end()
            if number:  # the first round connects
                results.append(taken)
        dist.barrier()
    if dist.get_rank() == 0:
        print("RESULTS " + json.dumps(results), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
