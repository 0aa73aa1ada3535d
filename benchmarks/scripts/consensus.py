"""Loop of two ranks, with and without `consensus.while_any`; rank 0 prints the seconds of each block as JSON.

Run by `benchmarks/consensus.py` under each launcher. A round has one block of each kind, and every other
round has them in the opposite order. `all_reduce` is what a script would write by hand: a flag, reduced on
the default group.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from grpo_run.trainers import consensus


def plain(iterations: int) -> Iterator[None]:
    """Iterate without asking anybody."""
    for _ in range(iterations):
        yield


def while_any(iterations: int) -> Iterator[None]:
    """Iterate as long as any rank has not done its iterations."""
    left = iterations + 1

    def more() -> bool:
        nonlocal left
        left -= 1
        return left > 0

    return consensus.while_any(more)


def all_reduce(iterations: int) -> Iterator[None]:
    """The same by hand."""
    left = iterations
    while True:
        flag = torch.tensor([left > 0], dtype=torch.int32)
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
        if not flag.item():
            return
        yield
        left -= 1


def work(seconds: float) -> None:
    """Compute for a fixed time, and meet the other rank, as in a model whose weights are sharded; nothing for
    0 s.
    """
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass
    if seconds:
        dist.barrier()


def main() -> None:
    """Measure all rounds."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--iterations", type=int, required=True)
    parser.add_argument("--work-seconds", type=float, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    kinds: list[Callable[[int], Iterator[None]]] = [plain, while_any, all_reduce]
    results = []
    for number in range(options.rounds + 1):
        taken = {}
        for kind in kinds if number % 2 else reversed(kinds):
            dist.barrier()
            began = time.perf_counter()
            for _ in kind(options.iterations):
                work(options.work_seconds)
            taken[kind.__name__] = (time.perf_counter() - began) / options.iterations
        if number:  # the first round connects
            results.append(taken)
    if dist.get_rank() == 0:
        print("RESULTS " + json.dumps(results), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
