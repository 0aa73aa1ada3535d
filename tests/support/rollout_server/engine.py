"""The engine process of the stand-in server: it holds the weights, samples, and takes part in syncs.

Like vLLM's it does one thing at a time: while it waits for weights, or is stopped, nothing that needs it is
answered. `server.py` starts it and talks with it over a pipe; if the pipe closes, it ends.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import time
from collections import Counter
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

from support.rollout_server import model
from support.rollout_server.plants import Plants

JOIN_SECONDS = 300.0
LENGTH = struct.Struct("!Q")
KEPT = 3
"""How many syncs of weights are kept, besides the ones that it began with."""


class Engine:
    """Answers the API process."""

    def __init__(self, folder: Path, plants: Plants) -> None:
        self.plants = plants
        self.configuration, self.base = model.read(folder)
        self.synced: list[model.Weights] = []
        self.digests: list[str] = []
        self.incoming: model.Weights | None = None
        self.version = "default"
        self.trainer: socket.socket | None = None
        self.counts: Counter[str] = Counter()
        self.paused = False
        self.postponed: list[tuple[int, dict[str, Any]]] = []

    def reach(self, moment: str) -> None:
        """Count a moment, and do what is planted there."""
        self.counts[moment] += 1
        due = self.plants.due(moment, self.counts[moment])
        if due is None:
            return
        action, target = due
        if action == "hang":
            while True:
                signal.pause()
        if action == "fail":
            raise RuntimeError(f"planted: {self.plants.fault}")
        if action == "restart":
            self.synced, self.version, self.trainer = [], "default", None
            return
        number = signal.SIGKILL if action == "kill" else signal.SIGSTOP
        if target == "server":
            os.kill(os.getppid(), number)
        os.kill(os.getpid(), number)

    @property
    def served(self) -> model.Weights:
        """The weights that completions come from."""
        if not self.synced or self.plants.serves == "base":
            return self.base
        return self.synced[0 if self.plants.serves == "stale" else -1]

    def run(self, pipe: Connection) -> None:
        """Answer until the API process is gone."""
        while True:
            try:
                number, name, body = pipe.recv()
            except (EOFError, OSError):
                return
            if name == "completion" and self.paused:
                self.postponed.append((number, body))
                continue
            self.answer(pipe, number, name, body)
            while self.postponed and not self.paused:
                number, body = self.postponed.pop(0)
                self.answer(pipe, number, "completion", body)

    def answer(self, pipe: Connection, number: int, name: str, body: dict[str, Any]) -> None:
        """Do what was asked and send its result, or the error."""
        try:
            result = getattr(self, f"on_{name}")(**body)
        except (RuntimeError, ValueError, OSError) as error:  # as vLLM does, it answers and goes on
            pipe.send((number, False, f"{type(error).__name__}: {error}"))
        else:
            pipe.send((number, True, result))

    def on_completion(
        self, prompts: list[list[int]], n: int, temperature: float, longest: int, seed: int, top: int,
        prompt_top: int | None,
    ) -> list[tuple[Any, list[model.Completion]]]:  # fmt: skip
        """Return log-probabilities of the prompt, if asked for, and completions for each prompt."""
        self.reach("completion")
        if longest > 1:
            self.reach("generation")
        if self.counts["completion"] == 1:
            time.sleep(self.plants.first_completion_seconds)
        time.sleep(self.plants.completion_seconds)
        answers = []
        for prompt in prompts:
            of_prompt: list[dict[int, tuple[float, int]] | None] | None = None
            if prompt_top is not None:
                (rows,) = model.logprobs(self.configuration, self.served, np.array([prompt]), temperature)
                followed = zip(rows, prompt[1:], strict=False)
                of_prompt = [None, *(model.ranked(row, token, prompt_top) for row, token in followed)]
            made = model.sample(
                self.configuration, self.served, prompt, count=n, temperature=temperature, longest=longest,
                seed=seed, top=top,
            )  # fmt: skip
            answers.append((of_prompt, made))
        return answers

    def on_init(self, init_info: dict[str, Any]) -> None:
        """Join the group of the trainer, waiting for it as long as vLLM does."""
        deadline = time.monotonic() + JOIN_SECONDS
        while True:
            try:
                self.trainer = socket.create_connection(
                    (init_info["master_address"], init_info["master_port"])
                )
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.01)
            else:
                self.trainer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                return

    def on_start(self) -> None:
        """Begin a sync."""
        self.reach("start")
        if self.incoming is not None:
            raise RuntimeError("start_weight_update called while a weight update is already active.")
        self.incoming = {}

    def on_update(self, names: list[str], dtype_names: list[str], shapes: list[list[int]]) -> None:
        """Receive tensors from the trainer."""
        if self.incoming is None:
            raise RuntimeError("start_weight_update must be called before update_weights.")
        if self.trainer is None:
            raise RuntimeError("NCCL weight transfer not initialized. Call init_transfer_engine() first.")
        time.sleep(self.plants.sync_seconds)
        arriving, self.incoming = self.incoming, None
        for index, (name, dtype, shape) in enumerate(zip(names, dtype_names, shapes, strict=True)):
            if index == len(names) // 2:
                self.reach("update")
            if name not in self.base or self.base[name].shape != tuple(shape):
                raise ValueError(f"the model has no {name} of shape {shape}")
            arriving[name] = decoded(self.receive(), dtype).reshape(shape)
        self.incoming = arriving

    def receive(self) -> bytes:
        """Return the bytes of the next broadcast, which the trainer then knows to have arrived."""
        assert self.trainer is not None
        (size,) = LENGTH.unpack(exactly(self.trainer, LENGTH.size))
        content = exactly(self.trainer, size)
        self.trainer.sendall(b"\1")
        return content

    def on_finish(self, weight_version: str | None) -> None:
        """End a sync: completions come from the new weights."""
        self.reach("finish")
        if self.incoming is None:
            raise RuntimeError("finish_weight_update called without a matching start_weight_update.")
        before = self.synced[-1] if self.synced else self.base
        self.synced = [*self.synced, {**before, **self.incoming}][-KEPT:]
        self.digests.append(model.digest(self.synced[-1]))
        self.incoming = None
        if weight_version is not None:
            self.version = weight_version

    def on_reset(self) -> bool:
        """Drop the cache of prefixes, which there is none of."""
        self.reach("reset")
        return True

    def on_set_version(self, new_version: str) -> None:
        """Set the version of the weights."""
        self.version = new_version

    def on_version(self) -> str:
        """Return the version of the weights, as it was told."""
        return self.version

    def on_pause(self, paused: bool) -> None:
        """Postpone completions, or no longer."""
        self.paused = paused

    def on_is_paused(self) -> bool:
        """Whether completions are postponed."""
        return self.paused

    def on_plant(self, **changes: Any) -> None:
        """Plant something from now on."""
        self.plants = self.plants.changed(changes)

    def on_look(self) -> dict[str, Any]:
        """Return what a test may want to know."""
        return {
            "digests": self.digests, "served": model.digest(self.served), "version": self.version,
            "counts": dict(self.counts),
        }  # fmt: skip


def decoded(content: bytes, dtype: str) -> Any:
    """Return the values of a tensor in float32."""
    if dtype == "bfloat16":
        return (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(content, dtype).astype(np.float32)


def exactly(connection: socket.socket, size: int) -> bytes:
    """Return the next bytes of a connection.

    If the trainer is gone it waits for ever, as a broadcast of NCCL does.
    """
    content = bytearray()
    while len(content) < size:
        try:
            part = connection.recv(size - len(content))
        except ConnectionError:
            part = b""
        while not part:
            signal.pause()
        content += part
    return bytes(content)


def main(pipe: Connection, folder: str, plants: Plants) -> None:
    """Run the engine; the first message says that it is ready."""
    import setproctitle

    setproctitle.setproctitle("VLLM::EngineCore")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in vLLM, the API process ends it
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    engine = Engine(Path(folder), plants)
    time.sleep(plants.startup_seconds)
    engine.reach("startup")
    pipe.send((0, True, engine.configuration["max_position_embeddings"]))
    engine.run(pipe)
