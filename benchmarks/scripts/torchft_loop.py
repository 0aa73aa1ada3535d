"""A loop for torchft, with the model and the step log of `grpo.py`: two replicas of one process each.

torchft needs a script that is written for it: its manager gives gradients, and the optimizer's step is taken
only if all replicas of the quorum have them. Without a replica ID this script is the launcher: it starts
torchft's lighthouse and one torchrun a replica, as torchft's own examples do. It does not use `grpo_run`.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests" / "scripts"))

REPLICAS = 2


def parse() -> argparse.Namespace:
    """Return the arguments that `grpo.py` has too, and those of this script."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output-dir", type=Path, required=True)
    parser.add_argument("--step-log", required=True)
    parser.add_argument("--max-steps", type=int, required=True)
    parser.add_argument("--step-seconds", type=float, default=0.0)
    parser.add_argument("--restarts", type=int, default=0)
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_known_args()[0]


def launch(restarts: int) -> int:
    """Start the lighthouse and the replicas, and wait for them."""
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="[::]:0", min_replicas=1, join_timeout_ms=10_000)
    replicas = []
    for replica in range(REPLICAS):
        address = "http://localhost:" + lighthouse.address().rpartition(":")[2]
        variables = {"TORCHFT_LIGHTHOUSE": address, "REPLICA_GROUP_ID": str(replica)}
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1",
                 "--monitor-interval", "0.1", "--max-restarts", str(restarts)]  # fmt: skip
        command = [sys.executable, *words, *sys.argv]
        replicas.append(subprocess.Popen(command, env={**os.environ, **variables}))
    try:
        return max(one.wait() for one in replicas)
    finally:
        for one in replicas:
            one.terminate()
        lighthouse.shutdown()


def train(arguments: argparse.Namespace, replica: str) -> None:
    """Train one replica."""
    import tiny
    import torch
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    model = tiny.model(len(tiny.tokenizer()), seed=11)
    plain = torch.optim.AdamW(model.parameters())

    def load(state: dict[str, dict[str, object]]) -> None:
        model.load_state_dict(state["model"])
        plain.load_state_dict(state["optimizer"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)), min_replica_size=1, load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": plain.state_dict()},
        replica_id=f"replica_{replica}", timeout=timedelta(seconds=30),
    )  # fmt: skip
    wrapped = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, plain)
    with open(f"{arguments.step_log}.{replica}", "ab", buffering=0) as log:
        while manager.current_step() < arguments.max_steps:
            tokens = torch.randint(3, 30, (4, 12))
            time.sleep(arguments.step_seconds)
            optimizer.zero_grad()
            wrapped(input_ids=tokens, labels=tokens).loss.backward()
            optimizer.step()
            log.write(f"{time.monotonic():.6f} {manager.current_step()} {os.getpid()}\n".encode())
    manager.shutdown(wait=False)


def main() -> int:
    arguments = parse()
    replica = os.environ.get("REPLICA_GROUP_ID")
    if replica is None:
        return launch(arguments.restarts)
    with contextlib.suppress(KeyboardInterrupt):
        train(arguments, replica)
    return 0


if __name__ == "__main__":
    sys.exit(main())
