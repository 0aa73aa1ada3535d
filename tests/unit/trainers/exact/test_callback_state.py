"""The state of callbacks is saved and restored in place; settings and references to other objects are not."""

from __future__ import annotations

import random
from collections import Counter, deque
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from grpo_run.trainers.exact.callback_state import CallbackStates
from grpo_run.trainers.exact.encoding import Decoder, Encoder


class Counting(TrainerCallback):
    """Keeps state of several types, a setting, and references."""

    def __init__(self, *, setting: int = 1, shared: Any = None) -> None:
        self.setting = setting
        self.count = 0
        self.items: list[Any] = [] if shared is None else shared
        self.counter: Counter[str] = Counter()
        self.last: deque[int] = deque(maxlen=2)
        self.seen: set[int] = set()
        self.mean = torch.zeros(2, dtype=torch.bfloat16)
        self.random = random.Random(1)
        self.numpy = np.random.default_rng(1)
        self.torch = torch.Generator().manual_seed(1)
        self.model = torch.nn.Linear(2, 2)
        self.function = len

    def change(self) -> None:
        self.count += 1
        self.items.append(self.count)
        self.counter["a"] += 2
        self.last.extend((1, 2, 3))
        self.seen.add(7)
        self.mean = self.mean + 1
        self.draw()

    def draw(self) -> tuple[float, float, float]:
        return (
            self.random.random(), float(self.numpy.random()), torch.rand((), generator=self.torch).item()
        )  # fmt: skip


class OwnState(TrainerCallback):
    """Has the methods of a stateful object."""

    def __init__(self) -> None:
        self.value = 0
        self.lock = object()

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"] * 10


def never(message: str) -> None:
    """Fail on any warning."""
    raise AssertionError(message)


def carry(saved: list[Any], restored: list[Any], change: Any) -> str | None:
    """Change the first callbacks after their call began, save them, and restore into the second ones."""
    states = CallbackStates(saved, never)
    change()
    encoder = Encoder(never)
    encoded = states.save(encoder)
    return CallbackStates(restored, never).restore(
        encoded, Decoder(encoder.tensors, torch.device("cpu"), "test")
    )


def test_changed_attributes_are_restored_in_place_and_with_their_types() -> None:
    """Another object that shares a list sees the restored items."""
    shared: list[Any] = []
    saved, restored = Counting(), Counting(shared=shared)
    assert carry([saved], [restored], saved.change) is None
    assert restored.count == 1
    assert shared == [1]
    assert restored.counter == Counter(a=2)
    assert type(restored.counter) is Counter
    assert restored.last == deque((2, 3))
    assert restored.last.maxlen == 2
    assert restored.seen == {7}
    assert torch.equal(restored.mean, saved.mean)
    assert restored.draw() == saved.draw()


def test_an_unchanged_attribute_keeps_the_scripts_new_value() -> None:
    """A setting that the user has edited between two launches takes effect."""
    saved, restored = Counting(setting=1), Counting(setting=5)
    carry([saved], [restored], saved.change)
    assert restored.setting == 5


def test_state_that_returned_to_its_initial_value_overrides_nothing() -> None:
    """The script creates the same value again."""
    saved, restored = Counting(), Counting()

    def back_and_forth() -> None:
        saved.change()
        saved.count = 0

    carry([saved], [restored], back_and_forth)
    assert restored.count == 0


def test_callbacks_of_one_class_are_told_apart_by_their_order() -> None:
    """Two of a class, another class between them."""
    saved = [Counting(), EarlyStoppingCallback(3), Counting()]
    restored = [Counting(), EarlyStoppingCallback(4), Counting()]

    def change() -> None:
        saved[0].count, saved[2].count = 1, 2
        saved[1].early_stopping_patience_counter = 2

    carry(saved, restored, change)
    assert [restored[0].count, restored[2].count] == [1, 2]
    assert restored[1].early_stopping_patience_counter == 2
    assert restored[1].early_stopping_patience == 4


def test_a_callback_with_state_dict_decides_for_itself() -> None:
    """Its attributes are not touched, and none is reported as lost."""
    saved, restored = OwnState(), OwnState()
    saved.value = 3
    carry([saved], [restored], lambda: None)
    assert restored.value == 30


def test_attributes_that_cannot_be_saved_are_named_once() -> None:
    """References to models and functions are not state; a file is."""
    warned: list[str] = []
    callback = Counting()
    with open("/dev/null") as file:
        callback.items = file
        states = CallbackStates([callback, ProgressCallback()], warned.append)
        callback.change = lambda: None  # type: ignore[method-assign]
        states.save(Encoder(never))
    assert len(warned) == 1
    assert "Counting" in warned[0]
    assert "items (TextIOWrapper)" in warned[0]


@pytest.mark.parametrize("changed", [True, False])
def test_a_saved_callback_that_the_script_lacks_is_reported_if_it_had_state(changed: bool) -> None:
    """A callback without changes may come and go."""
    saved = Counting()
    problem = carry([saved], [], saved.change if changed else lambda: None)
    assert (problem is not None and "Counting" in problem) == changed
