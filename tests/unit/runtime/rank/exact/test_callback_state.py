"""The state of callbacks is saved and restored in place; settings and references to other objects are not."""

from __future__ import annotations

import functools
import json
import random
import threading
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers.trainer_callback import ProgressCallback

from grpo_run.runtime.rank.exact.callback_state import CallbackStates
from grpo_run.runtime.rank.exact.encoding import Decoder, Encoder, encode
from grpo_run.runtime.rank.exact.format import CallbackState


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
    """A setting that the user has edited between two launches takes effect. State that has returned to its
    initial value overrides nothing: the script creates the same value again.
    """
    saved, restored = Counting(setting=1), Counting(setting=5)

    def back_and_forth() -> None:
        saved.change()
        saved.count = 0

    carry([saved], [restored], back_and_forth)
    assert (restored.setting, restored.count, restored.items) == (5, 0, [1])


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


class Tracking(TrainerCallback):
    """Opens a run in `on_train_begin`, as trackers do, and keeps state and a path."""

    def __init__(self, run: str, *, start: Any = 3, weights: torch.Tensor | None = None) -> None:
        self.opened = (run, start, weights)
        self.out = Path("out")

    def begin(self) -> None:
        run, start, weights = self.opened
        self.run, self.logged, self.labels = run, 0, {run[:1], "x", "y", "z"}
        self.left = start
        self.average = weights
        self.handle = threading.Lock()

    def change(self) -> None:
        self.logged += 1
        self.left -= 1
        self.labels.add("seen")
        if self.average is not None:
            self.average = self.average + 1


def restart(before: Tracking, after: Tracking, change: Callable[[], None]) -> None:
    """Begin a call, change its callback, save it, and begin and restore the call of another process."""
    states, encoder = CallbackStates([before], never), Encoder(never)
    before.begin()
    states.begin()
    change()
    saved = states.save(encoder)
    saved = [CallbackState.model_validate(json.loads(json.dumps(one.model_dump()))) for one in saved]
    states = CallbackStates([after], never)
    after.begin()
    states.begin()
    assert states.restore(saved, Decoder(encoder.tensors, torch.device("cpu"), "test")) is None


def test_what_on_train_begin_makes_anew_is_kept_and_its_state_restored() -> None:
    """Also without a change of it, in the third process, and for an object that no checkpoint can hold."""
    first, second, third = Tracking("run-a"), Tracking("run-b"), Tracking("run-c")
    restart(first, second, first.change)
    assert (second.run, second.logged, second.left) == ("run-b", 1, 2)
    assert second.labels == {"r", "x", "y", "z", "seen"}
    assert second.handle is not first.handle
    restart(second, third, second.change)
    assert (third.run, third.logged, third.left) == ("run-c", 1, 2)


def test_what_the_script_makes_anew_or_edits_is_kept() -> None:
    """A tracker may open a run for each epoch; the user has edited the patience between two launches."""
    first, second = Tracking("run-a", start=3), Tracking("run-b", start=9)

    def change() -> None:
        first.change()
        first.run = "run-a2"

    restart(first, second, change)
    assert (second.run, second.left) == ("run-b", 9)


def test_an_average_that_begins_with_the_weights_is_restored() -> None:
    """The weights of the checkpoint are loaded when `on_train_begin` is called again, so it differs at each
    start.
    """
    first = Tracking("run-a", weights=torch.zeros(2))
    second = Tracking("run-b", weights=torch.full((2,), 7.0))
    restart(first, second, first.change)
    assert second.average is not None
    assert second.average.tolist() == [1.0, 1.0]
    third = Tracking("run-c", weights=torch.full((2,), 7.0))
    restart(Tracking("run-a", weights=torch.zeros(2)), third, lambda: None)
    assert third.average is not None
    assert third.average.tolist() == [0.0, 0.0], "what the weights were at the first start"


def test_a_set_has_the_same_digest_in_every_process() -> None:
    """The order of a set of strings differs between processes, and with the order in which items came."""
    one, other = {f"item {index}" for index in range(50)}, set()
    for index in reversed(range(50)):
        other.add(f"item {index}")
    other |= {"more"}
    other.discard("more")
    assert encode(one, {}, "one") == encode(other, {}, "other")


def test_only_an_attribute_that_changes_and_cannot_be_saved_is_reported_and_once() -> None:
    """References to models and functions are not state; a path that stays and a new connection are not
    lost.
    """
    warned: list[str] = []
    callback = Counting()
    callback.out = Path("out")  # type: ignore[attr-defined]
    states = CallbackStates([callback, ProgressCallback()], functools.cache(warned.append))
    callback.connection = threading.Lock()  # type: ignore[attr-defined]
    states.begin()
    callback.change = lambda: None  # type: ignore[method-assign]
    states.save(Encoder(never))
    assert warned == []
    callback.out = Path("elsewhere")  # type: ignore[attr-defined]
    callback.items = [Path("a")]
    states.save(Encoder(never))
    states.save(Encoder(never))
    assert [text.partition(",")[0] for text in warned] == [
        "callback Counting: items has changed",
        "callback Counting: out has changed",
    ]


@pytest.mark.parametrize("changed", [True, False])
def test_a_saved_callback_that_the_script_lacks_is_reported_if_it_had_state(changed: bool) -> None:
    """A callback without changes may come and go."""
    saved = Counting()
    problem = carry([saved], [], saved.change if changed else lambda: None)
    assert (problem is not None and "Counting" in problem) == changed
