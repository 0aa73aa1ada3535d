"""Find the training script, and the environment variables that its source sets.

A rank that is forked from the warm interpreter has imported its libraries already. If the script sets a
variable that they read at import, the rank must be a fresh interpreter instead. Called by
`cli.launch_options`. Reads syntax only: an assignment in another module, or to a computed name, is not found;
`--no-preload` is for those scripts.
"""

from __future__ import annotations

import ast
import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path

from grpo_run.runtime.errors import UsageError

READ_AT_IMPORT = re.compile(
    r"(HF|HUGGINGFACE|TRANSFORMERS|DATASETS|TRL|PYTORCH|TORCH|TORCHINDUCTOR|OMP|KMP|MKL|OPENBLAS|GOMP)_\w+"
    r"|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_HOME|DS_\w+|DEEPSPEED_\w+|USE_TORCH|USE_TF|USE_LIBUV|XDG_CACHE_HOME"
    r"|LD_\w+|PYTHON\w+|ACCELERATE_USE_\w+"
)
"""Variables that Python, torch, transformers, datasets, huggingface_hub, DeepSpeed or an OpenMP runtime read at import.
"""


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


def variables_set(source: str) -> set[str]:
    """Return the names of the environment variables that the source assigns, in any of the usual ways.

    Source with a syntax error yields none: Python reports the error better when it runs the script.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
            names |= _texts(node.slice)  # assigned or deleted, alone or among others
        elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
            names |= _keys(node.value)  # os.environ |= {...}
        elif isinstance(node, ast.Call):
            names |= _names_in_call(node)
    return names


def _names_in_call(node: ast.Call) -> set[str]:
    function = node.func
    if not isinstance(function, ast.Attribute):
        return (
            _texts(node.args[0])
            if isinstance(function, ast.Name) and function.id == "putenv" and node.args
            else set()
        )
    if function.attr in ("putenv", "unsetenv") and node.args:
        return _texts(node.args[0])
    if not _is_environ(function.value):
        return set()
    if function.attr in ("setdefault", "pop") and node.args:
        return _texts(node.args[0])
    if function.attr == "update":
        names = {keyword.arg for keyword in node.keywords if keyword.arg}
        for argument in node.args:
            names |= _keys(argument)
        return names
    return set()


def _keys(node: ast.expr) -> set[str]:
    """Return the literal keys of `{...}` or `dict(...)`."""
    if isinstance(node, ast.Dict):
        return set().union(*(_texts(key) for key in node.keys if key is not None))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict":
        return {keyword.arg for keyword in node.keywords if keyword.arg}
    return set()


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )


def _texts(node: ast.expr) -> set[str]:
    return {node.value} if isinstance(node, ast.Constant) and isinstance(node.value, str) else set()


def needs_fresh_interpreter(path: Path) -> set[str]:
    """Return the variables that the script sets and that libraries read at import.

    If there are any, the script cannot be forked from the warm interpreter.

    Raises:
        UsageError: the script cannot be read.
    """
    try:
        source = path.read_text(errors="replace")
    except OSError as error:
        raise UsageError(f"script {path} cannot be read: {error.strerror}") from error
    return {name for name in variables_set(source) if READ_AT_IMPORT.fullmatch(name)}
