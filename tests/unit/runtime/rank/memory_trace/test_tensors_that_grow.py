"""What a whole trace says of a script, step by step: tensors that are replaced by longer ones, sums of losses, linked objects, names."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace.finding import TraceFinding, sentence
from grpo_run.runtime.rank.memory_trace.longer_tensors import longest_runs
from grpo_run.runtime.rank.memory_trace.other_code import is_chain_cut
from grpo_run.runtime.rank.memory_trace.sources import Variable
from grpo_run.runtime.rank.memory_trace.tensor_bounds import is_graph_cut, is_length_bounded

PREDICTED = torch.nn.Linear(20, 20)


class Kept:
    """Holds something."""

    def __init__(self) -> None:
        self.all: Any = None
        self.total: Any = 0


def test_a_tensor_that_is_made_longer_in_each_step_is_found_once(
    traced: Callable[..., list[TraceFinding]], line_of: Callable[[str], int]
) -> None:
    """With its name, the line, and how much it was and is."""
    kept = Kept()

    def step(number: int) -> None:
        new = torch.full((4, 20), float(number))
        if kept.all is None:
            kept.all = new
        else:
            kept.all = torch.cat([kept.all, new])

    (found,) = traced(step)
    assert (found.kind, found.holder, found.tensors) == ("growing_tensor", "tensor `all` of Kept", 1)
    assert found.held_at is not None
    assert found.held_at.line == line_of("self.all")
    assert found.made_at is not None
    assert found.made_at.line == line_of("kept.all = torch.cat(")
    assert found.bytes - found.details["first_bytes"] == 5 * 4 * 20 * 4
    assert found.since_step - found.details["first_step"] == found.steps == 5
    assert f"to {found.bytes / 1024:.1f} KiB in step {found.since_step}, made at" in sentence(found, "/")


def test_a_tensor_in_a_dictionary_is_found(traced: Callable[..., list[TraceFinding]]) -> None:
    """Through a copy, too."""
    kept: dict[str, torch.Tensor] = {}

    def step(number: int) -> None:
        new = torch.full((4, 20), float(number))
        kept["all"] = torch.cat([kept["all"], new]).clone() if "all" in kept else new

    (found,) = traced(step)
    assert (found.kind, found.holder) == (
        "growing_tensor",
        f"a tensor in dict `kept` in {test_a_tensor_in_a_dictionary_is_found.__name__}()",
    )


def test_longer_batches_of_a_curriculum_are_no_growth(traced: Callable[..., list[TraceFinding]]) -> None:
    """Each is made anew, in one or several pieces, and the last one is alive at the end of its step."""
    batch: Any = None

    def step(number: int) -> None:
        nonlocal batch
        batch = {"tokens": torch.randint(9, (4, 20 + number)), "mask": torch.ones(4, 20 + number)}
        batch["tokens"] = torch.cat([batch["tokens"], batch["tokens"][:, :4]], 1)
        batch["positions"] = torch.arange(20 + 8 * number).expand(4, -1).contiguous()

    assert traced(step) == []
    assert batch is not None


def test_a_batch_of_the_step_before_that_is_made_longer_once_is_no_growth(
    traced: Callable[..., list[TraceFinding]],
) -> None:
    """As a loader's that has fetched it in advance."""
    ahead: list[torch.Tensor] = [torch.randint(9, (4, 40))]

    def step(number: int) -> None:
        ahead.append(torch.cat([ahead.pop(), torch.randint(9, (4, 40 + number))], 1))
        ahead.append(torch.randint(9, (4, 41 + 2 * number)))
        ahead.pop(0)

    assert traced(step, 20) == []


def test_a_cache_that_is_bounded_by_a_length_is_no_growth(traced: Callable[..., list[TraceFinding]]) -> None:
    """Though it has not reached it."""
    kept = torch.zeros(4, 1, 8)

    def step(number: int) -> None:
        nonlocal kept
        kept = torch.cat([kept, torch.full((4, 1, 8), float(number))], 1)[:, -30:]

    assert traced(step, steps=14) == []
    assert kept.shape[1] == 15


def test_tensors_of_varying_lengths_are_no_growth(traced: Callable[..., list[TraceFinding]]) -> None:
    """Padded batches, and state that is made in a later step."""
    state: list[Any] = []

    def step(number: int) -> None:
        lengths = torch.randint(30, 90, (3,)).tolist()
        state[:1] = [[torch.randint(9, (4, length)) for length in lengths]]
        if number == 3:
            state.append([torch.zeros(20, 20) for _ in range(9)])

    assert traced(step, 20) == []


def test_a_sum_of_losses_that_keeps_their_graphs_is_named_once(
    traced: Callable[..., list[TraceFinding]], line_of: Callable[[str], int]
) -> None:
    """The variable or attribute that holds the end of the graph, with its line."""
    kept = Kept()

    def step(number: int) -> None:
        kept.total = kept.total + PREDICTED(torch.full((4, 20), float(number))).pow(2).sum()

    (found,) = traced(step)
    assert (found.kind, found.holder) == ("graph", "tensor `total` of Kept")
    assert found.held_at is not None
    assert found.held_at.line == line_of("self.total")
    assert "saved by the autograd graph that ends in tensor `total` of Kept" in sentence(found, "/")


def test_a_list_of_losses_is_still_the_list(traced: Callable[..., list[TraceFinding]]) -> None:
    """None of its tensors ends the graph of the others."""
    losses: list[torch.Tensor] = []
    found = traced(lambda number: losses.append(PREDICTED(torch.ones(4, 20)).pow(2).mean()))
    assert [one.holder for one in found] == [
        f"list `losses` in {test_a_list_of_losses_is_still_the_list.__name__}()"
    ]


class Link:
    """Linked to the one before."""

    def __init__(self, tensor: torch.Tensor, before: Link | None) -> None:
        self.tensor = tensor
        self.before = before


def test_linked_objects_are_one_finding(traced: Callable[..., list[TraceFinding]]) -> None:
    """Of what holds the last of them."""
    last: list[Any] = [None]

    def step(number: int) -> None:
        last[0] = Link(torch.full((4, 20), float(number)), last[0])

    (found,) = traced(step, 20)
    assert found.holder is not None
    assert "`last` in" in found.holder


class Chain:
    """Linked in both directions."""

    def __init__(self) -> None:
        self.tail = Both(torch.zeros(4, 20))

    def add(self, tensor: torch.Tensor) -> None:
        """Add one at the end."""
        new = Both(tensor)
        new.before, self.tail.after = self.tail, new
        self.tail = new


class Both:
    """Linked to the one before and the one after."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.before: Both | None = None
        self.after: Both | None = None


def test_objects_that_are_linked_both_ways_are_one_finding(traced: Callable[..., list[TraceFinding]]) -> None:
    """Named by what holds an end of the chain, not by the links."""
    chain = Chain()
    (found,) = traced(lambda number: chain.add(torch.full((4, 20), float(number))), 20)
    assert found.holder == "Both `tail` of Chain"


@pytest.mark.parametrize(
    ("code", "cut"),
    [("first = first.after", True), ("first.after = None", True), ("new.after = first", False)],
)
def test_code_that_cuts_a_chain_is_found(tmp_path: Path, code: str, cut: bool) -> None:
    """It may hold a number of objects only."""
    file = tmp_path / "train.py"
    file.write_text(
        "class Link:\n    def __init__(self):\n        self.after = None\n"
        f"def train(first, new):\n    {code}\n    return first\n"
    )
    assert is_chain_cut(frozenset({"after"}), [str(file)]) is cut


def test_attributes_of_models_functions_and_modules_are_named(
    traced: Callable[..., list[TraceFinding]], line_of: Callable[[str], int]
) -> None:
    """With the line of the script that sets them, and the variable of a context variable."""
    model = torch.nn.Linear(2, 2)
    model.kept_in_model = []  # type: ignore[assignment]
    made_by_script: Any = types.ModuleType("made_by_script")
    made_by_script.kept_there = []
    in_context = contextvars.ContextVar[list[Any]]("in_context")
    in_context.set([])

    def reward() -> None: ...

    reward.kept = []  # type: ignore[attr-defined]

    def step(number: int) -> None:
        kept: Any = model.kept_in_model
        kept.append(torch.full((4, 20), float(number)))
        reward.kept.append(torch.full((4, 20, 2), float(number)))  # type: ignore[attr-defined]
        made_by_script.kept_there.append(torch.full((80,), float(number)))
        in_context.get().append(torch.full((80,), number))

    found = {one.holder: one.held_at for one in traced(step)}
    outer = test_attributes_of_models_functions_and_modules_are_named.__name__
    lines = {
        "list `kept_in_model` of Linear": "model.kept_in_model",
        f"list `kept` of {reward.__qualname__}()": "reward.kept =",
        "list `kept_there` of made_by_script": "made_by_script.kept_there =",
        f"a list in ContextVar `in_context` in {outer}()": "in_context = ",
    }
    assert {holder: at and at.line for holder, at in found.items()} == {
        holder: line_of(text) for holder, text in lines.items()
    }


@pytest.mark.parametrize(
    ("code", "bounded"),
    [
        ("kept = torch.cat([kept, new])", False),
        ("kept = new if kept is None else torch.cat([kept, new])", False),
        (
            "if kept is None:\n            kept = new\n        else:\n            kept = torch.cat([kept, new])",
            False,
        ),
        ("kept = torch.cat([kept, new])[-9:]", True),
        ("kept = torch.cat([vars().get('kept', new), new])[-9:]", True),
        ("kept = torch.cat([kept, new]).detach().cpu()", False),
        ("kept = push(kept, new)", True),
        ("kept = last(torch.cat([kept, new]))", True),
        ("kept = torch.cat([kept, new])\n        if new: kept = last(kept)", True),
        ("kept = torch.cat([kept, new])\n        if kept.shape[0] > 9: print()", True),
        ("kept = torch.cat([kept, new])\n        if new: kept = None", True),
        ("kept = torch.cat([kept, new])\n        kept.narrow(0, 0, 9)", True),
    ],
)
def test_code_that_bounds_a_tensor_is_found(tmp_path: Path, code: str, bounded: bool) -> None:
    """Slicing, measuring, and beginning anew may bound it; beginning does not."""
    file = tmp_path / "train.py"
    file.write_text(f"def train(all):\n    kept = None\n    for new in all:\n        {code}\n")
    assert is_length_bounded(Variable(str(file), "kept", function="train")) is bounded


@pytest.mark.parametrize(
    ("code", "cut"),
    [
        ("kept = kept + new", False),
        ("kept = kept.detach() + new", True),
        ("kept = kept + new\n        kept.backward()", True),
    ],
)
def test_code_that_cuts_a_graph_is_found(tmp_path: Path, code: str, cut: bool) -> None:
    """By a backward pass from its end, or without one."""
    file = tmp_path / "train.py"
    file.write_text(f"def train(all):\n    kept = 0\n    for new in all:\n        {code}\n")
    assert is_graph_cut(Variable(str(file), "kept", function="train")) is cut


def test_steps_with_longer_tensors_are_counted_in_a_row() -> None:
    """A tensor that is not longer begins again."""
    runs: dict[int, int] = {}
    for lengths in ([5, 9], [6], [8, 30], [7]):
        runs = longest_runs(runs, lengths)
    assert runs == {7: 1}
    assert longest_runs(longest_runs({5: 3}, [6]), [7]) == {7: 5}
