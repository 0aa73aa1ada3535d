"""Find the training script: the file that a path or the name of a module leads to. Called by `cli.launch_options`."""

from __future__ import annotations

import importlib.machinery
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from grpo_run.runtime.errors import UsageError


def source_of(target: str, *, module: bool) -> Path:
    """Return the file that will run.

    Raises:
        UsageError: the script or module does not exist.
    """
    if not module:
        path = Path(target)
        if not path.is_file():
            kind = "is a directory" if path.is_dir() else "does not exist"
            raise UsageError(f"script {target} {kind}; give the path of a Python file, or a module with -m")
        return path
    spec = _find_module(target)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_module(f"{target}.__main__")
    if spec is None or spec.origin is None:
        raise UsageError(
            f"module {target} cannot be found (or has no __main__); is it installed, or did you mean a path?"
        )
    return Path(spec.origin)


def _find_module(name: str) -> ModuleSpec | None:
    """Find a module without importing its parent packages, which would run the user's code in the supervisor."""
    path: Sequence[str] | None = None
    spec: ModuleSpec | None = None
    parts = name.split(".")
    for depth in range(len(parts)):
        qualified = ".".join(parts[: depth + 1])
        # the working directory first, as for `python -m`; a plain folder there does not hide an installed
        # package
        spec = importlib.machinery.PathFinder.find_spec(
            qualified, [os.getcwd(), *sys.path] if path is None else path
        )
        for finder in sys.meta_path:
            try:
                spec = spec or finder.find_spec(qualified, path)
            except (ImportError, ValueError):
                continue
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or ())
    return spec
