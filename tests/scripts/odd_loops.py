"""Hand-written loops that are odd but legitimate, one `--kind` at a time, on one rank or with DDP on several.

Writes `weights.sha256` at the end: of the model, of what the steps have logged and of the generators' next
numbers. Run it with `torchrun` or `grpo-run launch`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from odd_loop_kinds.bodies import (
    agreed,
    called_twice,
    caught,
    changing,
    committed,
    in_functions,
    listed,
    no_steps,
    progress_bar,
    saved,
    two_loops,
)
from odd_loop_kinds.data import batches, stream, workers
from odd_loop_kinds.models import (
    accumulated,
    adversaries,
    averaged,
    compiled,
    compiled_in_place,
    scaled,
    schedulers,
    shared,
)
from odd_loop_kinds.training import Training
from odd_loop_kinds.values import referred, values

KINDS: dict[str, Callable[[Training], None]] = {
    function.__name__: function
    for function in (
        progress_bar, caught, two_loops, called_twice, workers, stream, batches, accumulated, schedulers,
        averaged, compiled,
        compiled_in_place, scaled, no_steps, shared, agreed, adversaries, values, referred, changing,
        in_functions, listed, committed, saved,
    )
}  # fmt: skip


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
