"""Legitimate communication between ranks that a user's code may contain, with one rank late by some seconds.

`oddities.py` beside it calls them during training; as a script, `groups.py SECONDS` calls them all without a
trainer. Every rank calls them in the same order. In each, ranks wait for one another in ways that look like a
deadlock to whoever does not know every participant.
"""

from __future__ import annotations

import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

Group = Callable[[float], None]
GROUPS: dict[str, Group] = {}


def legitimate(function: Group) -> Group:
    GROUPS[function.__name__.strip("_").replace("_", "-")] = function
    return function


def _late(seconds: float) -> None:
    """Delay the last rank."""
    if dist.get_rank() == dist.get_world_size() - 1:
        time.sleep(seconds)


def _new(ranks: list[int] | None = None, **options: Any) -> Any:
    return dist.new_group(ranks, backend="gloo", **options)


def _sum(group: Any, *, async_op: bool = False) -> Any:
    return dist.all_reduce(torch.ones(3), group=group, async_op=async_op)


def _in_thread(function: Callable[..., Any], *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    return thread


@legitimate
def _thread_serves_group(seconds: float) -> None:
    """A thread of rank 0 joins the first group late, while its main thread waits in the second one."""
    first, second = _new(), _new()
    if dist.get_rank() == 0:
        thread = _in_thread(lambda: (time.sleep(seconds), _sum(first)))
        _sum(second)
        thread.join()
    else:
        _sum(first)
        _sum(second)


@legitimate
def _threads_in_opposite_order(seconds: float) -> None:
    """Every rank has a thread in one group and its main thread in the other, in opposite orders."""
    both = (_new(), _new())
    ahead = both[dist.get_rank() % 2]
    behind = both[1 - dist.get_rank() % 2]
    thread = _in_thread(lambda: (_late(seconds), _sum(behind)))
    _sum(ahead)
    thread.join()


@legitimate
def _monitored_barrier(seconds: float) -> None:
    group = _new()
    _late(seconds)
    dist.monitored_barrier(group, timeout=timedelta(seconds=seconds + 60))


@legitimate
def _barrier_with_timeout(seconds: float) -> None:
    group = _new(timeout=timedelta(seconds=seconds + 60))
    _late(seconds)
    dist.barrier(group)


@legitimate
def _ring(seconds: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    value = torch.zeros(1)
    if rank == 0:
        dist.send(value, 1)
        dist.recv(value, size - 1)
    else:
        dist.recv(value, rank - 1)
        _late(seconds)
        dist.send(value, (rank + 1) % size)
    dist.barrier()


@legitimate
def _pair_beside_barrier(seconds: float) -> None:
    """Ranks 0 and 1 send and receive, late, while the others wait in a barrier."""
    if dist.get_rank() == 0:
        time.sleep(seconds)
        dist.send(torch.ones(1), 1)
    elif dist.get_rank() == 1:
        dist.recv(torch.ones(1), 0)
    dist.barrier()


@legitimate
def _receive_from_any(seconds: float) -> None:
    if dist.get_rank() == 0:
        for _ in range(dist.get_world_size() - 1):
            dist.recv(torch.ones(1))
    else:
        _late(seconds)
        dist.send(torch.ones(1), 0)
    dist.barrier()


@legitimate
def _early_receive(seconds: float) -> None:
    """The last rank posts a receive, computes on, and waits for it later."""
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if rank == last:
        value = torch.zeros(1)
        work = dist.irecv(value, 0)
        time.sleep(seconds)
        assert work is not None
        work.wait()
    elif rank == 0:
        dist.send(torch.ones(1), last)
    dist.barrier()


@legitimate
def _batch_of_both(seconds: float) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    _late(seconds)
    operations = [
        dist.P2POp(dist.isend, torch.ones(1), (rank + 1) % size),
        dist.P2POp(dist.irecv, torch.ones(1), (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()


@legitimate
def _no_member(seconds: float) -> None:
    """Groups of which some ranks are no members; these go on to the next collective and wait there."""
    size = dist.get_world_size()
    groups = [_new([rank]) for rank in range(size)] + [_new([0, size - 1])]
    if dist.get_rank() in (0, size - 1):
        _late(seconds)
        _sum(groups[-1])
    _sum(groups[dist.get_rank()])
    dist.barrier()


@legitimate
def _crossing_subgroups(seconds: float) -> None:
    """Overlapping groups of two ranks, entered in an order that ends only once the late rank has come."""
    size = dist.get_world_size()
    pairs = [[rank, rank + 1] for rank in range(size - 1)]
    groups = [_new(pair) for pair in pairs]
    _late(seconds)
    for pair, group in zip(pairs, groups, strict=True):
        if dist.get_rank() in pair:
            _sum(group)


@legitimate
def _objects(seconds: float) -> None:
    _late(seconds)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, {"rank": dist.get_rank(), "text": "x" * 1000 * (dist.get_rank() + 1)})
    shared = [found if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared, src=0)
    gathered = found if dist.get_rank() == 0 else None
    dist.gather_object(dist.get_rank(), gathered, dst=0)


@legitimate
def _handle_waited_later(seconds: float) -> None:
    group = _new()
    work = _sum(group, async_op=True)
    _late(seconds)
    dist.barrier()
    work.wait()


@legitimate
def _handles_waited_in_reverse(seconds: float) -> None:
    groups = [_new() for _ in range(3)]
    _late(seconds)
    works = [_sum(group, async_op=True) for group in groups]
    for work in reversed(works):
        work.wait()


@legitimate
def _key_of_store(seconds: float) -> None:
    """Ranks wait for a key of the default store, which the last rank sets late."""
    store = dist.distributed_c10d._get_default_store()
    key = f"oddity-{_key_of_store.__name__}"
    _late(seconds)
    if dist.get_rank() == dist.get_world_size() - 1:
        store.set(key, "1")
    store.wait([key], timedelta(seconds=seconds + 60))


@legitimate
def _group_made_late(seconds: float) -> None:
    """One rank comes late to the making of a group: the others wait in its rendezvous."""
    _late(seconds)
    group = _new()
    _sum(group)
    dist.destroy_process_group(group)


@legitimate
def _serving_thread(seconds: float) -> None:
    """A thread of rank 0 answers the last rank's requests; its main thread waits in a collective
    meanwhile.
    """
    group, last = _new(), dist.get_world_size() - 1

    def serve() -> None:
        for _ in range(2):
            value = torch.zeros(1)
            dist.recv(value, last, group=group)
            time.sleep(seconds / 2)
            dist.send(value + 1, last, group=group)

    thread = _in_thread(serve) if dist.get_rank() == 0 else None
    if dist.get_rank() == last:
        for _ in range(2):
            value = torch.zeros(1)
            dist.send(value, 0, group=group)
            dist.recv(value, 0, group=group)
    dist.barrier()
    if thread is not None:
        thread.join()


@legitimate
def _event_of_collective(seconds: float) -> None:
    """The main thread waits for an event that the completion of a collective sets."""
    group, done = _new(), threading.Event()
    _late(seconds)
    _sum(group, async_op=True).get_future().then(lambda _: done.set())
    done.wait()


@legitimate
def _socket_between_ranks(seconds: float) -> None:
    """Rank 0 accepts a connection of the last rank, which comes late, while the others wait in a barrier."""
    name = f"\0oddity-{os.environ['MASTER_PORT']}-{os.environ.get('TORCHELASTIC_RUN_ID', '')}"
    if dist.get_rank() == 0:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()
            listener.accept()[0].close()
    _late(seconds)
    if dist.get_rank() == dist.get_world_size() - 1:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(name)
    dist.barrier()


@legitimate
def _queue_of_receiving_thread(seconds: float) -> None:
    """The main thread of rank 0 waits for a queue, which a thread feeds that receives from the last rank."""
    group, last = _new(), dist.get_world_size() - 1
    received: queue.Queue[float] = queue.Queue()

    def receive() -> None:
        value = torch.zeros(1)
        dist.recv(value, last, group=group)
        received.put(float(value))

    if dist.get_rank() == 0:
        _in_thread(receive)
        received.get()
    _late(seconds)
    if dist.get_rank() == last:
        dist.send(torch.ones(1), 0, group=group)
    dist.barrier()


@legitimate
def _unnamed_pairs(seconds: float) -> None:
    """Groups of two ranks without a name, which no other rank ever opens; one member is late."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    for first in range(size):
        members = sorted({first, (first + 1) % size})
        if rank in members:
            prefix = dist.PrefixStore(f"unnamed{first}", store)
            group = dist.ProcessGroupGloo(prefix, members.index(rank), 2, timedelta(seconds=100))
            if rank == first:
                time.sleep(seconds)
            if first == 1:
                group.allgather([[torch.ones(3), torch.ones(3)]], [torch.ones(3)]).wait()
            else:
                group.allreduce([torch.ones(3)]).wait()
    dist.barrier()


@legitimate
def _issued_ahead(seconds: float) -> None:
    """One rank issues many collectives ahead and waits at the end; another is late with all of them."""
    if dist.get_rank() == 0:
        time.sleep(seconds)
    pending = []
    for _ in range(4):
        gathered = [torch.ones(3) for _ in range(dist.get_world_size())]
        works = [
            _sum(None, async_op=True),
            dist.all_gather(gathered, torch.ones(3), async_op=True),
            dist.barrier(async_op=True),
        ]
        for work in works:
            if dist.get_rank() == dist.get_world_size() - 1:
                pending.append(work)
            else:
                work.wait()
    for work in pending:
        work.wait()


def main() -> None:
    """Communicate in each of these ways, one after the other, with no trainer."""
    dist.init_process_group("gloo")
    for name, communicate in GROUPS.items():
        communicate(float(sys.argv[1]))
        dist.barrier()
        if dist.get_rank() == 0:
            print(f"{name} done", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
