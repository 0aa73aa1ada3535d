"""Seeds of requests: the same after a restart, and another for each sample of a group."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from grpo_run.runtime.features.rollout_server._seeds import Seeds


class Client:
    """The part of TRL's client that generates."""

    def __init__(self) -> None:
        self.requests: dict[int | None, list[Any]] = {}

    def generate(
        self, prompts: list[Any], features: list[Any] | None = None, n: int = 1, generation_kwargs: Any = None
    ) -> dict[str, Any]:
        """Note what is sent under which seed."""
        seed = (generation_kwargs or {}).get("seed")
        assert seed not in self.requests
        self.requests[seed] = prompts if features is None else [prompts, features]
        made = [[*prompt, seed, sample] for prompt in prompts for sample in range(n)]
        return {"prompt_ids": prompts, "completion_ids": made, "logprobs": None}


def trainer(step: int = 0, seed: int = 7) -> Any:
    """A trainer in a step."""
    return SimpleNamespace(
        args=SimpleNamespace(seed=seed),
        state=SimpleNamespace(global_step=step),
        model=SimpleNamespace(training=True),
    )


@pytest.fixture
def client() -> Client:
    """A client that was asked nothing."""
    return Client()


def test_one_request_for_groups_of_different_prompts(client: Client) -> None:
    """As TRL sends it: vLLM gives the samples of a prompt seeds of their own."""
    made = Seeds(trainer(), 1).send(client.generate, [[1], [2]], n=2)
    assert list(client.requests.values()) == [[[1], [2]]]
    assert len(made["completion_ids"]) == 4


@pytest.mark.parametrize(
    ("prompts", "n"), [([[1], [2], [3]], 1), ([[1], [1], [2]], 2)], ids=["turns", "equal"]
)
def test_samples_of_a_group_are_never_alike(client: Client, prompts: list[Any], n: int) -> None:
    """A request for each prompt if they may belong to one group; the answers come in their order."""
    made = Seeds(trainer(), 1).send(client.generate, prompts=prompts, n=n)
    assert sorted(client.requests.values()) == sorted([one] for one in prompts)
    assert [one[0] for one in made["completion_ids"]] == [one[0] for one in prompts for _ in range(n)]
    assert len({tuple(one[1:]) for one in made["completion_ids"]}) == len(prompts) * n
    assert (made["prompt_ids"], made["logprobs"]) == (prompts, None)


def test_what_belongs_to_a_prompt_is_sent_with_it(client: Client) -> None:
    """Images."""
    Seeds(trainer(), 1).send(client.generate, [[1], [2]], features=["one", "two"])
    assert sorted(client.requests.values()) == [[[[1]], ["one"]], [[[2]], ["two"]]]


def test_a_seed_of_the_script_stays(client: Client) -> None:
    """It decides about its samples."""
    Seeds(trainer(), 1).send(client.generate, [[1], [1]], generation_kwargs={"seed": 5})
    assert client.requests == {5: [[1], [1]]}


def seeds_of(*, step: int = 0, seed: int = 7, train_call: int = 1, training: bool = True) -> list[Any]:
    """Return the seeds of two requests."""
    client, one = Client(), trainer(step, seed)
    one.model.training = training
    seeds = Seeds(one, train_call)
    for prompt in ([1], [2]):
        seeds.send(client.generate, [prompt])
    return list(client.requests)


def test_seeds_depend_on_the_place_and_on_nothing_else() -> None:
    """Another process takes the same; each step, call, script and evaluation has others."""
    others = [seeds_of(step=1), seeds_of(seed=8), seeds_of(train_call=2), seeds_of(training=False)]
    assert seeds_of() == seeds_of()
    assert len({one for seeds in [seeds_of(), *others] for one in seeds}) == 10


def test_what_is_made_again_gets_the_same_seeds(client: Client) -> None:
    """As often as it is made again."""
    seeds = Seeds(trainer(), 1)
    seeds.send(client.generate, [[1]])
    again = seeds.remembered()
    for _ in range(2):
        client.requests.clear()
        seeds.send(client.generate, [[1]])
        second = list(client.requests)
        again()
    client.requests.clear()
    seeds.send(client.generate, [[1]])
    assert list(client.requests) == second
    assert inspect.signature(client.generate).parameters.keys() >= {"n", "generation_kwargs"}


def test_fresh_seeds_of_a_guard_reach_the_server(client: Client) -> None:
    """They change torch's generator; the same state gives the same seeds again."""
    torch.manual_seed(1)
    state = torch.get_rng_state()
    seeds = []
    for fresh in (False, False, True):
        torch.set_rng_state(state)
        if fresh:
            torch.manual_seed(2)
        client.requests.clear()
        Seeds(trainer(), 1).send(client.generate, [[1], [2]], n=2)
        seeds.append(list(client.requests))
    assert seeds[0] == seeds[1] != seeds[2]
