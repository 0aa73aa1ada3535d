"""Real Gloo ranks that go through every kind of collective call, one late, while a test reads their records.

`RecordRanks` starts them; `CALLS` are the calls by name. Rank 0 enters each call only when the test says so.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from grpo_run.runtime.board.board import Board
from grpo_run.runtime.supervisor.detection import _collective_records as collective_records
from grpo_run.watchdog.deadlocks.collectives import Collective
from grpo_run.watchdog.deadlocks.positions import THREADS_HANDLER, ThreadReport
from grpo_run.watchdog.deadlocks.recording import parse_recording
from support import warm

WORLD = 3
SECONDS = 60.0
LIMIT = timedelta(seconds=100)


def _calls(rank: int) -> dict[str, Callable[[], object]]:
    import torch
    import torch.distributed as dist
    from torch.distributed import _functional_collectives as functional

    pair = dist.new_group([0, 1])

    def one(elements: int = 4) -> torch.Tensor:
        return torch.ones(elements)

    def each() -> list[torch.Tensor]:
        return [one() for _ in range(WORLD)]

    def at_root(value: Any) -> Any:
        return value if rank == 0 else None

    def message() -> None:
        if rank == 0:
            dist.send(one(), 1)
            dist.send(one(), 2)
        else:
            dist.recv(one(), 0)

    def ring() -> None:
        sends = [
            dist.P2POp(dist.isend, one(), (rank + 1) % WORLD),
            dist.P2POp(dist.irecv, one(), (rank - 1) % WORLD),
        ]
        for work in dist.batch_isend_irecv(sends):
            work.wait()

    def coalesced() -> None:
        with dist._coalescing_manager(async_ops=True) as manager:
            dist.all_reduce(one())
            dist.all_reduce(one())
        manager.wait()

    def asynchronous(wait: Callable[[Any], object]) -> Callable[[], object]:
        return lambda: wait(dist.all_reduce(one(), async_op=True))

    return {
        "all_reduce": lambda: dist.all_reduce(one()),
        "message": message,
        "after_message": lambda: dist.all_gather(each(), one()),
        "ring": ring,
        "after_ring": lambda: dist.all_reduce(one()),
        "monitored_barrier": lambda: dist.monitored_barrier(timeout=LIMIT),
        "after_monitored_barrier": lambda: dist.all_gather(each(), one()),
        "barrier": dist.barrier,
        "limited_barrier": lambda: dist.barrier(timeout=LIMIT),
        "wait": asynchronous(lambda work: work.wait()),
        "limited_wait": asynchronous(lambda work: work.wait(LIMIT)),
        "future": asynchronous(lambda work: work.get_future().wait()),
        "broadcast": lambda: dist.broadcast(one(), src=0),
        "reduce": lambda: dist.reduce(one(), dst=0),
        "gather": lambda: dist.gather(one(), at_root(each()), dst=0),
        "scatter": lambda: dist.scatter(one(), at_root(each()), src=0),
        "all_to_all": lambda: dist.all_to_all(each(), each()),
        "reduce_scatter": lambda: dist.reduce_scatter(one(), each()),
        "after_reduce_scatter": lambda: dist.all_gather(each(), one()),
        "reduce_scatter_single": lambda: dist.reduce_scatter_single(one(), one(4 * WORLD)),
        "all_gather_object": lambda: dist.all_gather_object([None] * WORLD, {"rank": rank}),
        "broadcast_object_list": lambda: dist.broadcast_object_list([rank], src=0),
        "scatter_object_list": lambda: dist.scatter_object_list([None], at_root([1, 2, 3]), src=0),
        "gather_object": lambda: dist.gather_object(rank, at_root([None] * WORLD), dst=0),
        "coalescing_manager": coalesced,
        "functional": lambda: functional.all_reduce(one(), "sum", dist.group.WORLD) + 1,
        "pair": lambda: dist.all_reduce(one(), group=pair),
        "new_group": lambda: dist.new_group([0, 1, 2]),
        "last": lambda: dist.all_reduce(one()),
    }


def _run(rank: int, folder: str) -> None:
    os.environ["TORCH_FR_BUFFER_SIZE"] = "256"
    import torch.distributed as dist
    from torch._C import _distributed_c10d

    from grpo_run.runtime.rank.collective_recorder import Recorder
    from grpo_run.runtime.rank.worker_server import serve_thread_reports, start_worker_server

    slot = Board.open(Path(folder) / "board", writable=True).writer(
        rank, rank=rank, pid=os.getpid(), attempt=0
    )
    recorder = Recorder(slot, lambda text: print(f"rank {rank}: {text}", flush=True))
    recorder.install(_distributed_c10d)
    serve_thread_reports(recorder)
    server = start_worker_server(f"{folder}/s{rank}")
    dist.init_process_group(
        "gloo", store=dist.FileStore(f"{folder}/store", WORLD), rank=rank, world_size=WORLD
    )
    for name, call in _calls(rank).items():
        Path(folder, f"at-{name}-{rank}").touch()
        while rank == 0 and not Path(folder, f"go-{name}").exists():
            time.sleep(0.005)
        call()
        Path(folder, f"done-{name}-{rank}").touch()
        while not Path(folder, f"read-{name}").exists():
            time.sleep(0.005)
    server.shutdown()
    os._exit(0)


class Reading:
    """What was read of the ranks at one instant, each by rank."""

    def __init__(self, board: Board, folder: str) -> None:
        sockets = {rank: f"{folder}/s{rank}" for rank in range(WORLD)}
        answers, failures = collective_records.fetch(sockets, SECONDS)
        reports, others = collective_records.fetch(sockets, SECONDS, THREADS_HANDLER)
        assert (failures, others) == ({}, {})
        self.recorded = {rank: parse_recording(answers[rank]) for rank in sockets}
        self.logged: dict[int, tuple[Collective, ...]] = {
            rank: board.collective_log(rank) for rank in sockets
        }
        self.threads = {rank: ThreadReport.model_validate_json(reports[rank]) for rank in sockets}


class RecordRanks:
    """Starts the ranks, and goes through the calls in their order."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(dir="/tmp", prefix="g")
        self.board = Board.create(Path(self.folder) / "board", WORLD)
        self.processes: list[warm.Process] = []

    def start(self) -> None:
        """Start the ranks."""
        environment = {**os.environ, **warm.QUIET, "PYTHONPATH": str(Path(__file__).parents[1])}
        with open(Path(self.folder) / "printed", "wb") as printed:
            for rank in range(WORLD):
                command = [sys.executable, "-P", __file__, str(rank), self.folder]
                self.processes.append(
                    warm.start(command, cwd=Path("/"), environment=environment, stdout=printed)
                )

    def stop(self) -> None:
        """End the ranks and remove their files."""
        for process in self.processes:
            process.kill()
            process.wait(10)
        shutil.rmtree(self.folder)

    def go_through(self, name: str) -> tuple[Reading, Reading]:
        """Let the ranks make one call; returns what was read while rank 0 was late, and after the call."""
        self._until(lambda: all(Path(self.folder, f"at-{name}-{rank}").exists() for rank in range(WORLD)))
        before = self._settled()
        Path(self.folder, f"go-{name}").touch()
        self._until(lambda: all(Path(self.folder, f"done-{name}-{rank}").exists() for rank in range(WORLD)))
        after = Reading(self.board, self.folder)
        Path(self.folder, f"read-{name}").touch()
        return before, after

    def _settled(self) -> Reading:
        """A reading that equals the one before it, 50 ms earlier, with the context switches of all
        threads.
        """
        last = Reading(self.board, self.folder)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            time.sleep(0.05)
            reading = Reading(self.board, self.folder)
            if (reading.recorded, reading.logged) == (last.recorded, last.logged):
                return reading
            last = reading
        raise AssertionError("the ranks do not settle")

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline, "a rank did not go on"
            assert all(process.poll() is None for process in self.processes), "a rank has exited"
            time.sleep(0.005)


if __name__ == "__main__":
    _run(int(sys.argv[1]), sys.argv[2])
