"""A training loop of its own on two ranks, with no Trainer and no loop of grpo-run; `--how` says what goes
wrong.

What happens, happens once in a run (a file marks it), at iteration `--at` on the last rank unless it says
otherwise. Prints `begins` when it starts, `iteration N` on rank 0, and writes `weights.sha256` at the end.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

HOWS = ("none", "exception", "always", "kill", "lock", "os-exit", "interrupt", "oserror")


def happen(how: str, marker: Path) -> None:
    """Do what goes wrong, unless it has happened before."""
    if how == "always":
        raise ValueError("at the same place every time")
    if marker.exists():
        return
    marker.touch()
    if how == "exception":
        raise ValueError("a defect of the script")
    if how == "oserror":
        raise OSError("the disk was away")
    if how == "interrupt":
        raise KeyboardInterrupt
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()


def handle(code: str) -> None:
    """Install a handler of SIGTERM of the script's own: it saves for a moment and returns a code, or never
    ends.
    """

    def on_term(number: int, frame: Any) -> None:
        print("handler begins", flush=True)
        if code == "never":
            time.sleep(600)
        time.sleep(0.5)
        Path(f"handled.{os.environ['RANK']}").touch()
        sys.exit(int(code))

    signal.signal(signal.SIGTERM, on_term)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--how", choices=HOWS, default="none")
    parser.add_argument("--at", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--handler", help="exit code of a handler of SIGTERM, or never")
    arguments = parser.parse_args()
    if arguments.handler:
        handle(arguments.handler)
    print("begins", flush=True)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(7)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for iteration in range(1, arguments.iterations + 1):
        time.sleep(arguments.seconds)
        if iteration == arguments.at and rank == world - 1 and arguments.how not in ("none", "os-exit"):
            happen(arguments.how, Path("happened"))
        loss = model(torch.full((2, 4), float(iteration + rank))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        if rank == 0:
            print(f"iteration {iteration}", flush=True)
    if rank == 0:
        data = torch.cat([value.flatten() for value in model.state_dict().values()]).numpy().tobytes()
        Path("weights.sha256").write_text(hashlib.sha256(data).hexdigest())
    dist.barrier()
    if arguments.how == "os-exit":
        os._exit(0)


if __name__ == "__main__":
    main()
