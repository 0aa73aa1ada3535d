"""Values are set in the objects that a script has; what was one object is one again, and nothing else is."""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from grpo_run.runtime.rank.exact.encoding import Decoder, encode
from grpo_run.runtime.rank.loops._rank_state import InPlace, path_of, shared_objects


class Pair(NamedTuple):
    """A tuple with names."""

    left: Any
    right: Any


def restore(entries: dict[str, Any], saved: dict[str, Any]) -> None:
    """Restore what another process has saved."""
    tensors: dict[str, torch.Tensor] = {}
    values = Decoder(tensors, torch.device("cpu"), "file")(encode(saved, tensors, "state"))
    in_place = InPlace(shared_objects(saved))
    for key, present in entries.items():
        entries[key] = in_place.set(present, values[key], path_of(key))


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1], lambda one: one.append(2)),
        ({1: 2}, lambda one: one.update({3: 4})),
        ({1}, lambda one: one.add(2)),
        (deque([1], maxlen=2), lambda one: one.append(2)),
        (torch.zeros(2), lambda one: one.add_(1)),
        (np.zeros(2), lambda one: one.__iadd__(1)),
        (Counter("a"), lambda one: one.update("ab")),
        (defaultdict(list, {1: [2]}), lambda one: one[1].append(3)),
        (OrderedDict(a=1), lambda one: one.update(b=2)),
    ],
)
@pytest.mark.parametrize("around", [lambda one: one, lambda one: {"a": [one]}, lambda one: Pair(one, 1)])
def test_a_reference_of_the_script_s_own_stays_valid(
    around: Callable[[Any], Any], value: Any, change: Callable[[Any], Any]
) -> None:
    """At any depth, and with the type of the container."""
    mine, theirs = copy.deepcopy(value), copy.deepcopy(value)
    change(theirs)
    entries = {"key": around(mine)}
    restore(entries, {"key": around(theirs)})
    assert repr(mine) == repr(theirs)
    change(mine)
    change(theirs)
    assert repr(entries["key"]) == repr(around(theirs))


def test_what_was_one_object_is_one_again() -> None:
    """Also if the script begins with two."""
    saved: Any = {"best": [1, 2], "nested": {}}
    saved["nested"]["best"] = saved["best"]
    mine: list[int] = []
    entries = {"best": mine, "nested": {"best": [5]}}
    restore(entries, saved)
    assert entries["best"] is mine is entries["nested"]["best"]


def test_what_was_different_does_not_become_one() -> None:
    """A script may begin with one list under two names, and make it two later."""
    first = [0]
    entries = {"current": first, "best": first, "rows": [first, first]}
    restore(entries, {"current": [1], "best": [2], "rows": [[3], [4]]})
    assert entries == {"current": [1], "best": [2], "rows": [[3], [4]]}
    assert first == [1]


def test_other_shapes_lengths_and_types_are_replaced() -> None:
    """The script has begun with something else."""
    entries: dict[str, Any] = {
        "tensor": torch.zeros(2), "array": np.zeros(2), "queue": deque([1]), "number": np.float32(1),
        "none": None, "pair": Pair(1, 2),
    }  # fmt: skip
    saved = {
        "tensor": torch.ones(3), "array": np.ones(3), "queue": deque([2], maxlen=1), "number": np.float32(2),
        "none": [3], "pair": (1, 2, 3),
    }  # fmt: skip
    restore(entries, saved)
    assert repr(entries) == repr(saved)
    assert type(entries["number"]) is np.float32
