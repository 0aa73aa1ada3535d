"""Whether what a container keeps grows without end, may stop growing, or has stopped.

Used by `tracer.py` for each holder that was found. A list that code only appends to is a leak as soon as it
has tensors of enough steps. A dictionary that is filled key by key, a list whose places are filled, and
whatever code removes from look the same at first. They are compared with an earlier look: they must have
grown by most of what was made since. The keys of a dictionary tell whether there are only so many of them
or a new one comes with each step: `follow_steps` is pure, and `are_of_model` looks at the modules that are
alive and runs no code of theirs. Holds no tensor.
"""

from __future__ import annotations

import gc
import itertools
import re
from collections import UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from grpo_run.runtime.rank.memory_trace import growth
from grpo_run.runtime.rank.memory_trace.census import tensor_types
from grpo_run.runtime.rank.memory_trace.growth import ENOUGH
from grpo_run.runtime.rank.memory_trace.holders import Holder
from grpo_run.runtime.rank.memory_trace.ledger import StorageEntry
from grpo_run.runtime.rank.memory_trace.referrers import reached

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


KEPT_SHARE = 0.75
"""Of what was made since an earlier look, how much a holder must have more than then. The rest has replaced something."""
LEAST_BYTES = 64 * 1024 * 1024
"""What may stop growing is not worth a line below."""
LONGER_VALUES = 1.25
"""How many times more tensors for each key are growth of the values."""
MOST_KEYS = 64
"""Keys that are looked at, the last ones."""
MOST_BELOW_KEY = 1000
"""Objects below one key that are looked at."""


@dataclass(frozen=True, kw_only=True)
class ContainerLook:
    """What a holder had.

    Attributes:
        step: after which it was looked at.
        storages: that it held.
        length: how many items it had; None if it is no container.
    """

    step: int
    storages: int
    length: int | None


class Containers:
    """Judges holders, and remembers what they had."""

    def __init__(self) -> None:
        self._looks: dict[Hashable, ContainerLook] = {}

    def judge(
        self,
        holder: Holder,
        held: Collection[StorageEntry],
        kind: str,
        entries_of: Callable[[Collection[Any]], list[StorageEntry]],
        torch: Any,
        *,
        first: int,
        now: int,
        above: bool = False,
    ) -> str | None:
        """Return the kind of a finding: what it is if the holder leaks, `filling` if it may stop growing; None if it is none.

        Args:
            held: storages that the holder keeps.
            kind: `growth` or `graph`.
            entries_of: returns what is known of the storages of some tensors.
            torch: the module.
            first: the first step that was looked at.
            now: the step that has ended.
            above: it holds a container that ends with its epoch, and leaks only if it has more of these from epoch to epoch.
        """
        births = {one.born for one in held}
        earlier = self._earlier(holder, len(held), births, now)
        if above and (earlier is None or _length(holder.container) <= (earlier.length or 0)):
            return None
        # graphs of a whole epoch are a mistake, though their list is of the epoch; tensors may be meant
        bounded = holder.bounded or holder.is_set_by_place or (holder.made_anew and kind != "graph")
        if holder.limited or not growth.grows(births, first=first, now=now, bounded=bounded):
            return None
        items = _items(holder.container)
        if kind == "graph" or not (items or bounded):
            return kind
        if earlier is None or not _has_more(earlier, held):
            return None
        if items:
            last = items[-MOST_KEYS:]
            of_model = not holder.is_attributes and are_of_model([key for key, _ in last], torch)
            if _is_leak_by_key(last, entries_of, torch, of_model=of_model):
                return kind
            if of_model:
                return None
            before = earlier.storages / max(earlier.length or 0, 1)
            leaks = len(held) > LONGER_VALUES * before * len(items)
        else:
            leaks = True
            if holder.container is not None and _length(holder.container) == earlier.length:
                return None
        if leaks and not bounded:
            return kind
        return "filling" if sum(one.bytes for one in held) >= LEAST_BYTES else None

    def _earlier(
        self, holder: Holder, storages: int, births: Collection[int], now: int
    ) -> ContainerLook | None:
        """Return an earlier look at a holder, if something was made in several steps since then, and remember this one."""
        same: Hashable = holder.identity
        if holder.name is not None and not _items(holder.container):
            same = holder.name.variable  # code may put all of it into a new list
        look = self._looks.get(same)
        if look is not None and sum(born > look.step for born in births) < growth.SUSPICIOUS:
            return None
        length = _length(holder.container) if holder.container is not None else None
        self._looks[same] = ContainerLook(step=now, storages=storages, length=length)
        return look


def _has_more(earlier: ContainerLook, held: Collection[StorageEntry]) -> bool:
    made = sum(one.born > earlier.step for one in held)
    return len(held) - earlier.storages >= KEPT_SHARE * made


def _is_leak_by_key(
    items: Collection[tuple[Any, Any]],
    entries_of: Callable[[Collection[Any]], list[StorageEntry]],
    torch: Any,
    *,
    of_model: bool,
) -> bool:
    """Whether keys are made anew in each step.

    Names of a model's layers have numbers that may follow the steps, too. A pair of a name and a step has both.
    """
    keys = [key for key, _ in items]
    parameter = torch.nn.Parameter
    if all(
        any(isinstance(one, torch.Tensor) and not isinstance(one, parameter) for one in _parts(key))
        for key in keys
    ):
        return True
    if of_model and not any(isinstance(key, tuple) for key in keys):
        return False
    kinds = tensor_types(torch)
    born = [(key, entries_of(reached([value], kinds, MOST_BELOW_KEY))) for key, value in items]
    return follow_steps([(key, max(one.born for one in entries)) for key, entries in born if entries])


def _parts(key: Any) -> Collection[Any]:
    """Return the parts of a key: the arguments of a cached call are one."""
    return key if isinstance(key, (tuple, list, frozenset)) else (key,)


def _items(container: Any) -> list[tuple[Any, Any]]:
    """Return the items of a dictionary, without running code of its class or keys; none of something else."""
    if isinstance(container, UserDict):
        container = container.data
    return list(dict.items(container)) if isinstance(container, dict) else []


def _length(container: Any) -> int:
    """Return how many items a container has, without running code of its class."""
    if isinstance(container, (UserDict, UserList)):
        container = container.data
    kinds: tuple[Any, ...] = (dict, list, tuple, set, frozenset, deque)
    return next((int(kind.__len__(container)) for kind in kinds if isinstance(container, kind)), 0)
