"""Pickles reward functions and their arguments by value, and names those that cannot be sent to another
process.

By value means with their code: what the script and the modules beside it define is part of the pickle, so
    that a worker
never imports them. Other libraries are imported by the worker. Called by `_service.py` in the rank and by
`_worker.py`.
"""

from __future__ import annotations

import functools
import inspect
import io
import os
import pickle
import random
import site
import sys
import types
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, NamedTuple

import cloudpickle

MAX_PAYLOAD_BYTES = 64 * 1024 * 1024
"""A function or a batch above this stays in the rank: copying it would take longer than most functions."""
_GENERATORS = ("random", "numpy", "torch")


class StaysInRankError(Exception):
    """A reward function that cannot run in a worker. The message completes "stays in the rank: it ..."."""


class Packed(NamedTuple):
    """A pickled object (`content`), and the names of the modules that are imported when it is loaded."""

    content: bytes
    modules: frozenset[str]


def pack_function(function: Any) -> Packed:
    """Pickle a reward function.

    Raises:
        StaysInRankError: it cannot be pickled, it holds a model or a device, or it is too large.
    """
    reason = _obvious_reason(function)
    if reason is not None:
        raise StaysInRankError(reason)
    try:
        with _by_value(_modules_of_the_script()):
            packed = dump(function)
    except StaysInRankError:
        raise
    except Exception:  # noqa: BLE001 - a module beside the script holds something that cannot be pickled
        packed = _dumped(function, "cannot be pickled")  # the worker imports these modules then
    if len(packed.content) > MAX_PAYLOAD_BYTES:
        raise StaysInRankError(f"is larger than {MAX_PAYLOAD_BYTES // 2**20} MiB")
    return packed


def pack_arguments(arguments: dict[str, Any]) -> bytes:
    """Pickle the keyword arguments of a call.

    Raises:
        StaysInRankError: they cannot be pickled, or they are too large.
    """
    content = _dumped(arguments, "gets columns that cannot be pickled").content
    if len(content) > MAX_PAYLOAD_BYTES:
        raise StaysInRankError(f"gets more than {MAX_PAYLOAD_BYTES // 2**20} MiB in one call")
    return content


def _dumped(value: Any, problem: str) -> Packed:
    try:
        return dump(value)
    except StaysInRankError:
        raise
    except Exception as error:
        raise StaysInRankError(f"{problem} ({_line(error)})") from error


def dump(value: Any) -> Packed:
    """Pickle any value by value."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return Packed(buffer.getvalue(), frozenset(pickler.modules))


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.modules: set[str] = set()

    def reducer_override(self, value: Any) -> Any:
        """Refuse what belongs to the rank, and note the modules that loading imports."""
        if isinstance(value, types.ModuleType):
            self._note(value.__name__)
        elif isinstance(value, (type, types.FunctionType)):
            self._note(str(value.__module__))
        elif isinstance(value, functools._lru_cache_wrapper) and not _is_importable(value.__wrapped__):
            # by default it is looked up by its name, which a worker cannot
            return _cached_again, (value.__wrapped__, value.cache_parameters())
        elif type(value) is ThreadPoolExecutor and getattr(value, "_initializer", value) is None:
            return ThreadPoolExecutor, (value._max_workers,)  # its threads stay here, and what they do
        elif isinstance(value, random.Random) or type(value).__name__ in ("RandomState", "Generator"):
            # the process's own generators are not copied: the worker's are in the same state
            for name in _GENERATORS:
                if name in sys.modules and value is generator(name):
                    return generator, (name,)
        else:
            reason = _belongs_to_rank(value)
            if reason is not None:
                raise StaysInRankError(reason)
        return super().reducer_override(value)

    def _note(self, module: str) -> None:
        if module not in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
            self.modules.add(module)


def generator(name: str) -> Any:
    """Return the global generator of this process of a library: `random`, `numpy` or `torch`."""
    if name == "random":
        return getattr(random.seed, "__self__", None)  # a method of it
    if name == "numpy":
        import numpy

        return numpy.random.mtrand._rand
    import torch

    return torch.default_generator


def inner_function(function: Any) -> Any:
    """Return the function of the script that a call runs: without wrappers, and of a method or an object that
    can be called.
    """
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not hasattr(function, "__code__"):
        function = inspect.unwrap(getattr(function, "__func__", None) or type(function).__call__)
    return function


def _cached_again(function: Any, parameters: dict[str, Any]) -> Any:
    return functools.lru_cache(**parameters)(function)


def _obvious_reason(function: Any) -> str | None:
    seen = 0
    while function is not None and seen < 100:
        if hasattr(function, "forward") or isinstance(function, type):
            return "is a model" if hasattr(function, "forward") else "is a class"
        if callable(getattr(function, "state_dict", None)) and callable(
            getattr(function, "load_state_dict", None)
        ):
            return "has a state_dict, which checkpoints contain"
        function, seen = getattr(function, "__wrapped__", None), seen + 1
    return None


def _belongs_to_rank(value: Any) -> str | None:
    torch = sys.modules.get("torch")
    if torch is None:
        return None
    if isinstance(value, torch.nn.Module):
        return "holds a model"
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return f"holds a tensor on {value.device}"
    return None


def _is_importable(function: Any) -> bool:
    """Whether a function is pickled by its name."""
    module = sys.modules.get(str(function.__module__))
    if module is None or module.__name__ in ("__main__", *cloudpickle.list_registry_pickle_by_value()):
        return False
    found: Any = module
    for part in function.__qualname__.split("."):
        found = getattr(found, part, None)
    return found is function


def _modules_of_the_script() -> list[types.ModuleType]:
    """The loaded modules whose files are beside the script or below the working directory, without installed
    ones.
    """
    main = getattr(sys.modules.get("__main__"), "__file__", None)
    roots = {os.getcwd(), *([os.path.dirname(os.path.realpath(main))] if main else [])}
    installed = tuple(os.path.realpath(path) + os.sep for path in (sys.prefix, sys.base_prefix, *_sites()))
    found = []
    for name, module in list(sys.modules.items()):
        path = getattr(module, "__file__", None)
        if not isinstance(path, str) or name.partition(".")[0] in ("grpo_run", "__main__"):
            continue
        path = os.path.realpath(path)
        if not path.startswith(installed) and any(path.startswith(root + os.sep) for root in roots):
            found.append(module)
    return found


def _sites() -> list[str]:
    return [*site.getsitepackages(), site.getusersitepackages()]


@contextmanager
def _by_value(modules: Collection[types.ModuleType]) -> Iterator[None]:
    registered = []
    try:
        for module in modules:
            if module.__name__ not in cloudpickle.list_registry_pickle_by_value():
                cloudpickle.register_pickle_by_value(module)
                registered.append(module)
        yield
    finally:
        for module in registered:
            cloudpickle.unregister_pickle_by_value(module)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]
