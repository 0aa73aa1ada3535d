"""The stand-in for vLLM's server: TRL trains with it, answers are exact, and what is planted happens."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.references import plain_ranks
from support.rollout_server.starting import HERE, SCRIPT, StandIn, stand_in
from support.runs import Runs, digest, free_port

PROMPT = {
    "prompt": [[3, 4, 5], [6, 7, 8, 9]],
    "n": 2,
    "max_tokens": 6,
    "logprobs": 0,
    "return_token_ids": True,
}
STEPS = ("--max-steps", "4", "--save-steps", "4")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[StandIn]:
    with stand_in(tmp_path) as made:
        yield made


class Trainer:
    """Rank 0 of a weight update group, by the code that TRL uses, with arrays in place of tensors."""

    def __init__(self, server: StandIn) -> None:
        import numpy as np
        from safetensors.numpy import load_file

        specification = importlib.util.spec_from_file_location(
            "nccl_common", HERE / "packages/vllm/distributed/weight_transfer/nccl_common.py"
        )
        assert specification is not None
        assert specification.loader is not None
        common = importlib.util.module_from_spec(specification)
        specification.loader.exec_module(common)
        self.server, self.asks = server, [threading.Thread()]
        self.weights = load_file(server.output.parent / "base" / "model.safetensors")
        self.ones = np.ones(1, np.float32)
        init = {"master_address": "127.0.0.1", "master_port": free_port(), "rank_offset": 1, "world_size": 2}
        self.ask("/init_weight_transfer_engine", {"init_info": init})
        self.communicator = common.trainer_init(init)
        self.asks[-1].join()

    def ask(self, route: str, body: Any) -> None:
        """Post from another thread, as TRL does what the server answers only with the trainer's help."""

        def post() -> None:
            with contextlib.suppress(ConnectionError):  # a planted fault
                self.server.ask(route, body)

        self.asks.append(threading.Thread(target=post, daemon=True))
        self.asks[-1].start()

    def send(self, shift: float) -> None:
        """Send the weights of the server's beginning, shifted."""
        assert self.server.ask("/start_weight_update", {})[0] == 200
        shapes = [list(one.shape) for one in self.weights.values()]
        info = {"names": [*self.weights], "dtype_names": ["float32"] * len(shapes), "shapes": shapes}
        self.ask("/update_weights", {"update_info": info})
        for one in self.weights.values():
            self.communicator.broadcast(Array(one + self.ones * shift), src=0)

    def sync(self, shift: float) -> None:
        """The same as a whole, with a version."""
        self.send(shift)
        self.asks[-1].join()
        assert self.server.ask("/finish_weight_update", {"weight_version": str(shift)})[0] == 200
        assert self.server.ask("/reset_prefix_cache", {}) == (200, {"success": True})


class Array:
    """A tensor of which the communicator sees the bytes."""

    def __init__(self, values: Any) -> None:
        self.values = values

    def numpy(self) -> Any:
        return self.values.astype("float32")


def logprobs(server: StandIn) -> list[float]:
    """Return the log-probability of the first token after each prompt, greedily."""
    choices = server.ask("/v1/completions", {**PROMPT, "n": 1, "max_tokens": 1, "temperature": 0})[1][
        "choices"
    ]
    return [one["logprobs"]["token_logprobs"][0] for one in choices]


def test_trl_trains_with_it(server: StandIn, runs: Runs, tmp_path: Path) -> None:
    """Supervised ranks and plain ones end with the same weights; at each step the server has the trainer's
    weights, and samples from them.
    """
    words = [str(SCRIPT), "--settings", json.dumps({"generation_kwargs": {"seed": 7}}), "--output-dir"]
    runs("--nproc-per-node", "2", *words, "ours", *STEPS, environment=server.environment()).start().ended()
    plain_ranks(tmp_path, [*words, "theirs", *STEPS], ranks=2, environment=server.environment())
    assert digest(tmp_path / "ours") == digest(tmp_path / "theirs")
    synced = [
        line.split()[1]
        for name in ("ours", "theirs")
        for line in (tmp_path / name / "synced.txt").read_text().splitlines()
    ]
    assert len(set(synced)) == 4
    assert server.look()["digests"] == synced
    logged = json.loads((tmp_path / "ours" / "checkpoint-4" / "trainer_state.json").read_text())[
        "log_history"
    ]
    assert len(logged) == 4
    assert all(one["sampling/sampling_logp_difference/max"] < 1e-5 for one in logged)


def test_wrong_weights_under_the_right_version(server: StandIn) -> None:
    """`stale` answers with the weights of two syncs ago, `base` with the first ones."""
    base = logprobs(server)
    trainer = Trainer(server)
    seen = []
    for shift in (0.1, 0.2, 0.3):
        trainer.sync(shift)
        seen.append(logprobs(server))
    assert len({tuple(one) for one in [base, *seen]}) == 4
    for serves, expected in {"stale": seen[0], "base": base, "": seen[2]}.items():
        server.plant(serves=serves)
        assert logprobs(server) == expected
        assert server.ask("/weight_info") == (200, {"weight_version": "0.3"})


def test_dead_and_stopped_engine(tmp_path: Path) -> None:
    """A stopped engine leaves the server healthy and without answers; of a dead one it says so."""
    with stand_in(tmp_path, leaves_seconds=60.0) as server:
        os.kill(server.engine_pid(), signal.SIGSTOP)
        assert server.health() == 200
        assert "vllm:num_requests_running" in server.ask("/metrics")[1]
        for route, body in {"/v1/completions": PROMPT, "/weight_info": None}.items():
            with pytest.raises(TimeoutError):
                server.ask(route, body, seconds=0.3)
        os.kill(server.engine_pid(), signal.SIGKILL)
        deadline = time.monotonic() + 30
        while server.health() == 200:
            assert time.monotonic() < deadline
        assert server.health() == 503
        assert server.ask("/v1/completions", PROMPT)[0] == 500
        server.process.terminate()
        assert server.process.wait(30) == 0


def test_paused_generation_waits(server: StandIn) -> None:
    """Until it is resumed; log-probabilities of a prompt are those of its tokens, ranked."""
    assert server.ask("/pause?mode=keep", {}) == (200, {"status": "paused"})
    assert server.ask("/is_paused") == (200, {"is_paused": True})
    with pytest.raises(TimeoutError):
        server.ask("/v1/completions", PROMPT, seconds=0.3)
    assert server.ask("/resume", {}) == (200, {"status": "resumed"})
    body = {"prompt": [3, 4, 5], "max_tokens": 1, "prompt_logprobs": 3}
    (choice,) = server.ask("/v1/completions", body)[1]["choices"]
    first, *others = choice["prompt_logprobs"]
    assert first is None
    for token, values in zip(("4", "5"), others, strict=True):
        assert {one["rank"] for one in values.values()} == {1, 2, 3, values[token]["rank"]}
        assert max(values.values(), key=lambda one: one["logprob"])["rank"] == 1
