"""Programs on three ranks that wait for one another in unusual ways, and finish.

Each situation keeps ranks waiting for `--late` seconds, long enough for several looks of the watchdog. A
wrong proof terminates them.

    thread         a thread serves a group while the main thread waits in another group
    late_sender    a rank is late with a send that another rank awaits before a barrier
    monitored      a rank is late at a monitored barrier
    no_member      groups of which one rank is no member
"""

from __future__ import annotations

import argparse
import threading
import time
from datetime import timedelta

import torch
import torch.distributed as dist


def reduce(group: dist.ProcessGroup | None = None, *, async_op: bool = False) -> dist.Work | None:
    """One all-reduce."""
    return dist.all_reduce(torch.ones(3), group=group, async_op=async_op)


def gather(*, async_op: bool = False) -> dist.Work | None:
    """One all-gather."""
    gathered = [torch.ones(3) for _ in range(dist.get_world_size())]
    return dist.all_gather(gathered, torch.ones(3), async_op=async_op)


def thread(rank: int, late: float) -> None:
    """Rank 0 waits in `side` for a thread of rank 1, whose main thread waits for rank 0 in the default
    group.
    """
    side = dist.new_group([0, 1])

    def serve() -> None:
        time.sleep(late)
        reduce(side)

    if rank == 0:
        reduce(side)
    server = threading.Thread(target=serve)
    if rank == 1:
        server.start()
    reduce()
    if rank == 1:
        server.join()


def late_sender(rank: int, late: float) -> None:
    """Rank 1 receives from rank 2, which is late; rank 0 waits for both in a barrier."""
    for _ in range(3):
        if rank == 2:
            time.sleep(late)
            dist.send(torch.ones(3), 1)
        if rank == 1:
            dist.recv(torch.ones(3), 2)
        dist.barrier()
        reduce()
        gather()


def monitored(rank: int, late: float) -> None:
    """One rank after the other is late after a monitored barrier; one issues ahead, and waits at the end."""
    for slow in range(3):
        if rank == slow:
            time.sleep(late)
        dist.monitored_barrier(timeout=timedelta(seconds=100))
        if rank == slow:
            time.sleep(late)
        pending = []
        for _ in range(4):
            for issue in (reduce, gather, dist.barrier):
                work = issue(async_op=True)
                if rank == 2:
                    pending.append(work)
                else:
                    work.wait()
        for work in pending:
            work.wait()


def no_member(rank: int, late: float) -> None:
    """Ranks call collectives of groups to which they do not belong, while the members are late."""
    pairs = {one: dist.new_group([one, (one + 1) % 3]) for one in range(3)}
    for one, group in pairs.items():
        if rank == one:
            time.sleep(late)
        dist.barrier(group=group)
        reduce(group)
    reduce()
    store = dist.distributed_c10d._get_default_store()
    for one in range(3):
        members = sorted({one, (one + 1) % 3})
        if rank in members:  # groups without a name, which the other rank never opens
            prefix = dist.PrefixStore(f"unnamed{one}", store)
            group = dist.ProcessGroupGloo(prefix, members.index(rank), 2, timedelta(seconds=100))
            if rank == one:
                time.sleep(late)
            if one == 1:
                group.allgather([[torch.ones(3), torch.ones(3)]], [torch.ones(3)]).wait()
            else:
                group.allreduce([torch.ones(3)]).wait()
    reduce()


SITUATIONS = {one.__name__: one for one in (thread, late_sender, monitored, no_member)}


def main() -> None:
    """Run the situations that are named on the command line, one after the other."""
    parser = argparse.ArgumentParser()
    parser.add_argument("situations", nargs="+", choices=sorted(SITUATIONS))
    parser.add_argument("--late", type=float, default=2.0, help="seconds")
    arguments = parser.parse_args()
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name in arguments.situations:
        SITUATIONS[name](rank, arguments.late)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
