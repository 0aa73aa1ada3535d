"""Hand-written loops that are odd but legitimate, one `--kind` at a time, on one rank or with DDP on several.

Writes `weights.sha256` at the end: of the model, of what the steps have logged and of the generators' next
numbers. Run it with `torchrun` or `grpo-run launch`.
"""

from __future__ import annotations

import argparse
import hashlib
import inspect
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from odd_loop_kinds import bodies, data, models, values
from odd_loop_kinds.training import Training

KINDS: dict[str, Callable[[Training], None]] = {
    name: function
    for module in (bodies, data, models, values)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and function.__module__ == module.__name__
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--kind", choices=KINDS, required=True)
    arguments = parser.parse_args()
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        dist.init_process_group("gloo")
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    training = Training(arguments.output_dir, ddp=ranks > 1)
    KINDS[arguments.kind](training)
    digest = hashlib.sha256()
    for name, value in training.plain.state_dict().items():
        digest.update(name.encode() + value.numpy().tobytes())
    ends = (training.logged, torch.rand(2).tolist(), random.random(), float(np.random.rand()))
    digest.update(repr(ends).encode())
    (arguments.output_dir / f"end{rank}.txt").write_text(repr(ends))
    if rank == 0:
        (arguments.output_dir / "weights.sha256").write_text(digest.hexdigest() + "\n")
    if ranks > 1:
        dist.barrier()


if __name__ == "__main__":
    main()
