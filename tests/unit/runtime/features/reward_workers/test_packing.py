"""Which reward functions can travel to a worker, and what travels with them."""

from __future__ import annotations

import functools
import pickle
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from random import random as draw
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.reward_workers import _packing as packing

Reward = Callable[..., list[float]]


def plain(prompts: list[str], **columns: Any) -> list[float]:
    return [float(len(prompt)) for prompt in prompts]


@functools.lru_cache
def cached(text: str) -> int:
    return len(text)


def uses_a_cache(prompts: list[str], **columns: Any) -> list[float]:
    return [float(cached(prompt)) for prompt in prompts]


def draws(prompts: list[str], **columns: Any) -> list[float]:
    return [draw() for _ in prompts]


def local_state() -> Reward:
    def reward(prompts: list[str], **columns: Any) -> list[float]:
        total = 0.0

        def add(value: float) -> None:
            nonlocal total
            total += value

        for prompt in prompts:
            add(len(prompt))
        return [total]

    return reward


def holding(value: Any) -> Reward:
    def reward(prompts: list[str], **columns: Any) -> list[float]:
        return [float(bool(value)) for _ in prompts]

    return reward


class WithState:
    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...

    def __call__(self, prompts: list[str], **columns: Any) -> list[float]:
        return plain(prompts)


def wrapped_state() -> Reward:
    @functools.wraps(WithState())
    def reward(prompts: list[str], **columns: Any) -> list[float]:
        return plain(prompts)

    return reward


@pytest.mark.parametrize(
    "function", [plain, uses_a_cache, local_state(), functools.partial(plain, extra=1), holding([1, 2])]
)
def test_a_function_that_changes_nothing_travels_by_value(function: Reward) -> None:
    loaded = pickle.loads(packing.pack_function(function).content)
    assert loaded(["ab", "abc"]) == function(["ab", "abc"])
    assert getattr(loaded, "__globals__", None) is not plain.__globals__


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (WithState(), "has a state_dict, which checkpoints contain"),
        (wrapped_state(), "has a state_dict, which checkpoints contain"),
        (torch.nn.Linear(1, 1), "is a model"),
        (holding(torch.nn.Linear(1, 1)), "holds a model"),
        (holding(torch.empty(1, device="meta")), "holds a tensor on meta"),
        (holding(threading.Lock()), "cannot be pickled"),
        (holding(bytes(65 * 2**20)), "is larger than 64 MiB"),
    ],
)  # fmt: skip
def test_what_belongs_to_the_rank_stays_there(function: Any, reason: str) -> None:
    with pytest.raises(packing.StaysInRankError, match=f"^{reason}"):
        packing.pack_function(function)


def test_a_pool_of_threads_is_a_new_one_in_the_worker() -> None:
    """Whatever waits in the rank's. One whose threads begin with a function of the script's is refused."""
    pool = ThreadPoolExecutor(3)
    loaded = pickle.loads(packing.pack_function(holding(pool)).content)
    (cell,) = loaded.__closure__
    assert cell.cell_contents is not pool
    assert cell.cell_contents._max_workers == 3
    assert cell.cell_contents.submit(len, "ab").result() == 2
    with pytest.raises(packing.StaysInRankError, match="cannot be pickled"):
        packing.pack_function(holding(ThreadPoolExecutor(3, initializer=print)))


def test_the_processes_own_generator_is_not_copied() -> None:
    loaded = pickle.loads(packing.pack_function(draws).content)
    random.seed(3)
    expected = [draw(), draw()]
    random.seed(3)
    assert loaded(["a", "b"]) == expected
    assert pickle.loads(packing.dump(torch.default_generator).content) is torch.default_generator


def test_arguments_above_the_limit_are_refused() -> None:
    with pytest.raises(packing.StaysInRankError, match="64 MiB in one call"):
        packing.pack_arguments({"images": [bytes(65 * 2**20)]})


def test_libraries_are_named_and_the_scripts_modules_are_not() -> None:
    modules = packing.pack_function(holding(torch.float32)).modules
    assert not any("test_packing" in name for name in modules)
