"""Who holds a tensor, named as the script names it."""

from __future__ import annotations

import gc
import importlib.util
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_run.runtime.rank.memory_trace._census import Ledger, take_census, tensor_types
from grpo_run.runtime.rank.memory_trace._cycles import collections_postponed, find_cycle
from grpo_run.runtime.rank.memory_trace._growth import ENOUGH
from grpo_run.runtime.rank.memory_trace._holders import Holder, find_holder
from grpo_run.runtime.rank.memory_trace._kept_exceptions import KeptExceptions
from grpo_run.runtime.rank.memory_trace._names import name_of
from grpo_run.runtime.rank.memory_trace._referrers import running_frames, running_locals

MANY = 5


class Collector:
    """Holds tensors in several ways."""

    def __init__(self) -> None:
        self.history: list[Any] = []
        self.last: deque[torch.Tensor] = deque(maxlen=64)


def fill(add: Callable[[torch.Tensor], object]) -> torch.Tensor:
    """Add tensors; return one of them."""
    made = [torch.zeros(64) for _ in range(MANY)]
    for tensor in made:
        add(tensor)
    return made[2]


def holder_of(tensor: torch.Tensor) -> Holder:
    """The holder of many tensors above this one."""
    start = [tensor]
    found = find_holder(start, lambda held: len(held) >= MANY, {torch.Tensor}, ())
    assert found is not None
    return found


def test_a_list_of_an_instance_is_named_by_attribute_class_and_line(line_of: Callable[[str], int]) -> None:
    """Also if the tensors are in dictionaries in the list."""
    collector = Collector()
    tensor = fill(lambda made: collector.history.append({"logits": made}))
    found = holder_of(tensor).name
    assert found is not None
    assert (found.kind, found.variable.name, found.variable.owner) == ("list", "history", "Collector")
    assert (found.variable.file, found.variable.line) == (__file__, line_of("def __init__(self) -> None:"))


@pytest.fixture
def policy(tmp_path: Path) -> Iterator[Any]:
    """A module of a script. This one's objects may be frozen, which `gc` does not look at."""
    file = tmp_path / "policy_of_test.py"
    file.write_text("import math\neverything = []\n\n\nclass Shared:\n    kept = []\n")
    spec = importlib.util.spec_from_file_location("policy_of_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["policy_of_test"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["policy_of_test"]


@pytest.mark.parametrize(("owner", "name"), [(None, "everything"), ("Shared", "kept")])
def test_a_variable_of_a_module_and_an_attribute_of_a_class_are_named(
    owner: str | None, name: str, policy: Any
) -> None:
    """With the file of the module; the attribute is shared by all instances."""
    kept = getattr(policy if owner is None else getattr(policy, owner), name)
    found = holder_of(fill(kept.append)).name
    assert found is not None
    assert (found.variable.name, found.variable.owner) == (name, owner)
    assert found.variable.file == policy.__file__


def test_a_local_variable_of_a_running_function_is_named() -> None:
    """`gc` does not know it."""
    kept: dict[int, torch.Tensor] = {}
    tensor = fill(lambda made: kept.setdefault(id(made), made))
    found = holder_of(tensor).name
    assert found is not None
    assert (found.kind, found.variable.name) == ("dict", "kept")


def test_a_deque_with_a_bound_is_limited() -> None:
    """It cannot grow forever, however large it is."""
    collector = Collector()
    assert holder_of(fill(collector.last.append)).limited
    assert not holder_of(fill(collector.history.append)).limited


def test_functions_in_a_list_hold_what_they_have_captured() -> None:
    """By a default of an argument, and by a closure."""
    hooks: list[Callable[[], Any]] = []

    def capture(tensor: torch.Tensor) -> Callable[[], Any]:
        return lambda: tensor.sum()

    for add in (
        lambda tensor: hooks.append(lambda kept=tensor: kept.sum()),  # type: ignore[misc]
        lambda tensor: hooks.append(capture(tensor)),
    ):
        hooks.clear()
        found = holder_of(fill(add)).name
        assert found is not None
        assert (found.kind, found.variable.name) == ("list", "hooks")


class Itself:
    """Refers to itself."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.whole = self


def only_tensor(size: int) -> torch.Tensor:
    """The tensor of this size that `gc` knows."""
    found = [one for one in gc.get_objects() if type(one) is torch.Tensor and one.numel() == size]
    assert len(found) == 1
    return found[0]


def test_a_cycle_that_alone_holds_a_tensor_is_proved_and_named(line_of: Callable[[str], int]) -> None:
    """By the class and the attribute that closes it."""
    gc.disable()
    try:
        Itself(torch.zeros(1237))
        tensor = only_tensor(1237)
        cycle = find_cycle(tensor, ())
        assert cycle is not None
        assert (cycle.kind, cycle.attribute, cycle.file) == ("Itself", "whole", __file__)
        assert cycle.line == line_of("def __init__(self, tensor: torch.Tensor) -> None:")
    finally:
        gc.enable()


def test_a_cycle_that_the_script_still_uses_is_no_finding() -> None:
    """Something outside of it holds it."""
    used = [Itself(torch.zeros(1238))]
    assert find_cycle(used[0].tensor, ()) is None


def test_an_exception_that_is_kept_is_named_with_its_frame() -> None:
    """And who keeps it."""
    collector = Collector()

    def score() -> None:
        batch = {"tokens": torch.zeros(1239)}
        raise ValueError(len(batch))

    try:
        score()
    except ValueError as error:
        collector.history.append(error)
    ledger, exceptions, found = Ledger(), KeptExceptions(), []
    for step in range(1, 1 + ENOUGH):
        census = take_census(tensor_types(torch))
        ledger.observe(step, census, {})
        found += exceptions.step_ended(step, census, ledger, {torch.Tensor})
    (kept,) = [one for one in found if one.function == "score"]
    assert (kept.error, kept.steps) == ("ValueError", ENOUGH)
    assert [one.shape for one in kept.entries] == [(1239,)]
    assert kept.name is not None
    assert (kept.name.variable.name, kept.name.variable.owner) == ("history", "Collector")


def test_looking_at_frames_keeps_nothing_alive() -> None:
    """Neither as copies of local variables nor as a cycle of frames."""
    ready, done = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (ready.set(), done.wait(10)))
    other.start()
    ready.wait(10)
    gc.disable()
    try:
        tensor = torch.zeros(64)
        freed = weakref.ref(tensor)
        assert id(tensor) in running_locals()
        assert running_frames()
        del tensor
        assert freed() is None
    finally:
        gc.enable()
        done.set()
        other.join()


def test_a_copy_of_the_variables_that_the_script_keeps_stays() -> None:
    """`locals()` gives that of the frame before Python 3.13. A script may keep it as its settings."""

    def main(learning_rate: float = 1e-6) -> dict[str, Any]:
        settings = locals()
        running_locals()
        return settings

    assert main()["learning_rate"] == 1e-6


def test_looking_for_a_name_keeps_nothing_alive() -> None:
    """What looks is no part of a cycle: the tensor is freed as soon as its last name is gone."""
    mask = torch.ones(64)
    reference = weakref.ref(mask)
    with collections_postponed():
        assert name_of(mask, running_locals(), ()) is not None
        del mask
        assert reference() is None
