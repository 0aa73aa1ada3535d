"""AsyncGRPO with an adapter beside a real vLLM, which runs on the CPU (`make test-server`).

The environment of the other tests has no vLLM: there, the tests of this folder are skipped.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.runs import Run, descendants, free_port

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-server`", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "async_grpo.py"
START_SECONDS = 280.0
"""For the server and its first token, on two busy cores."""
pytestmark = pytest.mark.timeout(900)


class Server:
    """A `vllm serve` with places for the adapters of four policies."""

    def __init__(self, folder: Path) -> None:
        self.model = folder / "model"
        make = [sys.executable, str(SCRIPT), "--make-model", "--model", str(self.model)]
        subprocess.run([*make, "--output-dir", str(folder)], check=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "server.log"
        variables = {
            "VLLM_SERVER_DEV_MODE": "1",  # its routes /pause, /resume and /server_info, which TRL calls
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; by default half of the memory
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        command = [
            str(Path(sys.executable).with_name("vllm")), "serve", str(self.model), "--port", str(port),
            "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--dtype", "float32",
            "--max-model-len", "256", "--enforce-eager",
        ]  # fmt: skip
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env={**os.environ, **variables}, stdout=log, stderr=log, start_new_session=True
            )

    def get(self, path: str) -> Any:
        """Return what the server answers, None if it is not JSON."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            text = answer.read()
        return json.loads(text) if text else None

    def await_health(self) -> None:
        """Wait until it has loaded the model."""
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                return self.get("/health")
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.5)

    def adapters(self) -> list[str]:
        """Return the names of the policies that it holds."""
        return [one["id"] for one in self.get("/v1/models")["data"] if one["parent"]]

    def close(self) -> None:
        """End it. SIGKILL would leave its shared memory, because it ends what cleans up, too."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Start a server."""
    made = Server(tmp_path_factory.mktemp("server"))
    try:
        made.await_health()
        yield made
    finally:
        made.close()


def rollout_process(rank: int) -> int:
    """Return the process in which TRL makes the rollouts of a rank."""
    return next(
        one for one in descendants(rank) if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes()
    )


def test_killed_processes_are_replaced_beside_a_server_that_stays(
    server: Server, runs: Callable[..., Run], tmp_path: Path
) -> None:
    """A rank is killed three policies after its newest snapshot, and the next one sends these policies again;
    then the process of the rollouts is killed, for whose end TRL would wait for ever.
    """
    output = tmp_path / "out"
    run = runs(
        "--nproc-per-node", "1", "--snapshot-every", "4", str(SCRIPT), "--output-dir", str(output),
        "--model", str(server.model), "--server", server.url, "--lora", "--lora-dropout", "0", "--cpu",
        "--max-steps", "20", "--save-steps", "20", "--kill-after-steps", "7",
        cold=True,
    )  # fmt: skip
    run.start().until_step(11, timeout_seconds=500)
    began = time.monotonic()
    os.kill(rollout_process(run.pid(0)), signal.SIGKILL)
    run.until_event("incident", count=2, timeout_seconds=200)
    seconds = time.monotonic() - began
    run.ended(timeout_seconds=400)
    assert [one["cause"] for one in run.verdicts()] == ["signal", "exception"]
    assert "the process that makes the rollouts was killed by SIGKILL" in run.printed()
    assert seconds < 150.0  # after 300 s, TRL finds that the process has not told that it lives
    state = json.loads((output / "checkpoint-20" / "rollout_state.json").read_text())
    # one before the first step of each attempt, and one after each step that counts
    assert state["model_version"] == 23
    assert server.adapters() == ["trl-policy-v21", "trl-policy-v22", "trl-policy-v23"]
    assert server.get("/is_paused") == {"is_paused": False}
