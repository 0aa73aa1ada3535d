"""Containers that stop growing once all their keys or places are taken, and those that never do."""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace import containers
from grpo_run.runtime.rank.memory_trace.containers import are_of_model, follow_steps
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding

Traced = Callable[..., list[TraceFinding]]
ROWS = 64


def tensor(number: int) -> torch.Tensor:
    """One that is large enough to be followed."""
    return torch.full((40,), float(number))


def shuffled(rows: int, size: int, steps: int) -> list[list[int]]:
    """Batches of a dataset that is shuffled in each epoch."""
    order = random.Random(0)
    batches: list[list[int]] = []
    while len(batches) < steps:
        epoch = order.sample(range(rows), rows)
        batches += [epoch[at : at + size] for at in range(0, rows, size)]
    return batches


@pytest.mark.parametrize("rows", [ROWS, 400])
@pytest.mark.parametrize("text", [False, True], ids=["rows", "prompts"])
def test_a_baseline_for_each_prompt_of_a_dataset_is_no_leak(traced: Traced, rows: int, text: bool) -> None:
    """It fills in the first epoch, which may be long; later its tensors are replaced."""
    batches = shuffled(rows, 4, 140)
    baselines: dict[Any, torch.Tensor] = {}

    def step(number: int) -> None:
        for row in batches[number - 1]:
            baselines[f"What is {row} + 1?" if text else row] = tensor(number)

    assert traced(step, 140) == []
    assert sum(1 for _ in baselines) == rows


def test_a_running_mean_by_prompt_is_no_leak(traced: Traced) -> None:
    """With prompts that are drawn with replacement, and a default."""
    drawn = random.Random(0)
    baselines: dict[int, torch.Tensor] = defaultdict(lambda: torch.zeros(40))

    def step(number: int) -> None:
        for _ in range(3):
            row = drawn.randrange(ROWS)
            baselines[row] = 0.9 * baselines[row] + 0.1 * tensor(number)

    assert traced(step, 120) == []


@pytest.mark.parametrize("by", ["parameter", "id", "name", "module"])
def test_a_state_for_each_parameter_that_is_made_when_it_is_used_is_no_leak(
    traced: Traced, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However large it is: there are as many parameters as there are."""
    monkeypatch.setattr(containers, "LEAST_BYTES", 0)
    model = torch.nn.ModuleDict({f"expert_{number}": torch.nn.Linear(8, 8) for number in range(30)})
    state: dict[Any, dict[str, torch.Tensor]] = defaultdict(dict)
    names = list(model.named_parameters())

    def step(number: int) -> None:
        name, parameter = names[number % 30 * 2]
        keys = {
            "parameter": parameter,
            "id": id(parameter),
            "name": name,
            "module": name.removesuffix(".weight"),
        }
        state[keys[by]] = {"mean": torch.zeros_like(parameter), "variance": torch.zeros_like(parameter)}

    assert traced(step, 25) == []


def test_places_that_are_filled_one_by_one_are_no_leak(traced: Traced) -> None:
    """A list that was made with all of them."""
    places: list[Any] = [None] * 40

    def step(number: int) -> None:
        place = number % 40
        places[place] = tensor(number)

    assert traced(step, 90) == []


@pytest.mark.parametrize("kind", ["ring", "queue", "cache"])
def test_a_large_buffer_is_no_leak_once_it_is_full(traced: Traced, kind: str) -> None:
    """Though it has tensors of many steps."""
    ring: list[torch.Tensor] = []
    queue: list[torch.Tensor] = []
    cache: OrderedDict[int, torch.Tensor] = OrderedDict()
    capacity = 70

    def step(number: int) -> None:
        if kind == "ring":
            if len(ring) < capacity:
                ring.append(tensor(number))
            else:
                ring[number % capacity] = tensor(number)
        elif kind == "queue":
            queue.append(tensor(number))
            if len(queue) > capacity:
                del queue[0]
        else:
            cache[number * 7919 % 1000] = tensor(number)
            if len(cache) > capacity:
                cache.popitem(last=False)

    assert traced(step, 160) == []


@pytest.mark.parametrize(
    "key",
    [
        lambda step: step,
        lambda step: f"step_{step - 1}",
        lambda step: (0, step),
        lambda step: 10 * step,
        torch.tensor,
    ],
    ids=["step", "text", "pair", "tens", "tensor"],
)
def test_a_dictionary_by_step_is_a_leak(traced: Traced, key: Callable[[int], Any]) -> None:
    """No step comes twice."""
    kept: dict[Any, torch.Tensor] = {}

    def step(number: int) -> None:
        kept[key(number)] = tensor(number)

    (found,) = traced(step, 20)
    assert (found.kind, found.holder) == (
        "growth",
        f"dict `kept` in {test_a_dictionary_by_step_is_a_leak.__name__}()",
    )


def test_lists_in_a_dictionary_that_grow_are_a_leak(traced: Traced) -> None:
    """Its keys come again, and what they have is longer each time."""
    kept: dict[str, list[torch.Tensor]] = defaultdict(list)

    def step(number: int) -> None:
        for name in "abcdefghij"[number % 3 :: 3]:
            kept[name].append(tensor(number))

    found = traced(step, 40)
    assert [one.kind for one in found] == ["growth"]


def test_a_dictionary_with_new_keys_is_said_to_fill_once_it_is_large(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is a leak unless all keys are known one day, which nobody can tell yet."""
    monkeypatch.setattr(containers, "LEAST_BYTES", 160 * 12)
    kept: dict[str, torch.Tensor] = {}
    texts = random.Random(0)

    def step(number: int) -> None:
        kept[f"{texts.random()}"] = tensor(number)

    (found,) = traced(step, 40)
    assert found.kind == "filling"
    assert found.bytes >= 160 * 12
    assert not found.details["bounded_by_code"]


def test_a_list_that_is_never_trimmed_is_said_to_fill(
    traced: Traced, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Code trims it, though it never does: after 50 steps, once it is large."""
    monkeypatch.setattr(containers, "LEAST_BYTES", 160 * 60)
    kept: list[torch.Tensor] = []

    def step(number: int) -> None:
        kept.append(tensor(number))
        if len(kept) > 100_000:
            kept.pop()

    (found,) = traced(step, 90)
    assert (found.kind, found.details["bounded_by_code"]) == ("filling", True)
    assert found.steps >= 50


@pytest.mark.parametrize(
    ("born", "follows"),
    [
        ([(step, step) for step in range(5, 12)], True),
        ([((step, name), step) for step in range(5, 12) for name in "ab"], True),
        ([(f"step_{step}/{name}", step + 1) for step in range(5, 12) for name in "ab"], True),
        ([(step // 4, step) for step in range(8, 40, 4)], True),
        ([(step, min(step | 1, 15)) for step in range(4, 16)], True),
        ([(8 * step + row, step) for step in range(5, 12) for row in range(8)], False),
        ([(step * 7 % 64, step) for step in range(5, 12)], False),
        ([("a prompt", step) for step in range(5, 12)], False),
        ([(f"{step} + {step * 7 % 64}?", step * 7 % 5) for step in range(5, 12)], False),
        ([(step, step) for step in range(5, 8)], False),
        ([], False),
    ],
    ids=["steps", "pairs", "texts", "rollouts", "steps left out", "rows in order", "shuffled rows", "no number", "sums", "few", "none"],
)  # fmt: skip
def test_keys_that_follow_the_steps_are_told_from_others(born: list[tuple[Any, int]], follows: bool) -> None:
    """A number in them counts the steps. Rows that are read in order are more than one a step."""
    assert follow_steps(born) is follows


def test_names_within_a_model_are_its_keys() -> None:
    """With and without the prefix of a wrapper; a number alone is none, though a layer has it for a name."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    wrapped = torch.nn.ModuleDict({"wrapper_of_test": model})
    assert are_of_model([f"wrapper_of_test.{name}" for name, _ in model.named_parameters()], torch)
    assert are_of_model(["0.weight", "1.bias", "wrapper_of_test.1"], torch)
    assert not are_of_model(["0", "1"], torch)
    assert not are_of_model(["0.other", "wrapper_of_test.0.weight.9"], torch)
    assert are_of_model([id(wrapped), id(model[0].weight)], torch)
