"""The trainer's end of a weight update group: TCP in place of NCCL, which blocks where NCCL does."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

JOIN_SECONDS = 300.0
"""How long vLLM's `StatelessProcessGroup` waits for the workers."""
LENGTH = struct.Struct("!Q")


class Group:
    """What TRL takes apart in `close_communicator`: dropping `store` frees the port of the rendezvous."""

    def __init__(self, store: socket.socket) -> None:
        self.store: socket.socket | None = store
        self.socket = None


class Communicator:
    """Sends tensors to every worker; a broadcast returns when all have received it."""

    def __init__(self, store: socket.socket, workers: list[socket.socket]) -> None:
        self.group = Group(store)
        self.disabled = False
        self._workers = workers
        self._destroyed = threading.Event()

    def broadcast(self, tensor: Any, src: int) -> None:
        """Send the bytes of a tensor.

        If a worker is gone, it blocks: a broadcast of NCCL never notices. Only `destroy` ends that.
        """
        assert src == 0, src
        if self.disabled:
            return
        content = memoryview(tensor.numpy()).cast("B")
        try:
            for worker in self._workers:
                worker.sendall(LENGTH.pack(len(content)))
                worker.sendall(content)
            for worker in self._workers:
                if not worker.recv(1):
                    raise ConnectionResetError
        except OSError:
            self._destroyed.wait()

    def destroy(self) -> None:
        """Abort, as from another thread while a broadcast blocks."""
        self.disabled = True
        self._destroyed.set()
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has gone
                worker.shutdown(socket.SHUT_RDWR)


def trainer_init(init_info: dict[str, Any], rank: int = 0) -> Communicator:
    """Wait until all workers have joined, as rank 0.

    Raises:
        OSError: the port is taken.
        TimeoutError: a worker has not joined in time.
    """
    assert rank == 0, rank
    address = (init_info["master_address"], init_info["master_port"])
    store = socket.create_server(address, backlog=16)
    store.settimeout(JOIN_SECONDS)
    workers = [store.accept()[0] for _ in range(init_info["world_size"] - 1)]
    for worker in workers:
        worker.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return Communicator(store, workers)
