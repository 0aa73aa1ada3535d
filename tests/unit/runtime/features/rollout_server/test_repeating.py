"""What a rollout has changed is put back."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from types import SimpleNamespace
from typing import Any

import torch

from grpo_run.runtime.features.rollout_server._repeating import remembered


def trainer() -> Any:
    """The tables of a GRPO trainer."""
    return SimpleNamespace(
        state=SimpleNamespace(num_input_tokens_seen=3),
        _metrics={"train": defaultdict(list, {"kept": [1.0]}), "eval": defaultdict(list)},
        _logs={"prompt": deque(["a"], maxlen=2), "rewards": defaultdict(lambda: deque(maxlen=2))},
        _pending_extra_logs=defaultdict(list, {"note": ["x"]}),
        _pending_metrics=defaultdict(list),
    )


def change(one: Any) -> None:
    """Do what a rollout does."""
    one.state.num_input_tokens_seen += 5
    one._metrics["train"]["kept"].append(2.0)
    one._metrics["train"]["new"].append(2.0)
    one._logs["prompt"].extend(["b", "c"])
    one._logs["rewards"]["length"].append(1.0)
    one._pending_extra_logs.clear()
    one._pending_metrics["m"].append(1.0)
    random.random()
    torch.rand(1)


def test_tables_counts_and_generators_are_put_back() -> None:
    """Containers stay the same objects, with their types and lengths."""
    one, expected = trainer(), trainer()
    python, state = random.getstate(), torch.get_rng_state()
    prompts, metrics = one._logs["prompt"], one._metrics["train"]
    restore = remembered(one)
    for _ in range(2):
        change(one)
        restore()
        for name in ("_metrics", "_pending_extra_logs", "_pending_metrics"):
            assert getattr(one, name) == getattr(expected, name)
        assert dict(one._logs) == {"prompt": deque(["a"]), "rewards": {}}
        assert one.state.num_input_tokens_seen == 3
        assert (random.getstate(), torch.equal(torch.get_rng_state(), state)) == (python, True)
    assert (one._logs["prompt"] is prompts, prompts.maxlen, one._metrics["train"] is metrics) == (
        True,
        2,
        True,
    )
