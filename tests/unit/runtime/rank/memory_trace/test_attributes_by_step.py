"""A new attribute in each step that holds a tensor: no container accumulates them but the object itself."""

from __future__ import annotations

import importlib.util
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace import containers
from grpo_run.runtime.rank.memory_trace.finding import TraceFinding, sentence

Traced = Callable[..., list[TraceFinding]]
Lines = Callable[[str], int]


class Collector:
    """Holds what it is given."""


def tensor(number: int) -> torch.Tensor:
    """One that is large enough to be followed."""
    return torch.full((40,), float(number))


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Collector, "Collector"),
        (lambda: torch.nn.Linear(2, 2), "Linear"),
        (lambda: types.ModuleType("made_by_script"), "made_by_script"),
        (types.SimpleNamespace, "SimpleNamespace"),
    ],
    ids=["instance", "model", "module", "namespace"],
)
def test_an_attribute_for_each_step_is_found(
    traced: Traced, owner: Callable[[], Any], name: str, line_of: Lines
) -> None:
    """With the names that they share, and the line that sets them."""
    kept = owner()

    def step(number: int) -> None:
        setattr(kept, f"cache_{number}", tensor(number))

    (found,) = traced(step, 20)
    assert (found.kind, found.holder) == ("growth", f"attributes `cache_*` of {name}")
    assert found.held_at is not None
    assert (found.held_at.file, found.held_at.line) == (__file__, line_of("setattr(kept, f"))
    assert "held by attributes `cache_*` of" in sentence(found, "/")


def test_attributes_of_a_class_are_found(traced: Traced) -> None:
    """They are shared by all instances."""
    shared = type("SharedByAll", (), {})
    (found,) = traced(lambda number: setattr(shared, "_".join(["kept", str(number)]), tensor(number)), 20)
    assert found.holder == "attributes `kept_*` of SharedByAll"


@pytest.mark.parametrize("register", ["register_buffer", "register_parameter"])
def test_buffers_and_parameters_for_each_step_are_found(
    traced: Traced, register: str, line_of: Lines
) -> None:
    """A model has them in dictionaries of torch."""
    model = torch.nn.Linear(2, 2)

    def step(number: int) -> None:
        if register == "register_buffer":
            model.register_buffer("seen_%d" % number, tensor(number))  # noqa: UP031
        else:
            model.register_parameter("seen_%d" % number, torch.nn.Parameter(tensor(number)))  # noqa: UP031

    (found,) = traced(step, 20)
    assert (found.kind, found.holder) == ("growth", "attributes `seen_*` of Linear")
    assert found.held_at is not None
    assert found.held_at.line == line_of('model.register_buffer("seen')


def test_variables_of_a_module_are_found(traced: Traced, tmp_path: Path) -> None:
    """That `globals()` has made."""
    file = tmp_path / "script_of_test.py"
    file.write_text(
        'import torch\n\ndef put(number):\n    globals()["result_" + str(number)] = torch.ones(40)\n'
    )
    spec = importlib.util.spec_from_file_location("script_of_test", file)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    (found,) = traced(script.put, 20)
    assert (found.kind, found.holder) == ("growth", "variables `result_*`")
    assert found.held_at is not None
    assert (found.held_at.file, found.held_at.line) == (str(file), 4)


def test_attributes_of_a_fixed_number_are_no_leak(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are set again and again: the caches of layers, and the last steps."""
    monkeypatch.setattr(containers, "LEAST_BYTES", 0)
    kept: Any = Collector()

    def step(number: int) -> None:
        setattr(kept, f"last_{number % 6}", tensor(number))
        for layer in range(8):
            setattr(kept, f"layer_{layer}_cache", tensor(number))

    assert traced(step, 60) == []


def test_attributes_that_are_deleted_are_no_leak(traced: Traced, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some steps later."""
    monkeypatch.setattr(containers, "LEAST_BYTES", 0)
    kept: Any = Collector()

    def step(number: int) -> None:
        setattr(kept, f"cache_{number}", tensor(number))
        if hasattr(kept, f"cache_{number - 6}"):
            delattr(kept, f"cache_{number - 6}")

    assert traced(step, 60) == []


def test_attributes_with_names_of_their_own_are_no_leak(traced: Traced) -> None:
    """A trainer that sets each in another step has only so many."""
    kept: Any = Collector()

    def step(number: int) -> None:
        setattr(kept, "abcdefghijklmnopqrst"[number - 1], tensor(number))

    assert traced(step, 20) == []
