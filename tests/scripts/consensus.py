"""Ranks that decide together: they agree, then disagree on purpose and write down what was raised.

Runs under `grpo-run launch` and under torchrun. Each rank writes `answers<rank>.json`: its rounds and
answers, and for each disagreement the error and when it was raised.

With `--leave PLACES` (separated by commas, one for each attempt), rank 1 leaves the last loop early: into
another collective, a Trainer or the end of the script.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

from grpo_run.runtime.errors import ConsensusError
from grpo_run.trainers import consensus

RANK = int(os.environ["RANK"])
LATE_SECONDS = 1.5
"""Longer than a deadlock takes to be proved."""


def agree() -> list[object]:
    """Rank 0 needs 3 rounds, every other rank 7."""
    need, rounds = (3 if RANK == 0 else 7), 0
    for _ in consensus.while_any(lambda: rounds < need):  # noqa: B023 - the present value is meant
        rounds += 1
    left = need
    while consensus.any(left > 0):
        left -= 1
    return [
        rounds,
        left,
        consensus.any(RANK == 1),
        consensus.any(False),
        consensus.all(RANK == 1),
        consensus.all(True),
    ]


def served_by_a_thread() -> bool:
    """A rank that is late, and one whose thread serves the group that the other rank waits in: both are
    healthy.
    """
    group = dist.new_group()
    gathered = [torch.zeros(1) for _ in range(dist.get_world_size())]

    def serve() -> None:
        time.sleep(LATE_SECONDS)
        dist.all_gather(gathered, torch.ones(1), group=group)

    thread = threading.Thread(target=serve)
    if RANK == 0:
        thread.start()
    else:
        dist.all_gather(gathered, torch.ones(1), group=group)
    agreed = consensus.all(True)
    if RANK == 0:
        thread.join()
    return agreed


def other_line() -> None:
    """Two lines, one function."""
    if RANK == 0:
        consensus.any(True)
    else:
        consensus.any(True)


def other_function() -> None:
    """Two functions on one line."""
    (consensus.all if RANK == 0 else consensus.any)(True)


def other_count() -> None:
    """Rank 0 calls three times where the others call twice."""
    for _ in range(3 if RANK == 0 else 2):
        consensus.any(False)
    consensus.all(True)


def other_iteration() -> None:
    """Rank 0 leaves a loop on its own and begins it again."""
    for _ in range(2):
        for turn, _ in enumerate(consensus.while_any(lambda: True)):
            if RANK == 0 and turn == 1:
                break


def error_of(disagree: Callable[[], None]) -> list[object]:
    """Return the error, and when it was raised."""
    try:
        disagree()
    except ConsensusError as error:
        return [str(error), time.time()]
    raise AssertionError("nothing was raised")


def leave(place: str, parallel: torch.nn.Module) -> None:
    """Leave for a place that the other ranks do not go to."""
    print(f"left at {time.time()}", flush=True)
    if place == "all_gather":
        dist.all_gather([torch.zeros(1) for _ in range(dist.get_world_size())], torch.ones(1))
    elif place == "barrier":
        dist.barrier()
    elif place == "backward":
        parallel(torch.ones(1, 2)).sum().backward()
    elif place == "train":
        import sft
        import tiny

        tiny.use_test_shims()
        tokenizer = tiny.tokenizer()
        options = tiny.argument_parser("").parse_args(["--output-dir", "out", "--max-steps", "1"])
        sft.trainer_for(options, Path("out"), tokenizer, tiny.model(len(tokenizer), 0)).train()
    else:
        sys.exit(0)


def main() -> None:
    """Agree, disagree, and leave early if asked to."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--leave", default="")
    places = parser.parse_args().leave.split(",")
    dist.init_process_group("gloo")
    if places == [""]:
        answers = {"agreed": agree(), "served": served_by_a_thread()} | {
            one.__name__: error_of(one) for one in (other_line, other_function, other_count, other_iteration)
        }
        Path(f"answers{RANK}.json").write_text(json.dumps(answers))
        dist.barrier()
        return
    place = places[int(os.environ["TORCHELASTIC_RESTART_COUNT"])]
    parallel = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    done = 0
    try:
        for _ in consensus.while_any(lambda: done < 5):  # noqa: B023 - the present value is meant
            done += 1
            if RANK == 1 and done == 3:
                leave(place, parallel)
    except ConsensusError as error:
        print(f"raised at {time.time()}: {str(error).splitlines()[0]}", flush=True)
        raise


if __name__ == "__main__":
    main()
