"""A dead process of rollouts is an error, and a server gives back only what this run has sent."""

from __future__ import annotations

import json
import queue
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from grpo_run.runtime.features.rollout_server import _async
from grpo_run.runtime.features.rollout_server._watch import ServerError

FOLDER = "/run/out/.vllm_lora"


class Worker:
    """TRL's worker: `stop` waits for ever for a process that has ended."""

    def __init__(self) -> None:
        self.rollout_buffer: Any = queue.Queue()
        self._process: Any = SimpleNamespace(exitcode=None)
        self.calls: list[Any] = []

    def check_health(self, stale_after_s: float) -> None:
        self.calls.append(stale_after_s)

    def stop(self) -> None:
        if self._process is not None:
            assert self._process.exitcode is None, "would hang"
            self.calls.append("stopped")


@pytest.mark.parametrize(
    ("code", "said"), [(-9, "was killed by SIGKILL"), (1, "has exited with code 1"), (-100, "signal 100")]
)
def test_a_dead_process_is_an_error_and_does_not_hang_the_end(code: int, said: str) -> None:
    """`check_health` raises once the process has ended, and `stop` returns."""
    worker = Worker()
    with ExitStack() as hooks:
        _async.watch_process(SimpleNamespace(rollout_worker=worker), hooks)
        worker.check_health(300.0)
        worker._process.exitcode = code
        with pytest.raises(RuntimeError, match=said):
            worker.check_health(stale_after_s=300.0)
        worker.stop()
    assert worker.calls == [300.0, 300.0]


def test_a_process_that_lives_is_stopped_as_ever() -> None:
    """Nothing of the worker is left changed afterwards."""
    worker = Worker()
    with ExitStack() as hooks:
        _async.watch_process(SimpleNamespace(rollout_worker=worker), hooks)
        worker.stop()
    assert worker.calls == ["stopped"]
    assert not {"check_health", "stop"} & vars(worker).keys()
    assert "get" not in vars(worker.rollout_buffer)


def test_a_trainer_that_fails_does_not_wait_for_its_process() -> None:
    """TRL gives it 15 s, which the run would stand still."""
    worker = Worker()
    process = worker._process
    process.kill = lambda: setattr(process, "exitcode", -9)
    process.join = worker.calls.append

    def train() -> None:
        try:
            raise SystemExit
        finally:
            worker.stop()

    with ExitStack() as hooks:
        _async.watch_process(SimpleNamespace(rollout_worker=worker), hooks)
        with pytest.raises(SystemExit):
            train()
    assert (process.exitcode, worker.calls) == (-9, [_async.KILL_SECONDS])


def test_the_trainer_looks_after_its_process_every_second() -> None:
    """Its wait for a rollout is cut, not lengthened, and what comes is returned."""
    worker, waits = Worker(), []
    worker.rollout_buffer = SimpleNamespace(get=lambda block, timeout: waits.append((block, timeout)) or 7)
    with ExitStack() as hooks:
        _async.watch_process(SimpleNamespace(rollout_worker=worker), hooks)
        buffer = worker.rollout_buffer
        assert [buffer.get(timeout=5.0), buffer.get(timeout=0.2), buffer.get()] == [7, 7, 7]
    assert waits == [(True, 1.0), (True, 0.2), (True, None)]


@pytest.mark.parametrize("trainer", [SimpleNamespace(), SimpleNamespace(rollout_worker=None)])
def test_other_trainers_are_left_alone(trainer: Any) -> None:
    """One without a worker, and AsyncGRPO's on other ranks than 0."""
    with ExitStack() as hooks:
        _async.prepare(trainer, hooks, pytest.fail)


def server(cards: list[dict[str, Any]], paused: bool, unload: int = 200) -> tuple[Any, list[Any]]:
    """Return what asks a server, and the list of requests that change it."""
    changes: list[Any] = []

    def ask(method: str, route: str, body: Any = None) -> tuple[int, bytes]:
        if method == "POST":
            changes.append((route, body["lora_name"]) if body else route)
            return (unload if body else 200), b""
        return 200, json.dumps({"data": cards} if route == "/v1/models" else {"is_paused": paused}).encode()

    return ask, changes


CARDS = [
    {"id": "base", "root": "/models/base", "parent": None},
    {"id": "trl-policy-v7", "root": f"{FOLDER}/trl-policy-v7", "parent": "base"},
    {"id": "trl-policy-v8", "root": f"{FOLDER}/trl-policy-v8", "parent": "base"},
]


@pytest.mark.parametrize("paused", [False, True])
def test_what_this_folder_has_sent_is_unloaded(paused: bool) -> None:
    """A server that the killed rank has left paused goes on first: it may need to, to unload."""
    ask, changes = server(CARDS, paused)
    assert _async.take_back(FOLDER, ask) == ["trl-policy-v7", "trl-policy-v8"]
    unloaded = [("/v1/unload_lora_adapter", f"trl-policy-v{version}") for version in (7, 8)]
    assert changes == ["/resume"] * paused + unloaded


@pytest.mark.parametrize("folder", ["/run/other/.vllm_lora", FOLDER[:-1], f"{FOLDER}/trl-policy-v7"])
def test_adapters_and_the_pause_of_another_trainer_stay(folder: str) -> None:
    """It may be alive: a folder whose name begins alike is another one too."""
    ask, changes = server(CARDS, paused=True)
    assert _async.take_back(folder, ask) == []
    assert changes == []


@pytest.mark.parametrize("unload", [200, 404])
def test_an_adapter_that_has_gone_meanwhile_is_none(unload: int) -> None:
    """vLLM answers 404 for a name that it does not hold."""
    ask, _ = server(CARDS, paused=False, unload=unload)
    assert _async.take_back(FOLDER, ask)


def test_a_server_that_does_not_let_go_is_an_error() -> None:
    """The next adapter of this name would be refused."""
    ask, _ = server(CARDS, paused=False, unload=500)
    with pytest.raises(ServerError, match="trl-policy-v7"):
        _async.take_back(FOLDER, ask)


def test_a_list_of_models_that_cannot_be_read_is_an_error() -> None:
    """Not the same as a server without adapters."""
    with pytest.raises(ServerError, match="/v1/models"):
        _async.take_back(FOLDER, lambda *_: (200, b"<html>"))
