"""AsyncGRPO with an adapter beside a real vLLM, which runs on the CPU (`make test-server`).

The environment of the other tests has no vLLM: there, the tests of this folder are skipped. The runs are
serial, and those whose server is ended share one, because a server takes most of a minute to start. What
they print with `-s` is the table in docs/reference/benchmarks.md.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.runs import Run, Runs, alive, descendants

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make test-server`", allow_module_level=True)

SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "async_grpo.py"
STEPS = 20
START_SECONDS = 300.0
"""For a server and ranks, on two busy cores."""
STUCK = ("rollout_server_stuck", "weight_sync_stuck")
"""The second one if the rank already waits for the pause in which it sends the next policy."""
pytestmark = pytest.mark.timeout(1800)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make what the server and the ranks load."""
    folder = tmp_path_factory.mktemp("model")
    make = [sys.executable, str(SCRIPT), "--make-model", "--model", str(folder)]
    subprocess.run([*make, "--output-dir", str(folder)], check=True)
    return folder


class Served:
    """A run of one rank with a server of its own, which has places for the adapters of four policies."""

    def __init__(self, runs: Runs, folder: Path, model: Path) -> None:
        variables = {
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GB; by default half of the memory
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        vllm = str(Path(sys.executable).with_name("vllm"))
        server = [
            *(f"{name}={value}" for name, value in variables.items()), vllm, "serve", str(model),
            "--enable-lora", "--max-loras", "4", "--max-lora-rank", "8", "--dtype", "float32",
            "--max-model-len", "256", "--enforce-eager",
        ]  # fmt: skip
        self.output = folder / "out"
        self.shared = set(Path("/dev/shm").glob("psm_*"))
        self.run: Run = runs(
            "--rollout-server", shlex.join(server), "--nproc-per-node", "1", "--snapshot-every", "2",
            str(SCRIPT), "--output-dir", str(self.output), "--model", str(model), "--lora",
            "--lora-dropout", "0", "--cpu", "--max-steps", str(STEPS), "--save-steps", str(STEPS),
            cold=True,
        )  # fmt: skip
        self.run.start()
        self.faults = 0

    @property
    def api(self) -> int:
        """The process that answers requests."""
        return int(self.run.events("rollout_server_started")[-1]["pid"])

    @property
    def engine(self) -> int:
        """The process that generates."""
        return next(one for one in descendants(self.api) if "EngineCor" in psutil.Process(one).name())

    @property
    def rollouts(self) -> int:
        """The process in which TRL makes the rollouts."""
        ranks = descendants(self.run.pid(0))
        return next(one for one in ranks if b"spawn_main" in Path(f"/proc/{one}/cmdline").read_bytes())

    def ask(self, route: str, body: Any = None) -> Any:
        """Send the server a request, a POST if it has a body; return what it answers."""
        url = f"http://127.0.0.1:{self.run.events('rollout_server_started')[-1]['port']}{route}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=30
        ) as answer:
            text = answer.read()
        return json.loads(text) if text.startswith(b"{") else None

    def take_steps(self, count: int) -> None:
        """Wait until the attempt after the last fault has taken so many steps."""

        def taken(events: list[dict[str, Any]]) -> bool:
            steps = [one for one in events if one["event"] == "step_committed"]
            return len([one for one in steps if one["attempt"] == self.faults]) >= count

        self.run.until(taken, START_SECONDS)

    def until_adapter(self) -> None:
        """Wait until the trainer has written an adapter, which it loads next."""
        folder = self.output / ".vllm_lora"
        before = set(folder.iterdir())
        deadline = time.monotonic() + 60
        while not any((one / "adapter_config.json").exists() for one in set(folder.iterdir()) - before):
            assert time.monotonic() < deadline, self.run.tail()
            time.sleep(0.0005)

    def healed(self, what: str, *causes: str, within_seconds: float) -> dict[str, Any]:
        """Wait until the run has named the fault that was just injected and has taken a step again."""
        self.faults += 1
        began = time.time()
        self.run.until_event("incident", count=self.faults, timeout_seconds=within_seconds + 60)
        incident, verdict = self.run.events("incident")[-1], self.run.verdicts()[-1]
        self.take_steps(1)
        again = next(one for one in self.run.events("step_committed") if one["attempt"] == self.faults)
        print(
            f"\n{what} | {incident['cause']}, {incident['time'] - began:.1f} s after the injection,"
            f" detection_seconds {incident['detection_seconds']:.1f} |"
            f" next step after {again['committed_at'] - began:.0f} s | {verdict['sentence']}",
            flush=True,
        )
        assert incident["cause"] in causes, verdict
        assert incident["time"] - began < within_seconds
        return verdict

    def ended(self, *, starts: int) -> None:
        """Wait for the end: all steps are taken, and nothing of the server is left."""
        self.run.ended(timeout_seconds=START_SECONDS)
        assert self.run.events("step_committed")[-1]["step"] == STEPS
        assert len(self.run.events("incident")) == self.faults
        assert len(self.run.events("rollout_server_started")) == starts
        assert not alive([one["pid"] for one in self.run.events("rollout_server_started")])
        assert not left_in_memory() - self.shared


def left_in_memory() -> set[Path]:
    """Return the shared memory that no process maps; servers of others may run."""
    maps = ""
    for one in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            maps += one.read_text(errors="replace")
    return {one for one in Path("/dev/shm").glob("psm_*") if str(one) not in maps}


@pytest.fixture
def served(runs: Runs, tmp_path: Path, model: Path) -> Served:
    """Start such a run."""
    return Served(runs, tmp_path, model)


def test_an_undisturbed_run(served: Served) -> None:
    """No fault is seen in 20 steps."""
    served.ended(starts=1)


def test_a_server_that_fails_is_started_again(served: Served) -> None:
    """Whatever of it fails."""
    served.take_steps(2)
    os.kill(served.engine, signal.SIGSTOP)
    verdict = served.healed("engine stopped", *STUCK, within_seconds=30)
    assert "VLLM::EngineCor" in verdict["sentence"]
    served.take_steps(2)
    os.kill(served.engine, signal.SIGKILL)
    served.healed("engine killed", "rollout_server_dead", within_seconds=15)
    served.take_steps(2)
    engine = served.engine
    served.until_adapter()
    os.kill(engine, signal.SIGKILL)
    served.healed("engine killed during load", "rollout_server_dead", within_seconds=15)
    served.take_steps(2)
    os.kill(served.api, signal.SIGKILL)
    served.healed("API process killed", "rollout_server_dead", within_seconds=15)
    served.ended(starts=5)


def test_a_server_that_lives_is_kept(served: Served) -> None:
    """A rank is killed, then the process of the rollouts."""
    served.take_steps(3)
    os.kill(served.run.pid(0), signal.SIGKILL)
    served.healed("rank killed", "signal", within_seconds=10)
    served.take_steps(3)
    os.kill(served.rollouts, signal.SIGKILL)
    served.healed("rollouts killed", "exception", within_seconds=30)
    served.ended(starts=1)


def test_samples_of_other_weights_are_not_trained_on(served: Served, tmp_path: Path) -> None:
    """The server answers with its model in place of the newest policy, whose name it knows."""
    served.take_steps(8)
    policies = [one for one in served.ask("/v1/models")["data"] if one["parent"]]
    newest = max(policies, key=lambda one: int(one["id"].rpartition("v")[2]))
    adapter = tmp_path / "adapter"
    shutil.copytree(newest["root"], adapter)
    from safetensors.numpy import load_file, save_file

    file = adapter / "adapter_model.safetensors"
    save_file({name: 0 * tensor for name, tensor in load_file(file).items()}, file)
    planted = {"lora_name": newest["id"], "lora_path": str(adapter), "load_inplace": True}
    served.ask("/v1/load_lora_adapter", planted)
    verdict = served.healed("base weights in place of a policy", "rollout_stale", within_seconds=30)
    assert f"{newest['id']} answers as the model without an adapter" in verdict["sentence"]
    served.ended(starts=2)
    made = served.run.events("rollout_made")
    last = {one["step"]: one["origin"] for one in made}
    assert set(last) >= set(range(1, STEPS))  # a batch is read ahead
    assert "stale" in {one["origin"] for one in made} - set(last.values())
