"""What each rank of a loop saves for itself: values, stateful objects, random state, data position.

It is part of the rank's file of the exact state (`runtime/rank/exact/format.py`), so none of it is
unpickled. Called by `run.py` when a checkpoint is written and when one is loaded.

Values are restored in place, because a list in the script's dictionary is usually a variable of the script,
too. Objects that were one when the values were saved are one again; objects that were different stay
different, even if the script begins with the same one for both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.runtime.rank.exact import format
from grpo_run.runtime.rank.exact.callback_state import GENERATORS
from grpo_run.runtime.rank.exact.data_order import global_rng, set_global_rng
from grpo_run.runtime.rank.exact.encoding import Decoder, UnsupportedValueError, encode, refill
from grpo_run.runtime.rank.exact.format import SavedRankState
from grpo_run.runtime.rank.loops._state import LoopState
from grpo_run.runtime.rank.loops.data_position import DataPosition

MUTABLE = (list, dict, set, deque, torch.Tensor, np.ndarray)
SEPARATOR = "/"


def shared_objects(values: Mapping[str, Any]) -> list[list[str]]:
    """Return the paths of each object that occurs more than once in values."""
    found: dict[int, list[str]] = {}
    for path, value in _objects(values, ""):
        found.setdefault(id(value), []).append(path)
    return [paths for paths in found.values() if len(paths) > 1]


def _objects(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, MUTABLE) and path:
        yield path, value
    for key, item in _items(value):
        if isinstance(item, (*MUTABLE, tuple)):
            yield from _objects(item, _below(path, key))


def _items(value: Any) -> Iterable[tuple[Hashable, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    return enumerate(value) if isinstance(value, (list, tuple, deque)) else ()


def _below(path: str, key: Hashable) -> str:
    return f"{path}{SEPARATOR}{key!r}"


class InPlace:
    """One restoration.

    Args:
        shared: result of `shared_objects` when the values were saved.
    """

    def __init__(self, shared: Iterable[Sequence[str]]) -> None:
        self._groups = {path: number for number, paths in enumerate(shared) for path in paths}
        self._restored: dict[int, Any] = {}
        self._used: set[int] = set()

    def set(self, present: Any, value: Any, path: str) -> Any:
        """Return what the script's dictionary is to hold: `present` with the content of `value`, if that is
        possible.

        Args:
            present: what the script has now; anything if it has nothing.
            value: decoded; not used afterwards.
            path: `key` of the entry, as `path_of` returns it.
        """
        group = self._groups.get(path)
        if group in self._restored and group is not None:
            return self._restored[group]
        if isinstance(present, MUTABLE):
            if id(present) in self._used:
                present = None
            else:
                self._used.add(id(present))
        result = self._fill(present, value, path)
        if group is not None:
            self._restored[group] = result
        return result

    def _fill(self, present: Any, value: Any, path: str) -> Any:
        if isinstance(present, torch.Tensor) and isinstance(value, torch.Tensor):
            if present.shape == value.shape and present.dtype == value.dtype:
                with torch.no_grad():
                    present.copy_(value)
                return present
            return value
        if isinstance(present, np.ndarray) and isinstance(value, np.ndarray):
            if present.shape == value.shape and present.dtype == value.dtype and present.flags.writeable:
                present[...] = value
                return present
            return value
        if isinstance(present, np.generic) and isinstance(value, (bool, int, float)):
            return type(present)(value)
        if isinstance(value, dict):
            before: Mapping[Any, Any] = present if isinstance(present, dict) else {}
            items = {key: self.set(before.get(key), item, _below(path, key)) for key, item in value.items()}
            if not isinstance(present, dict):
                return items
            present.clear()
            present.update(items)
            return present
        if isinstance(value, (list, tuple, deque)):
            return self._fill_sequence(present, value, path)
        return present if refill(present, value) else value

    def _fill_sequence(self, present: Any, value: Any, path: str) -> Any:
        same = (type(value) is tuple and isinstance(present, tuple)) or isinstance(present, type(value))
        before: Sequence[Any] = list(present) if same else ()
        items = [
            self.set(before[index] if index < len(before) else None, item, _below(path, index))
            for index, item in enumerate(value)
        ]
        if isinstance(value, tuple):
            named = same and hasattr(present, "_fields") and len(items) == len(present)
            return type(present)(*items) if named else tuple(items)
        if not same or (isinstance(value, deque) and present.maxlen != value.maxlen):
            return deque(items, value.maxlen) if isinstance(value, deque) else items
        present.clear()
        present.extend(items)
        return present


def path_of(key: str) -> str:
    """Return the path of an entry."""
    return _below("", key)


VALUES, SHARED, OBJECTS, GENERATOR_STATES, RANDOM, DATA, GRADIENT_ORDERS = (
    "values", "shared", "objects", "generators", "random", "data", "gradient_orders",
)  # fmt: skip


def random_state(generators: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of the global random generators and of those of the loop's `state`."""
    own = {key: _accessors(one)[0](one) for key, one in generators.items()}
    return {RANDOM: {**global_rng(), "cuda": _cuda_state()}, GENERATOR_STATES: own}


def set_random_state(generators: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Restore the result of `random_state`.

    Raises:
        CheckpointError: `state` is not such a result.
    """
    set_global_rng(state[RANDOM])
    cuda = state[RANDOM].get("cuda")
    if cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(cuda)
    for key, one in generators.items():
        if key not in state[GENERATOR_STATES]:
            raise CheckpointError(f"the checkpoint does not contain state[{key!r}] of the loop")
        _accessors(one)[1](one, state[GENERATOR_STATES][key])


def _accessors(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(both for kind, both in GENERATORS.items() if isinstance(generator, kind))


def _cuda_state() -> torch.Tensor | None:
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # type: ignore[no-untyped-call]
        return None
    return torch.cuda.get_rng_state()


def save(
    folder: Path,
    state: LoopState,
    *,
    step: int,
    data: DataPosition | None,
    gradient_orders: dict[str, list[int]],
    features: Any,
) -> None:
    """Write this rank's file.

    Args:
        folder: the checkpoint's directory.
        features: the state of features, as plain JSON values.

    Raises:
        ConfigError: an entry of the loop's state is of a type that a checkpoint cannot hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts = {
        VALUES: state.values,
        SHARED: shared_objects(state.values),
        OBJECTS: {key: one.state_dict() for key, one in state.others.items()},
        **random_state(state.generators),
        DATA: data.state() if data is not None else None,
        GRADIENT_ORDERS: gradient_orders,
    }
    encoded = {part: _encoded(value, tensors) for part, value in parts.items()}
    saved = SavedRankState(
        schema_version=format.SCHEMA,
        rank=state.rank,
        world_size=state.world_size,
        step=step,
        guards=features,
        loop=encoded,
    )
    format.write(folder, saved, tensors)


def check_values(state: LoopState) -> None:
    """Check at the start that the plain values can be saved.

    Raises:
        ConfigError: one cannot.
    """
    _encoded(state.values, {})


def _encoded(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    try:
        return encode(value, tensors, "state")
    except UnsupportedValueError as error:
        raise ConfigError(
            f"{error} in a loop, which a checkpoint cannot hold: give an object with state_dict and"
            " load_state_dict, a random generator, or numbers, strings, tensors and containers of these"
        ) from error


class LoadedRankState:
    """This rank's file of a checkpoint.

    Args:
        device: of tensors that were not on the CPU.

    Raises:
        CheckpointError: the file is missing or invalid, or not of a loop.
    """

    def __init__(self, folder: Path, rank: int, device: torch.device) -> None:
        saved, tensors = format.read(folder, rank)
        source = str(format.rank_state_path(folder, rank))
        if not isinstance(saved.loop, dict):
            raise CheckpointError(f"{source} is not of a loop")
        decoder = Decoder(tensors, device, source)
        self.step = saved.step
        self.features = saved.guards
        self.folder = folder
        self._parts = {part: decoder(value) for part, value in saved.loop.items()}
        self.randomness = self._parts
        """The argument of `set_random_state`."""
        self.data: Any = self._parts.get(DATA)
        """The argument of `DataPosition.load`; None if the loop read no data."""
        self.gradient_orders: dict[str, list[int]] = self._parts.get(GRADIENT_ORDERS) or {}
        """The order of gradients by key of the module."""

    def restore(self, state: LoopState) -> None:
        """Set the plain values and the stateful objects, in place where that is possible.

        Raises:
            CheckpointError: the checkpoint does not contain an entry.
        """
        values, objects = self._parts[VALUES], self._parts[OBJECTS]
        for key in (*state.values, *state.others):
            if key not in values and key not in objects:
                raise CheckpointError(
                    f"{self.folder} does not contain state[{key!r}] of the loop; use the state that was"
                    " saved, or start another run with --run-id"
                )
        in_place = InPlace(self._parts.get(SHARED) or ())
        for key, present in state.values.items():
            state.entries[key] = in_place.set(present, values[key], path_of(key))
        for key, one in state.others.items():
            one.load_state_dict(objects[key])
