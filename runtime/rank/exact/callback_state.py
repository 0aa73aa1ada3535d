"""Save and restore the state that the script's own callbacks keep, such as the patience of early stopping.

A callback with `state_dict` and `load_state_dict` decides for itself. Of any other, the attributes that have
changed since the `train()` call began are saved, if they are numbers, strings, tensors, random generators or
containers of these. Attributes that do not change are settings: the script sets them again, perhaps to new
values.

Before anything is restored, the script's `on_train_begin` has run again. An attribute that it left as at the
earlier start, such as a counter at zero, is state and is restored. One that it left otherwise is new, such as
the id of the run that a tracker has opened, and is kept, so that what it names and the open connection belong
together. Tensors and random generators are always restored: a moving average of the weights begins with the
weights, which differ at each start.

Callbacks are found again by class and order, and restored in place, because other objects may refer to them.
(transformers restores callbacks only if `restore_callback_states_from_checkpoint` is set, and then replaces
them by new objects.) Called by `state.py`. Does not call a callback's events.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from grpo_run.runtime.rank.exact import encoding
from grpo_run.runtime.rank.exact.encoding import Decoder, Encoder, encode, is_stateful, refill
from grpo_run.runtime.rank.exact.format import CallbackState

LIBRARIES = ("transformers.", "grpo_run.")
"""Modules whose callbacks keep nothing that training depends on, unless they say so by `ExportableState`."""
NOT_STATE = (torch.nn.Module, torch.optim.Optimizer, Trainer, torch.utils.data.Dataset)
"""Types of attributes that refer to what is saved elsewhere."""
GENERATORS: Mapping[type, tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]] = {
    random.Random: (lambda one: one.getstate(), lambda one, state: one.setstate(state)),
    np.random.Generator: (
        lambda one: one.bit_generator.state,
        lambda one, state: setattr(one.bit_generator, "state", state),
    ),
    torch.Generator: (lambda one: one.get_state(), lambda one, state: one.set_state(state)),
}
"""How the state of a random generator is read and set."""
GENERATOR = "generator"
"""Key of an encoded attribute that is a generator's state."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Attribute:
    """One attribute of a callback, as it is at one moment.

    `digest` is of its value, or of the identity of an object that cannot be saved, whose type is then
    `unsupported`. `is_numeric`: a tensor or a generator is in it.
    """

    digest: str
    is_numeric: bool = False
    unsupported: str = ""


class CallbackStates:
    """The states of a trainer's callbacks in one `train()` call.

    Args:
        callbacks: the script's and the libraries' callbacks, before the call begins.
        warn: called with one line for each attribute that has changed and cannot be saved.
    """

    def __init__(self, callbacks: Sequence[Any], warn: Callable[[str], None]) -> None:
        self._callbacks = [callback for callback in callbacks if _has_state(callback)]
        self._warn = warn
        self._before = [_attributes(callback) for callback in self._callbacks]
        self._begun = self._before
        """What `on_train_begin` has left."""

    def begin(self) -> None:
        """Note what `on_train_begin` has left. Call it when that event has reached every callback, before
        `restore`.
        """
        self._begun = [_attributes(callback) for callback in self._callbacks]

    def save(self, encoder: Encoder) -> list[CallbackState]:
        """Return the state of every callback that has one."""
        saved = []
        for callback, before, begun in zip(self._callbacks, self._before, self._begun, strict=True):
            name = _name(callback)
            if is_stateful(callback):
                state = encoder(callback.state_dict(), f"the state of callback {name}")
                saved.append(CallbackState(name=name, state_dict=state))
                continue
            changed: dict[str, Any] = {}
            left: dict[str, str | None] = {}
            for attribute, now in _attributes(callback).items():
                if now == before.get(attribute) == begun.get(attribute):
                    continue
                if now.unsupported:
                    if now != begun.get(attribute):  # else `on_train_begin` makes it again
                        self._warn(
                            f"callback {name}: {attribute} has changed, and checkpoints cannot hold a"
                            f" {now.unsupported}; after a recovery, the script's initial value is used"
                        )
                    continue
                changed[attribute] = encoder(_readable(getattr(callback, attribute)), f"{name}.{attribute}")
                if not now.is_numeric:
                    left[attribute] = begun[attribute].digest if attribute in begun else None
            saved.append(CallbackState(name=name, attributes=changed, begun=left))
        return saved

    def restore(self, saved: Sequence[CallbackState], decoder: Decoder) -> str | None:
        """Set the saved states in the script's callbacks.

        Returns:
            None, or a warning about states of callbacks that the script does not have.
        """
        present: defaultdict[str, deque[tuple[Any, dict[str, _Attribute]]]] = defaultdict(deque)
        for callback, begun in zip(self._callbacks, self._begun, strict=True):
            present[_name(callback)].append((callback, begun))
        absent = []
        for state in saved:
            if present[state.name]:
                _restore(*present[state.name].popleft(), state, decoder)
            elif state.state_dict is not None or state.attributes:
                absent.append(state.name)
        if not absent:
            return None
        return (
            "the checkpoint contains the state of callbacks that the script does not have:"
            f" {', '.join(absent)}"
        )


def _has_state(callback: Any) -> bool:
    of_library = f"{type(callback).__module__}.".startswith(LIBRARIES)
    return not of_library or isinstance(callback, ExportableState)


def _name(callback: Any) -> str:
    return type(callback).__qualname__


def _readable(value: Any) -> Any:
    """Return a value in types that can be encoded: a generator as its state."""
    for kind, (read, _) in GENERATORS.items():
        if isinstance(value, kind):
            return {GENERATOR: kind.__name__, "state": read(value)}
    return value


def _attributes(callback: Any) -> dict[str, _Attribute]:
    """Return every attribute that may be state, by name; none of a callback that decides for itself."""
    if is_stateful(callback):
        return {}
    return {
        name: _attribute(name, value)
        for name, value in getattr(callback, "__dict__", {}).items()
        if not callable(value) and not isinstance(value, NOT_STATE)
    }


def _attribute(name: str, value: Any) -> _Attribute:
    tensors: dict[str, torch.Tensor] = {}
    try:
        encoded = encode(_readable(value), tensors, name)
    except encoding.UnsupportedValueError:
        size = len(value) if isinstance(value, (list, tuple, dict, set, deque)) else 0
        return _Attribute(digest=f"{id(value)} {size}", unsupported=type(value).__qualname__)
    digest = hashlib.sha256(json.dumps(encoded).encode())
    for tensor in tensors.values():
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return _Attribute(
        digest=digest.hexdigest(), is_numeric=bool(tensors) or isinstance(value, tuple(GENERATORS))
    )


def _restore(callback: Any, begun: Mapping[str, _Attribute], saved: CallbackState, decoder: Decoder) -> None:
    if saved.state_dict is not None and is_stateful(callback):
        callback.load_state_dict(decoder(saved.state_dict))
    for name, encoded in saved.attributes.items():
        left = begun[name].digest if name in begun else None
        if saved.begun.get(name, left) != left:
            continue  # `on_train_begin` has made another one
        value, present = decoder(encoded), getattr(callback, name, None)
        if isinstance(value, dict) and GENERATOR in value:
            for kind, (_, write) in GENERATORS.items():
                if isinstance(present, kind):
                    write(present, value["state"])
        elif not refill(present, value):
            setattr(callback, name, value)
