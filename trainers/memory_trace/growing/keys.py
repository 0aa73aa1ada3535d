"""What the keys of a growing dictionary tell: whether there are only so many of them, or a new one comes with each step.

Used by `containers.py`. `follow_steps` is pure; `are_of_model` looks at the modules that are alive, and runs no code of theirs.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from grpo_run.trainers.memory_trace.growing.growth import ENOUGH

SHARE_OF_MODEL = 0.9
"""Of the keys that must be of a model: a dictionary may have a few others, such as a counter."""
MOST_MODULES = 64
"""Modules with a child of one name in which a longer name is looked for."""


def follow_steps(born: Sequence[tuple[Any, int]]) -> bool:
    """Whether a number in the keys counts the steps, as in `kept[step]`, `kept[f"step_{step}"]`, and `kept[step, name]`.

    Args:
        born: keys with the step in which what they have was made.
    """
    numbers = [(_numbers(key), step) for key, step in born]
    if not numbers or len({len(found) for found, _ in numbers}) != 1:
        return False
    return any(
        _counts([(found[place], step) for found, step in numbers]) for place in range(len(numbers[0][0]))
    )


def _counts(numbers: Sequence[tuple[int, int]]) -> bool:
    """Whether there is one number for each step, by the same more each time, or as many as steps have passed between censuses."""
    by_step: dict[int, set[int]] = defaultdict(set)
    for number, step in numbers:
        by_step[step].add(number)
    steps = sorted(by_step)
    if len(steps) < ENOUGH:
        return False
    in_order = [number for step in steps for number in sorted(by_step[step])]
    more = {later - earlier for earlier, later in itertools.pairwise(in_order)}
    if len(in_order) == len(steps):
        return len(more) == 1 and more != {0}
    longest = max(later - earlier for earlier, later in itertools.pairwise(steps))
    passed = abs((in_order[-1] - in_order[0]) - (steps[-1] - steps[0])) <= 1 + longest
    return passed and min(more) >= 0


def _numbers(key: Any) -> list[int]:
    if isinstance(key, tuple):
        return [number for part in key for number in _numbers(part)]
    if isinstance(key, str):
        return [int(digits) for digits in re.findall(r"\d{1,18}", key)]
    return [key] if type(key) is int else []


def are_of_model(keys: Collection[Any], torch: Any) -> bool:
    """Whether keys are parameters or modules, or their ids or names: there are no more of them than the model has.

    Args:
        torch: the module.
    """
    modules = [one for one in gc.get_objects() if issubclass(type(one), torch.nn.Module)]
    identities = set(map(id, modules))
    children: dict[str, list[Any]] = defaultdict(list)
    for module in modules:
        for name, child in _children(module).items():
            identities.add(id(child))
            if len(children[name]) < MOST_MODULES:
                children[name].append(module)
    known = sum(
        isinstance(key, (torch.nn.Parameter, torch.nn.Module))
        or (type(key) is int and key in identities)
        or (isinstance(key, str) and _is_name(key, children))
        for key in keys
    )
    return known >= SHARE_OF_MODEL * len(keys)


def _is_name(name: str, children: Mapping[str, list[Any]]) -> bool:
    """Whether a name is that of a parameter, buffer or module within one of some modules. A number alone may be anything."""
    first, *others = name.split(".")
    if name.isdigit():
        return False
    for module in children.get(first, ()):
        found = _children(module).get(first)
        for part in others:
            found = _children(found).get(part)
        if found is not None:
            return True
    return False


def _children(module: Any) -> dict[str, Any]:
    own = getattr(module, "__dict__", {})
    return {
        **own.get("_modules", {}),
        **own.get("_parameters", {}),
        **own.get("_buffers", {}),
    }
