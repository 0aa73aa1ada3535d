"""The trainer's end of a weight update group: TCP in place of NCCL, which blocks where NCCL does."""

from __future__ import annotations

import contextlib
import ctypes
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
        self._native = ctypes.CDLL(None)
        self._received = ctypes.create_string_buffer(64)  # zeros are a mutex that is free
        self._native.pthread_mutex_lock(self._received)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Send the bytes of a tensor.

        If a worker is gone, it blocks: a broadcast of NCCL never notices. Only `destroy` ends that. It blocks
        in native code, where Python handles no signal.
        """
        assert src == 0, src
        if self.disabled:
            return
        content = memoryview(tensor.numpy()).cast("B")
        threading.Thread(target=self._send, args=(content,), daemon=True).start()
        self._native.pthread_mutex_lock(self._received)  # unlike other waits, it goes on after a signal

    def _send(self, content: memoryview) -> None:
        with contextlib.suppress(OSError):
            for worker in self._workers:
                worker.sendall(LENGTH.pack(len(content)))
                worker.sendall(content)
            if all(worker.recv(1) for worker in self._workers):
                self._native.pthread_mutex_unlock(self._received)

    def destroy(self) -> None:
        """Abort, as from another thread while a broadcast blocks."""
        self.disabled = True
        for worker in self._workers:
            with contextlib.suppress(OSError):  # it has gone
                worker.shutdown(socket.SHUT_RDWR)
        self._native.pthread_mutex_unlock(self._received)


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
