"""Save and restore the state that the script's own callbacks keep, such as the patience of early stopping.

A callback with `state_dict` and `load_state_dict` decides for itself. Of any other, the attributes that have
changed since the `train()` call began are saved, if they are numbers, strings, tensors, random generators or
containers of these. Attributes that do not change are settings: the script sets them again, perhaps to new
values. Callbacks are found again by class and order, and restored in place, because other objects may refer to
them. (transformers restores callbacks only if `restore_callback_states_from_checkpoint` is set, and then replaces
them by new objects.) Called by `state.py`. Does not call a callback's events.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from grpo_run.trainers.exact.encoding import Decoder, Encoder, UnsupportedValueError, encode, is_stateful
from grpo_run.trainers.exact.format import CallbackState

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


class CallbackStates:
    """The states of a trainer's callbacks in one `train()` call.

    Args:
        callbacks: the script's and the libraries' callbacks, before the call begins.
        warn: called with one line for each callback with attributes that cannot be saved.
    """

    def __init__(self, callbacks: Sequence[Any], warn: Callable[[str], None]) -> None:
        self._callbacks = [callback for callback in callbacks if _has_state(callback)]
        self._at_begin: list[dict[str, str]] = []
        for callback in self._callbacks:
            digests, unsupported = _digests(callback)
            self._at_begin.append(digests)
            if unsupported:
                names = ", ".join(f"{name} ({kind})" for name, kind in unsupported.items())
                warn(
                    f"callback {type(callback).__qualname__}: checkpoints cannot hold {names};"
                    " after a recovery, the script's initial value is used"
                )

    def save(self, encoder: Encoder) -> list[CallbackState]:
        """Return the state of every callback that has one."""
        saved = []
        for callback, at_begin in zip(self._callbacks, self._at_begin, strict=True):
            name = _name(callback)
            if is_stateful(callback):
                state = encoder(callback.state_dict(), f"the state of callback {name}")
                saved.append(CallbackState(name=name, state_dict=state))
                continue
            digests, _ = _digests(callback)
            changed = {
                attribute: encoder(_readable(getattr(callback, attribute)), f"{name}.{attribute}")
                for attribute, digest in digests.items()
                if at_begin.get(attribute) != digest
            }
            saved.append(CallbackState(name=name, attributes=changed))
        return saved

    def restore(self, saved: Sequence[CallbackState], decoder: Decoder) -> str | None:
        """Set the saved states in the script's callbacks.

        Returns:
            None, or a warning about states of callbacks that the script does not have.
        """
        present: defaultdict[str, deque[Any]] = defaultdict(deque)
        for callback in self._callbacks:
            present[_name(callback)].append(callback)
        absent = []
        for state in saved:
            if present[state.name]:
                _restore(present[state.name].popleft(), state, decoder)
            elif state.state_dict is not None or state.attributes:
                absent.append(state.name)
        if not absent:
            return None
        return f"the checkpoint contains the state of callbacks that the script does not have: {', '.join(absent)}"


def _has_state(callback: Any) -> bool:
    of_library = f"{type(callback).__module__}.".startswith(LIBRARIES)
    return not of_library or isinstance(callback, ExportableState)


def _name(callback: Any) -> str:
    return type(callback).__qualname__


def _attributes(callback: Any) -> Iterator[tuple[str, Any]]:
    for name, value in getattr(callback, "__dict__", {}).items():
        if not callable(value) and not isinstance(value, NOT_STATE):
            yield name, value


def _readable(value: Any) -> Any:
    """Return a value in types that can be encoded: a generator as its state."""
    for kind, (read, _) in GENERATORS.items():
        if isinstance(value, kind):
            return {GENERATOR: kind.__name__, "state": read(value)}
    return value


def _digests(callback: Any) -> tuple[dict[str, str], dict[str, str]]:
    """Return a digest of each attribute that can be saved, and the types of those that cannot."""
    digests: dict[str, str] = {}
    unsupported: dict[str, str] = {}
    if is_stateful(callback):
        return digests, unsupported
    for name, value in _attributes(callback):
        tensors: dict[str, torch.Tensor] = {}
        try:
            encoded = encode(_readable(value), tensors, name)
        except UnsupportedValueError:
            unsupported[name] = type(value).__qualname__
            continue
        digest = hashlib.sha256(json.dumps(encoded).encode())
        for tensor in tensors.values():
            digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()
    return digests, unsupported


def _restore(callback: Any, saved: CallbackState, decoder: Decoder) -> None:
    if saved.state_dict is not None and is_stateful(callback):
        callback.load_state_dict(decoder(saved.state_dict))
    for name, encoded in saved.attributes.items():
        value, present = decoder(encoded), getattr(callback, name, None)
        if isinstance(value, dict) and GENERATOR in value:
            for kind, (_, write) in GENERATORS.items():
                if isinstance(present, kind):
                    write(present, value["state"])
        elif isinstance(present, dict) and isinstance(value, dict):
            present.clear()
            present.update(value)
        elif isinstance(present, (list, deque)) and isinstance(value, (list, deque)):
            present.clear()
            present.extend(value)
        elif isinstance(present, set) and isinstance(value, set):
            present.clear()
            present.update(value)
        else:
            setattr(callback, name, value)
