"""Run random programs on real ranks, one after the other: each finishes, whatever its ranks wait for.

Every program comes from `support.collective_programs`, drawn from its number on every rank. Pauses make ranks
late for up to `--late` seconds, long enough for the watchdog to look.
"""

from __future__ import annotations

import argparse
import queue
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from random import Random
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from support.collective_programs import MAIN, WORLD, Program, Step, draw_program

DTYPES = {"Float": torch.float32, "Long": torch.int64, "Byte": torch.uint8}
LIMIT = timedelta(seconds=100)
LONGEST_PAUSE = 40


class Runner:
    """Runs this rank's part of one program."""

    def __init__(self, program: Program, rank: int, late: float) -> None:
        self.program, self.rank, self.late = program, rank, late
        self.groups = {name: dist.new_group(list(members)) for name, members in program.groups.items()}
        self.groups[WORLD] = dist.group.WORLD
        self.handles = {
            step.key: queue.Queue[Any]() for steps in program.threads[rank].values() for step in steps
        }
        self.kept: dict[str, Any] = {}
        self.threads = {
            name: threading.Thread(target=self.run, args=(steps,))
            for name, steps in program.threads[rank].items()
            if name != MAIN
        }

    def run(self, steps: list[Step]) -> None:
        """Run the steps of one thread."""
        for step in steps:
            perform: Callable[[Step], None] = getattr(self, f"do_{step.kind}")
            perform(step)

    def do_issue(self, step: Step) -> None:
        """Issue a collective and keep its handle, also for other threads."""
        work = self.issue(step, self.groups[step.group])
        self.kept[step.key] = work
        self.handles[step.key].put(work)

    def issue(self, step: Step, group: Any) -> Any:
        """Issue a collective."""
        size = dist.get_world_size(group)
        dtype = DTYPES[step.dtype]

        def one() -> torch.Tensor:
            return torch.ones(step.elements, dtype=dtype)

        def each() -> list[torch.Tensor]:
            return [one() for _ in range(size)]

        at_root = each() if self.rank == step.root else None
        options: dict[str, Any] = {"group": group, "async_op": True}
        if step.operation == "barrier":
            return dist.barrier(**options, timeout=LIMIT if step.limited else None)
        if step.operation == "all_reduce":
            return dist.all_reduce(one(), **options)
        if step.operation == "all_gather":
            return dist.all_gather(each(), one(), **options)
        if step.operation == "reduce_scatter":
            return dist.reduce_scatter(one(), each(), **options)
        if step.operation == "all_to_all":
            return dist.all_to_all(each(), each(), **options)
        if step.operation == "broadcast":
            return dist.broadcast(one(), src=step.root, **options)
        if step.operation == "reduce":
            return dist.reduce(one(), dst=step.root, **options)
        if step.operation == "gather":
            return dist.gather(one(), at_root, dst=step.root, **options)
        assert step.operation == "scatter"
        return dist.scatter(one(), at_root, src=step.root, **options)

    def do_take(self, step: Step) -> None:
        """Wait until another thread has issued the collective."""
        self.handles[step.key].get()

    def do_wait(self, step: Step) -> None:
        """Wait for a collective."""
        work = self.kept[step.key]
        work.wait(LIMIT) if step.limited else work.wait()

    def do_send(self, step: Step) -> None:
        """Send one tensor."""
        dist.send(torch.ones(3), step.peer, tag=self.tag(step.key))

    def do_recv(self, step: Step) -> None:
        """Receive one tensor."""
        dist.recv(torch.ones(3), step.peer, tag=self.tag(step.key))

    def do_monitored(self, step: Step) -> None:
        """Enter a monitored barrier of all ranks."""
        dist.monitored_barrier(timeout=LIMIT)

    def do_pause(self, step: Step) -> None:
        """Be late."""
        time.sleep(self.late * step.count / LONGEST_PAUSE)

    def do_start(self, step: Step) -> None:
        """Start a thread."""
        self.threads[step.thread].start()

    def do_join(self, step: Step) -> None:
        """Wait for a thread."""
        self.threads[step.thread].join()

    @staticmethod
    def tag(key: str) -> int:
        """A number for a key such as `k7` or `k71`."""
        return int(key[1:])


def main() -> None:
    """Run the programs."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--programs", type=int, default=10)
    parser.add_argument("--late", type=float, default=1.0, help="longest pause in seconds")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(arguments.first, arguments.first + arguments.programs):
        random = Random(number)
        program = draw_program(random, world=world, events=random.randint(3, 12), real=True)
        runner = Runner(program, rank, arguments.late)
        runner.run(program.threads[rank][MAIN])
        kept = list(runner.kept.values())  # handles that nobody waited for
        dist.barrier()
        del kept
        if rank == 0:
            print(f"program {number} of {world} ranks: finished", flush=True)
        for group in runner.groups.values():
            if group is not dist.group.WORLD and group is not dist.GroupMember.NON_GROUP_MEMBER:
                dist.destroy_process_group(group)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
