"""What each rank of a loop saves for itself: plain values, stateful objects, random generators, position in the data.

It is a part of the rank's file of the exact state (`exact/format.py`), so none of it is unpickled. Called by
`contents.py` when a checkpoint is written and by `run.py` when one is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from grpo_run.runtime.errors import CheckpointError, ConfigError
from grpo_run.trainers.exact import format
from grpo_run.trainers.exact.callback_state import GENERATORS
from grpo_run.trainers.exact.data_order import global_rng, set_global_rng
from grpo_run.trainers.exact.encoding import Decoder, UnsupportedValueError, encode
from grpo_run.trainers.exact.format import SavedRankState
from grpo_run.trainers.loops.data_position import DataPosition
from grpo_run.trainers.loops.state import LoopState
from grpo_run.trainers.loops.values.in_place import InPlace, path_of, shared_objects

VALUES, SHARED, OBJECTS, GENERATOR_STATES, RANDOM, DATA, GRADIENT_ORDERS = (
    "values", "shared", "objects", "generators", "random", "data", "gradient_orders",
)  # fmt: skip


class Randomness:
    """The global random generators of this process, and those of the loop's `state`."""

    def __init__(self, generators: dict[str, Any]) -> None:
        self._generators = generators

    def state(self) -> dict[str, Any]:
        """Return the state of every generator."""
        return {RANDOM: {**global_rng(), "cuda": _cuda_state()}, GENERATOR_STATES: self._read()}

    def _read(self) -> dict[str, Any]:
        return {key: _accessors(one)[0](one) for key, one in self._generators.items()}

    def set(self, state: dict[str, Any]) -> None:
        """Restore the result of `state`.

        Raises:
            CheckpointError: `state` is not such a result.
        """
        set_global_rng(state[RANDOM])
        cuda = state[RANDOM].get("cuda")
        if cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(cuda)
        for key, one in self._generators.items():
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
    *,
    rank: int,
    world_size: int,
    step: int,
    state: LoopState,
    randomness: Randomness,
    data: DataPosition | None,
    gradient_orders: dict[str, list[int]],
    guards: Any,
) -> None:
    """Write this rank's file.

    Args:
        folder: the checkpoint's directory.
        guards: the state of the learning guards, as plain JSON values.

    Raises:
        ConfigError: an entry of the loop's state is of a type that a checkpoint cannot hold.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts = {
        VALUES: state.values,
        SHARED: shared_objects(state.values),
        OBJECTS: {key: one.state_dict() for key, one in state.others.items()},
        **randomness.state(),
        DATA: data.state() if data is not None else None,
        GRADIENT_ORDERS: gradient_orders,
    }
    encoded = {part: _encoded(value, tensors) for part, value in parts.items()}
    (folder / format.FOLDER).mkdir(mode=0o700, parents=True, exist_ok=True)
    saved = SavedRankState(
        schema_version=format.SCHEMA,
        rank=rank,
        world_size=world_size,
        step=step,
        guards=guards,
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
            f"{error} in a loop, which a checkpoint cannot hold: give an object with state_dict and load_state_dict, a"
            " random generator, or numbers, strings, tensors and containers of these"
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
        self.guards = saved.guards
        self.folder = folder
        self._parts = {part: decoder(value) for part, value in saved.loop.items()}

    @property
    def randomness(self) -> dict[str, Any]:
        """The argument of `Randomness.set`."""
        return self._parts

    @property
    def data(self) -> Any:
        """The argument of `DataPosition.load`; None if the loop read no data."""
        return self._parts.get(DATA)

    @property
    def gradient_orders(self) -> dict[str, list[int]]:
        """The order of gradients by key of the module."""
        orders: dict[str, list[int]] = self._parts.get(GRADIENT_ORDERS) or {}
        return orders

    def restore(self, state: LoopState) -> None:
        """Set the plain values and the stateful objects, in place where that is possible.

        Raises:
            CheckpointError: the checkpoint does not contain an entry.
        """
        values, objects = self._parts[VALUES], self._parts[OBJECTS]
        for key in (*state.values, *state.others):
            if key not in values and key not in objects:
                raise CheckpointError(
                    f"{self.folder} does not contain state[{key!r}] of the loop; use the state that was saved, or"
                    " start another run with --run-id"
                )
        in_place = InPlace(self._parts.get(SHARED) or ())
        for key, present in state.values.items():
            state.entries[key] = in_place.set(present, values[key], path_of(key))
        for key, one in state.others.items():
            one.load_state_dict(objects[key])
