"""Replace the load functions of torch and safetensors, so that a trainer loads a checkpoint from memory.

`serve_loads` is used by `calls/resume.py` around the trainer's own loading, and affects only files of the directory that stands for the
checkpoint (`folder.py`). There, large files are empty. A call that reads one as transformers does gets new tensors
(`tensors.py`). For any other call the file is first written, and the library reads it. Does not decide which
checkpoint is loaded.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import Any

import safetensors
import safetensors.torch
import torch

from grpo_run.runtime.staging.index import SafetensorsFile, TorchFile
from grpo_run.trainers.loading import tensors
from grpo_run.trainers.loading.folder import ServedFolder
from grpo_run.trainers.upstream import tensor_files

_Read = Callable[[ServedFolder, str, Mapping[str, Any]], Any]
NOT_SERVED = object()
"""Returned by a reader for arguments that it does not support."""


@contextlib.contextmanager
def serve_loads(folder: ServedFolder) -> Iterator[None]:
    """Within the block, serve the large files of a folder from memory.

    In all threads; one checkpoint at a time. A module that imports a replaced function meanwhile keeps the
    replacement, which afterwards calls the original.
    """
    replaced: list[tuple[ModuleType, str, Any, Any]] = []
    active = [folder]
    # modules that are not imported have nothing to replace, and importing them takes seconds
    for names, original, argument, read in (
        (tensor_files.TORCH_LOAD, torch.load, "f", _read_torch),
        (tensor_files.SAFETENSORS_LOAD, safetensors.torch.load_file, "filename", _read_safetensors),
        (tensor_files.SAFETENSORS_OPEN, safetensors.safe_open, None, _read_nothing),
    ):
        replacement = _serving(original, argument, read, active)
        for module_name, name in names:
            module = sys.modules.get(module_name)
            if module is not None and getattr(module, name, None) is original:
                replaced.append((module, name, original, replacement))
                setattr(module, name, replacement)
    try:
        yield
    finally:
        active.clear()
        for module, name, original, replacement in reversed(replaced):
            if getattr(module, name) is replacement:  # else other code has replaced it since
                setattr(module, name, original)


def _serving(
    original: Callable[..., Any], argument: str | None, read: _Read, active: list[ServedFolder]
) -> Callable[..., Any]:
    """Wrap a library's load function.

    Args:
        argument: name of its first argument, which holds the path; None if nothing can be served.
        read: returns the file's content for these arguments, or `NOT_SERVED`.
        active: the folder to serve; empty when nothing is served any more.
    """
    # a script may have replaced the function; then its own is called, with the file written
    own = tensor_files.is_library_function(original)
    signature = inspect.signature(original) if own and argument is not None else None

    @functools.wraps(original)
    def load(*args: Any, **kwargs: Any) -> Any:
        target = args[0] if args else kwargs.get(argument or "filename")
        path = _relative_path(active[0], target) if active else None
        if path is not None:
            content = NOT_SERVED
            if signature is not None:
                try:
                    bound = signature.bind(*args, **kwargs)
                except TypeError:
                    return original(*args, **kwargs)
                bound.apply_defaults()
                content = read(active[0], path, bound.arguments)
            if content is not NOT_SERVED:
                return content
            active[0].write(path)
        return original(*args, **kwargs)

    return load


def _relative_path(folder: ServedFolder, target: Any) -> str | None:
    """Return the path of a file that is served, relative to the folder, or None for any other target."""
    if not isinstance(target, (str, os.PathLike)):
        return None
    name = os.fspath(target)
    if not isinstance(name, str):
        return None
    path = os.path.relpath(os.path.realpath(name), os.path.realpath(folder.path))
    return path if path in folder.served else None


def _read_torch(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    file, buffer = folder.served[path]
    supported = (
        isinstance(file, TorchFile)
        and arguments["weights_only"] is True
        and arguments["pickle_module"] is None
        and not arguments["mmap"]
        and not arguments["pickle_load_args"]
        and str(arguments["map_location"]) != "meta"
        and tensor_files.loads_plainly()
    )
    if not supported:
        return NOT_SERVED
    assert isinstance(file, TorchFile)
    return tensors.load_torch(
        file, buffer, folder.pool, map_location=arguments["map_location"], threads=folder.threads
    )


def _read_safetensors(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    file, buffer = folder.served[path]
    if not isinstance(file, SafetensorsFile):
        return NOT_SERVED
    return tensors.load_safetensors(
        file, buffer, folder.pool, device=arguments["device"], threads=folder.threads
    )


def _read_nothing(folder: ServedFolder, path: str, arguments: Mapping[str, Any]) -> Any:
    return NOT_SERVED
